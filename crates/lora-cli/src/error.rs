//! Why a command could not do its work. Shown on one line, with the file's name.

use lora_kernels::bench::{DeltaShape, MoeShape, OverlayShape};
use lora_kernels::testing::Verdict;
use lora_runtime::RuntimeError;
use lora_runtime::config::ConfigError;
use std::path::{Path, PathBuf};

/// Why a command failed. What an audit refuses is no error here: it is the command's answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CliError {
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A `config.json` that gives no model geometry.
    #[error("{}: {source}", path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ConfigError,
    },
    /// A recorded output file that does not hold together.
    #[error("{}: {what}", path.display())]
    Golden {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the tensor's name.
        what: String,
    },
    /// An adapter that a bench makes does not hold together.
    #[error("synthetic adapter: {0}")]
    Synthetic(String),
    /// A delta that is not what the reference gives: its times would mean nothing.
    #[error("deltas of {shape} are wrong: {verdict:?}, where 1 is the most that is allowed")]
    WrongDelta {
        /// The batch.
        shape: DeltaShape,
        /// How far it is off.
        verdict: Verdict,
    },
    /// A MoE block's delta that is not what the reference gives: its times would mean nothing.
    #[error("experts of {shape} are wrong: {verdict:?}, where 1 is the most that is allowed")]
    WrongExperts {
        /// The batch.
        shape: MoeShape,
        /// How far it is off.
        verdict: Verdict,
    },
    /// An overlay that was not built or applied as the reference says: its times would mean nothing.
    #[error("overlay ({shape}) is wrong: {verdict:?}, where 1 is the most that is allowed")]
    WrongOverlay {
        /// What was done.
        shape: OverlayShape,
        /// How far it is off.
        verdict: Verdict,
    },
    /// Levers or other settings that cannot be.
    #[error(transparent)]
    Setting(#[from] ConfigError),
    /// The runtime refused or failed.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// A command's own output could not be written.
    #[error("output: {0}")]
    Output(#[from] std::io::Error),
    /// A report could not be written as JSON.
    #[error("output: {0}")]
    Json(#[from] serde_json::Error),
}

impl CliError {
    /// [`CliError::Read`] of `path`.
    pub(crate) fn read(path: &Path, source: std::io::Error) -> Self {
        Self::Read {
            path: path.to_path_buf(),
            source,
        }
    }
}
