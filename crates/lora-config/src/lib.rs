//! Adapter configs, model geometry, `lora.toml` and levers.

mod adapter;
mod error;
mod model;

pub use adapter::{
    AdapterConfig, LoraBLayout, ModuleScaling, ParseOptions, PeftVersion, SavedTable,
    TargetModules, TokenTable, TrainableTokens, parse_peft_adapter_config,
};
pub use error::{ConfigError, ConfigFinding, FindingLevel};
pub use model::{
    AttentionKind, FfnKind, GateUpOrder, LayerSpec, LinearAttentionSpec, ModelFamily, ModelSpec,
    MoeSpec, StackedAxes,
};
