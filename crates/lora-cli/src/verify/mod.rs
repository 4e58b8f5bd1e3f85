//! Recorded rows through real adapters, compared with what PEFT gave.
//!
//! A case is a folder: `adapter/`, the base model's `config.json`, and `golden.safetensors` with rows that went into a
//! module, what the untouched module gave, and what PEFT gave. Its adapter is loaded into a pool, the deltas of its rows
//! are added to the recorded base outputs, its vocabulary rows take the place of the base's in recorded embeddings and logits, and every element is
//! compared at a tolerance that follows its own terms ([`Worst`]).

mod block;
mod case;
mod compare;
mod golden;
mod matrix;
mod overlay;
mod run;
mod stacked;
mod tables;

pub use block::GoldenBlock;
pub use case::Case;
pub use compare::{Factors, Worst};
pub use golden::{Golden, GoldenSite};
pub use matrix::Matrix;
pub use run::{BaseRows, CaseResult, ModuleResult, Place, Setup, verify_together};
pub use tables::{BaseTables, GoldenTable, TableInput};
