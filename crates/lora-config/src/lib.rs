//! Adapter configs, model geometry, `lora.toml` and levers.

#![forbid(unsafe_code)]

mod adapter;
mod error;
mod json;
mod levers;
mod model;
mod runtime;

pub use adapter::{
    AdapterConfig, DeclaredBuffers, LoraBLayout, ModuleScaling, PEFT_SUPPORTED_TARGET_MODULES,
    ParseOptions, PeftVersion, SavedTable, TargetMatch, TargetModules, TokenTable, TrainableTokens,
    parse_peft_adapter_config, validate_peft_config,
};
pub use error::{ConfigError, ConfigFinding, FindingLevel};
pub use levers::{LEVER_PREFIX, LeverSettings, Levers};
pub use model::{
    AttentionKind, FfnKind, GateUpOrder, LayerSpec, LinearAttentionSpec, LinearInputs, MAX_EXPERTS,
    MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, ModelFamily, ModelSpec, MoeSpec, StackedAxes,
};
pub use runtime::{AdapterEntry, BackendKind, RuntimeConfig, RuntimeSettings};
