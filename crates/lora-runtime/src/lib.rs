//! Runtime LoRA for LLM inference engines: PEFT adapter folders in, every row of a batch through its own adapter.
//!
//! [`LoraRuntime`] is the object an engine holds; [`LayerLora`] and its parts are what it installs on its layers. The
//! crates below are re-exported whole, so that an engine depends on this one alone.
//!
#![doc = include_str!("../../../README.md")]
#![forbid(unsafe_code)]

mod adapter;
mod backend;
mod batch;
mod error;
mod experts;
mod incoming;
mod layers;
mod options;
mod overlays;
#[cfg(feature = "source")]
mod remote;
mod report;
mod runtime;
mod sites;

pub use adapter::Adapter;
pub use backend::open_backend;
pub use batch::RoutedBatch;
pub use error::{FfnBlock, InstallError, RuntimeError};
pub use layers::{
    AllReduced, AttentionLayer, FfnInstalled, FfnLora, LayerLora, LinearAttentionLayer,
    LoraMoeWeights,
};
pub use options::{RuntimeOptions, launch_options, load_policy, module_set, whole_adapter_units};
pub use report::{OverlayReport, ResidentReport, RuntimeReport, RuntimeSnapshot};
pub use runtime::{LoraRuntime, plan_expert_tables, plan_scratch};
pub use sites::ModuleOut;

pub use half::bf16;
pub use lora_config as config;
pub use lora_kernels as kernels;
pub use lora_moe as moe;
pub use lora_overlay as overlay;
pub use lora_weights as weights;
