use std::fmt;

/// How serious a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FindingLevel {
    /// The adapter is not loaded.
    Error,
    /// The adapter loads; a person should know.
    Warning,
}

/// One refusal or warning about a config field, shown as `REJECT[config-<field>]: ...` for errors.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConfigFinding {
    /// Error or warning.
    pub level: FindingLevel,
    /// Stable reason, `config-<field>` for refusals.
    pub reason: String,
    /// What is wrong, with the value, and the way out.
    pub message: String,
}

impl ConfigFinding {
    /// A refusal of `field`: reason `config-<field>`.
    pub fn reject(field: &str, message: impl Into<String>) -> Self {
        Self {
            level: FindingLevel::Error,
            reason: format!("config-{field}"),
            message: message.into(),
        }
    }
}

impl fmt::Display for ConfigFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.level {
            FindingLevel::Error => "REJECT",
            FindingLevel::Warning => "WARN",
        };
        write!(f, "{word}[{}]: {}", self.reason, self.message)
    }
}

/// Why a config was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Every refused field of an `adapter_config.json`, in the order found.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Rejected(Vec<ConfigFinding>),
}
