use lora_config::{ConfigFinding, FindingLevel};
use std::fmt;

use crate::{Reject, StoreError};

/// One refusal or warning of an audit.
///
/// Shown on one line: `REJECT[shape-mismatch]: ...` for an error, `WARN[no-effect]: ...` for a warning.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// Error (the adapter does not load) or warning.
    pub level: FindingLevel,
    /// Stable reason: `shape-mismatch`, `config-use_dora`. [`RejectReason`](crate::RejectReason) and the config's fields are where they come from.
    pub reason: String,
    /// The tensor it is about, where it is about one.
    pub tensor: Option<String>,
    /// What is wrong, with both numbers, and the way out.
    pub message: String,
}

impl Finding {
    /// True for an error.
    pub fn is_error(&self) -> bool {
        self.level == FindingLevel::Error
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.level {
            FindingLevel::Error => "REJECT",
            FindingLevel::Warning => "WARN",
        };
        write!(f, "{word}[{}]: ", OneLine(&self.reason))?;
        match &self.tensor {
            // A file's error names its tensor behind the file.
            Some(tensor) if !self.message.contains(tensor.as_str()) => {
                write!(f, "{}: ", OneLine(tensor))?;
            }
            _ => {}
        }
        OneLine(&self.message).fmt(f)
    }
}

/// Text from a file on one line of a terminal: control characters are shown as escapes.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        while let Some(at) = rest.find(char::is_control) {
            let (clean, tail) = rest.split_at(at);
            f.write_str(clean)?;
            let mut chars = tail.chars();
            if let Some(control) = chars.next() {
                write!(f, "{}", control.escape_default())?;
            }
            rest = chars.as_str();
        }
        f.write_str(rest)
    }
}

impl From<Reject> for Finding {
    fn from(reject: Reject) -> Self {
        Self {
            level: FindingLevel::Error,
            reason: reject.reason.as_str().to_owned(),
            tensor: Some(reject.key),
            message: reject.detail,
        }
    }
}

impl From<&StoreError> for Finding {
    fn from(error: &StoreError) -> Self {
        Self {
            level: FindingLevel::Error,
            reason: error.reason().to_owned(),
            tensor: error.tensor().map(str::to_owned),
            message: error.to_string(),
        }
    }
}

impl From<ConfigFinding> for Finding {
    fn from(finding: ConfigFinding) -> Self {
        Self {
            level: finding.level,
            reason: finding.reason,
            tensor: None,
            message: finding.message,
        }
    }
}
