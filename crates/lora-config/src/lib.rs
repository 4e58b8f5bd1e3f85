//! Adapter configs, model geometry, `lora.toml` and levers.

#![forbid(unsafe_code)]

mod adapter;
mod error;
mod json;
mod model;

pub use adapter::{
    AdapterConfig, DeclaredBuffers, LoraBLayout, ModuleScaling, PEFT_SUPPORTED_TARGET_MODULES,
    ParseOptions, PeftVersion, SavedTable, TargetMatch, TargetModules, TokenTable, TrainableTokens,
    parse_peft_adapter_config, validate_peft_config,
};
pub use error::{ConfigError, ConfigFinding, FindingLevel};
pub use model::{
    AttentionKind, FfnKind, GateUpOrder, LayerSpec, LinearAttentionSpec, LinearInputs, MAX_EXPERTS,
    MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, ModelFamily, ModelSpec, MoeSpec, StackedAxes,
};
