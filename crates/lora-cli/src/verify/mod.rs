//! Recorded rows through real adapters, compared with what PEFT gave.
//!
//! A case is a folder: `adapter/`, the base model's `config.json`, and `golden.safetensors` with rows that went into a
//! module, what the untouched module gave, and what PEFT gave. Its adapter is loaded into a pool, the deltas of its rows
//! are added to the recorded base outputs, and every element is compared at a tolerance that follows its own terms
//! ([`Worst`]).

mod case;
mod compare;
mod golden;
mod matrix;
mod run;
mod stacked;

pub use case::Case;
pub use compare::{Factors, Worst};
pub use golden::{Golden, GoldenSite};
pub use matrix::Matrix;
pub use run::{BaseRows, CaseResult, ModuleResult, Setup, verify_together};
