//! Why the engine refused or failed.

use lora_runtime::RuntimeError;
use lora_runtime::config::ConfigError;
use lora_runtime::kernels::KernelError;
use std::path::{Path, PathBuf};

/// Why the engine refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A file could not be read.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A model that this engine has no blocks for.
    #[error("config.json: {what}")]
    Unsupported {
        /// What is not built in, and what is.
        what: String,
    },
    /// The model's geometry.
    #[error("config.json: {0}")]
    Config(#[from] ConfigError),
    /// A tensor of the model is missing, left over, or of another shape.
    #[error("tensor {name}: {problem}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A request that cannot be served.
    #[error("request {request}: {problem}")]
    Request {
        /// Its name.
        request: String,
        /// What is wrong.
        problem: String,
    },
    /// Adapters, slots or launches.
    #[error(transparent)]
    Lora(#[from] RuntimeError),
}

impl EngineError {
    /// A file that could not be read.
    pub(crate) fn file(
        path: &Path,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::File {
            path: path.to_owned(),
            source: source.into(),
        }
    }
}

impl From<KernelError> for EngineError {
    fn from(error: KernelError) -> Self {
        Self::Lora(error.into())
    }
}
