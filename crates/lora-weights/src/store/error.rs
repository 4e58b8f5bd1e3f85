use super::TensorDtype;
use std::io;
use std::path::PathBuf;

/// Why an adapter folder could not be opened. Every message starts with the file's path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The path is not a folder.
    #[error("{}: not a folder; give the folder that holds adapter_config.json", .path.display())]
    NotAFolder {
        /// The path asked for.
        path: PathBuf,
    },
    /// There is no `adapter_config.json`.
    #[error("{}: no such file; a PEFT adapter folder holds one", .path.display())]
    MissingConfig {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// There is no `adapter_model.safetensors`.
    #[error("{}: no such file", .path.display())]
    MissingWeights {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// Only a pickle is there.
    #[error("{}: a pickle, which can run code when it is read; save the adapter as adapter_model.safetensors", .path.display())]
    Pickle {
        /// The pickle.
        path: PathBuf,
    },
    /// The weights are split over several files.
    #[error("{}: the weights are sharded; merge the shards into one adapter_model.safetensors", .path.display())]
    Sharded {
        /// The shard index.
        path: PathBuf,
    },
    /// The weights are in MLX's format.
    #[error(
        "{}: an MLX adapter (A and B transposed, with a scale of its own); convert it to PEFT's format",
        .path.display()
    )]
    Mlx {
        /// The MLX file.
        path: PathBuf,
    },
    /// The folder holds folders of adapters and is none itself.
    #[error("{}: holds the adapters {}; give the folder of one", .path.display(), .folders.join(", "))]
    SeveralAdapters {
        /// The folder asked for.
        path: PathBuf,
        /// Its subfolders that hold an `adapter_config.json`, sorted.
        folders: Vec<String>,
    },
    /// The system refused.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A config larger than any that means something.
    #[error("{}: {bytes} bytes, over the limit of {limit} for a config", .path.display())]
    ConfigTooLarge {
        /// The config.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A config that is not text.
    #[error("{}: not UTF-8 from byte {valid_up_to} on", .path.display())]
    ConfigNotUtf8 {
        /// The config.
        path: PathBuf,
        /// Bytes that are.
        valid_up_to: usize,
    },
    /// A weights file whose header cannot be trusted.
    #[error("{}: {source}", .path.display())]
    Header {
        /// The weights file.
        path: PathBuf,
        /// What is wrong with it.
        source: HeaderError,
    },
}

impl StoreError {
    /// The stable reason that the audit reports: `missing-config-file`, `missing-weights-file`, `unsupported-dtype` or `bad-file`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::MissingConfig { .. } => "missing-config-file",
            Self::NotAFolder { .. }
            | Self::MissingWeights { .. }
            | Self::Pickle { .. }
            | Self::Sharded { .. }
            | Self::Mlx { .. }
            | Self::SeveralAdapters { .. } => "missing-weights-file",
            Self::Header { source, .. } => source.reason(),
            Self::Io { .. } | Self::ConfigTooLarge { .. } | Self::ConfigNotUtf8 { .. } => {
                "bad-file"
            }
        }
    }

    /// The tensor that the error is about, where it is about one.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::Header { source, .. } => source.tensor(),
            _ => None,
        }
    }
}

/// What is wrong with a safetensors file, or with tensors given in memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Too short to hold the header's length.
    #[error("{bytes} bytes; a safetensors file has 8 bytes of header length at least")]
    TooShort {
        /// Size of the file.
        bytes: u64,
    },
    /// A header length over the format's limit.
    #[error("a header of {declared} bytes is declared, over the format's limit of {limit}")]
    TooLarge {
        /// Length declared.
        declared: u64,
        /// The limit.
        limit: u64,
    },
    /// A header length past the end of the file.
    #[error(
        "a header of {declared} bytes is declared, and {available} bytes follow: the file is cut short"
    )]
    PastEnd {
        /// Length declared.
        declared: u64,
        /// Bytes after the length.
        available: u64,
    },
    /// A header that is not the JSON object that the format asks for.
    #[error("the header is not valid: {detail}")]
    NotJson {
        /// The parser's words.
        detail: String,
    },
    /// A tensor's entry that is not `{dtype, shape, data_offsets}`.
    #[error("{tensor}: {detail}")]
    BadEntry {
        /// The tensor.
        tensor: String,
        /// The parser's words.
        detail: String,
    },
    /// Two entries of one name.
    #[error("{tensor}: named twice in the header")]
    DuplicateName {
        /// The name.
        tensor: String,
    },
    /// A dtype that the format does not name.
    #[error("{tensor}: dtype {dtype} is none of the format's; BF16, F16 and F32 load")]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
    },
    /// A shape whose size leaves 64 bits.
    #[error("{tensor}: a tensor of shape {shape:?} is larger than 2^64 bits")]
    SizeOverflow {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Offsets that do not fit shape and dtype.
    #[error("{tensor}: shape {shape:?} of {dtype} takes {expected} bytes, and {actual} are given")]
    SizeMismatch {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Its dtype.
        dtype: TensorDtype,
        /// Bytes that shape and dtype ask for.
        expected: u64,
        /// Bytes that are there.
        actual: u64,
    },
    /// Offsets that end before they begin.
    #[error("{tensor}: data from byte {begin} to byte {end}")]
    Reversed {
        /// The tensor.
        tensor: String,
        /// First byte.
        begin: u64,
        /// One past the last.
        end: u64,
    },
    /// Data past the end of the file.
    #[error("{tensor}: data ends at byte {end}, and the file holds {available}: it is cut short")]
    DataPastEnd {
        /// The tensor.
        tensor: String,
        /// One past its last byte, after the header.
        end: u64,
        /// Bytes after the header.
        available: u64,
    },
    /// Two tensors that share bytes.
    #[error("{tensor}: its data begins at byte {begin}, inside that of {other}")]
    Overlap {
        /// The later one.
        tensor: String,
        /// The earlier one.
        other: String,
        /// First byte of the later one.
        begin: u64,
    },
    /// Bytes between two tensors, or before the first, that belong to none.
    #[error(
        "{tensor}: its data begins at byte {begin}, and {bytes} bytes before it belong to no tensor"
    )]
    Hole {
        /// The tensor after the hole.
        tensor: String,
        /// Its first byte.
        begin: u64,
        /// Size of the hole.
        bytes: u64,
    },
    /// Bytes after the last tensor.
    #[error("{bytes} bytes follow the last tensor's data and belong to none")]
    TrailingBytes {
        /// How many.
        bytes: u64,
    },
}

impl HeaderError {
    /// `unsupported-dtype` for a dtype that the format does not name, else `bad-file`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::UnknownDtype { .. } => "unsupported-dtype",
            _ => "bad-file",
        }
    }

    /// The tensor that the error is about, where it is about one.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::BadEntry { tensor, .. }
            | Self::DuplicateName { tensor }
            | Self::UnknownDtype { tensor, .. }
            | Self::SizeOverflow { tensor, .. }
            | Self::SizeMismatch { tensor, .. }
            | Self::Reversed { tensor, .. }
            | Self::DataPastEnd { tensor, .. }
            | Self::Overlap { tensor, .. }
            | Self::Hole { tensor, .. } => Some(tensor),
            _ => None,
        }
    }
}
