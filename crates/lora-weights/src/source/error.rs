use crate::{Finding, HeaderError};
use lora_config::FindingLevel;
use std::io;
use std::ops::Range;
use std::time::Duration;

/// Why an adapter could not be read from a source. Every message starts with the file's URL.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// A location that is no URL of a store.
    #[error("{location}: {detail}")]
    BadLocation {
        /// The location asked for, without a password.
        location: String,
        /// What is wrong with it, and what is asked for.
        detail: String,
    },
    /// The store could not be set up.
    #[error("{url}: {source}")]
    Store {
        /// The store.
        url: String,
        /// The store's own error.
        source: Box<object_store::Error>,
    },
    /// There is no `adapter_config.json`.
    #[error("{url}: no such file; a PEFT adapter has one")]
    MissingConfig {
        /// Where it was looked for.
        url: String,
    },
    /// There is no `adapter_model.safetensors`.
    #[error("{url}: no such file{}", .instead.as_deref().map(|file| format!(", but {file}: save the adapter as one safetensors file")).unwrap_or_default())]
    MissingWeights {
        /// Where it was looked for.
        url: String,
        /// A file of another format that is there in its place.
        instead: Option<String>,
    },
    /// The peer or the store refused a read, or broke it off.
    #[error("{url}: {}bytes {} to {}: {source}", in_tensor(.tensor), .range.start, .range.end)]
    Read {
        /// The file.
        url: String,
        /// The tensor that the first of the bytes are of.
        tensor: Option<String>,
        /// The bytes asked for.
        range: Range<u64>,
        /// The store's own error.
        source: Box<object_store::Error>,
    },
    /// The peer did not answer in time.
    #[error(
        "{url}: {}{received} of {} bytes from byte {} on came in {} s",
        in_tensor(.tensor), .range.end - .range.start, .range.start, .timeout.as_secs_f32()
    )]
    Timeout {
        /// The file.
        url: String,
        /// The tensor that the first missing byte is of.
        tensor: Option<String>,
        /// The bytes asked for.
        range: Range<u64>,
        /// How many of them came.
        received: u64,
        /// The time they were given.
        timeout: Duration,
    },
    /// The peer sent fewer or more bytes than were asked for.
    #[error("{url}: {}{received} bytes came, {} were asked for from byte {} on", in_tensor(.tensor), .range.end - .range.start, .range.start)]
    Length {
        /// The file.
        url: String,
        /// The tensor that the first missing byte is of, or the last one asked for where there are more.
        tensor: Option<String>,
        /// The bytes asked for.
        range: Range<u64>,
        /// How many came.
        received: u64,
    },
    /// The file is no longer the one whose header was read.
    #[error("{url}: {}its {what} was {expected} and is {found}: the file changed while it was read; read it again", in_tensor(.tensor))]
    Changed {
        /// The file.
        url: String,
        /// The tensor that was being read.
        tensor: Option<String>,
        /// `size`, `ETag` or `time of modification`.
        what: &'static str,
        /// What it was when the header was read.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A config larger than any that means something.
    #[error("{url}: {bytes} bytes, over the limit of {limit} for a config")]
    ConfigTooLarge {
        /// The config.
        url: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A weights file over the limit that the options set.
    #[error(
        "{url}: {bytes} bytes, over the limit of {limit}; raise SourceOptions::max_file_bytes where that is meant"
    )]
    TooLarge {
        /// The file.
        url: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A config that is not text.
    #[error("{url}: not UTF-8 from byte {valid_up_to} on")]
    ConfigNotUtf8 {
        /// The config.
        url: String,
        /// Bytes that are.
        valid_up_to: usize,
    },
    /// A weights file whose header cannot be trusted.
    #[error("{url}: {source}")]
    Header {
        /// The weights file.
        url: String,
        /// What is wrong with it.
        source: HeaderError,
    },
    /// The thread or the timer that reads run on could not be made.
    #[error("{url}: {source}")]
    Runtime {
        /// The store.
        url: String,
        /// The system's error.
        source: io::Error,
    },
}

fn in_tensor(tensor: &Option<String>) -> String {
    tensor
        .as_ref()
        .map_or_else(String::new, |tensor| format!("{tensor}: "))
}

impl SourceError {
    /// The stable reason that the audit reports: `missing-config-file`, `missing-weights-file`, `unsupported-dtype`, `bad-file`, or
    /// `source-failed` where the peer or the store is at fault and not the file.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::MissingConfig { .. } => "missing-config-file",
            Self::MissingWeights { .. } => "missing-weights-file",
            Self::Header { source, .. } => source.reason(),
            Self::ConfigNotUtf8 { .. } | Self::ConfigTooLarge { .. } | Self::TooLarge { .. } => {
                "bad-file"
            }
            Self::BadLocation { .. }
            | Self::Store { .. }
            | Self::Read { .. }
            | Self::Timeout { .. }
            | Self::Length { .. }
            | Self::Changed { .. }
            | Self::Runtime { .. } => "source-failed",
        }
    }

    /// Whether the store says that there is no such file.
    pub(super) fn is_missing(&self) -> bool {
        matches!(self, Self::Read { source, .. } if matches!(**source, object_store::Error::NotFound { .. }))
    }

    /// The tensor that the error is about, where it is about one.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::Header { source, .. } => source.tensor(),
            Self::Read { tensor, .. }
            | Self::Timeout { tensor, .. }
            | Self::Length { tensor, .. }
            | Self::Changed { tensor, .. } => tensor.as_deref(),
            _ => None,
        }
    }
}

impl From<&SourceError> for Finding {
    fn from(error: &SourceError) -> Self {
        Self {
            level: FindingLevel::Error,
            reason: error.reason().to_owned(),
            tensor: error.tensor().map(str::to_owned),
            message: error.to_string(),
        }
    }
}
