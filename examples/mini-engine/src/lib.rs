//! A small LLM engine that serves many LoRA adapters in one batch: how `lora-runtime` is integrated.
//!
//! | file | what an engine has there | what LoRA adds |
//! |---|---|---|
//! | [`config`], [`checkpoint`] | the model's geometry and weights | [`ModelSpec`](lora_runtime::config::ModelSpec), which both share |
//! | [`model`] | blocks over the rows of a step | a call of [`Deltas`] after each projection |
//! | [`deltas`] | (activations on the device already) | the calls into `lora-runtime`: route once a step, apply at each projection |
//! | [`engine`] | requests, steps, sampling | an adapter held for each request, brought in at step boundaries |
//! | [`prefix`] | prompts that were prefilled | the adapter's id in the key |
//!
//! Base projections run on the host, in F32 and row by row; all deltas run on the backend of choice.

#![forbid(unsafe_code)]

pub mod cache;
pub mod checkpoint;
pub mod config;
pub mod deltas;
pub mod engine;
mod error;
pub mod math;
pub mod model;
pub mod prefix;
pub mod recorded;
mod sequence;

pub use cache::SequenceCache;
pub use config::ModelConfig;
pub use deltas::Deltas;
pub use engine::{Engine, EngineOptions, Request, Response};
pub use error::EngineError;
pub use model::{Model, Step, StepRow};
pub use recorded::Recorded;
