use std::fmt;

/// How serious a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FindingLevel {
    /// The adapter is not loaded.
    Error,
    /// The adapter loads; a person should know.
    Warning,
}

/// One refusal or warning about an adapter's config, shown as `REJECT[config-<field>]: ...` or `WARN[...]: ...`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConfigFinding {
    /// Error or warning.
    pub level: FindingLevel,
    /// Stable reason. Refusals of a field are `config-<field>`; a text that is no JSON object is
    /// `config-not-json`, a key that stands twice `config-duplicate-key`.
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

    /// A warning under a reason of its own.
    pub fn warn(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            level: FindingLevel::Warning,
            reason: reason.into(),
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
    /// A `config.json` that is not a JSON object.
    #[error("config.json: {message}")]
    ModelJson {
        /// What is wrong and where.
        message: String,
    },
    /// A `config.json` of a family whose geometry is not known.
    #[error(
        "config.json: model_type {model_type:?} is not a known family ({}); fill in a ModelSpec by hand and check it \
         with ModelSpec::validate",
        crate::ModelFamily::NAMES.join(", ")
    )]
    UnknownFamily {
        /// `model_type` as written.
        model_type: String,
    },
    /// A field of a `config.json`, or of a [`ModelSpec`](crate::ModelSpec) filled in by hand, that is missing or
    /// cannot be.
    #[error("{model_type} model: {field} {problem}")]
    ModelField {
        /// `model_type` as written, or the family's name.
        model_type: String,
        /// The field, with its place in a list where it has one.
        field: String,
        /// What is wrong, with the value.
        problem: String,
    },
    /// A `lora.toml` that is not TOML, holds an unknown key, or a value of the wrong type.
    #[error("lora.toml, line {line}: {message}")]
    Toml {
        /// Line in the file, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// A setting, from whichever layer, that cannot be.
    #[error("setting {field} {problem}")]
    Setting {
        /// The setting, as `lora.toml` names it.
        field: String,
        /// What is wrong, with the value.
        problem: String,
    },
    /// An environment variable whose value is not understood.
    #[error("environment variable {variable} is {value:?}; {expected}")]
    Environment {
        /// Full name, prefix included.
        variable: String,
        /// Its value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
}
