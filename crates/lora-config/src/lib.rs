//! What a LoRA runtime is told, parsed into types that cannot hold a bad value.
//!
//! - [`parse_peft_adapter_config`]: PEFT's `adapter_config.json` to an [`AdapterConfig`]. Every field of every PEFT version is
//!   applied, checked, ignored or refused; a file that is refused says everything that is wrong with it at once.
//! - [`ModelSpec`]: a model's geometry from Hugging Face's `config.json`, or filled in by hand.
//! - [`RuntimeConfig`] and [`Levers`]: `lora.toml`, the environment and what code sets, the strongest first.
//!
//! ```
//! use lora_config::{ModelSpec, ParseOptions, parse_peft_adapter_config};
//!
//! let adapter = parse_peft_adapter_config(
//!     r#"{"peft_type": "LORA", "r": 16, "lora_alpha": 32, "use_rslora": false, "target_modules": ["q_proj", "k_proj"],
//!         "alpha_pattern": {"layers.1.self_attn.q_proj": 8}}"#,
//!     &ParseOptions::default(),
//! )?;
//! assert_eq!(adapter.scaling("model.layers.0.self_attn.q_proj"), 2.0);
//! assert_eq!(adapter.scaling("model.layers.1.self_attn.q_proj"), 0.5);
//!
//! let model = ModelSpec::from_hf_config(
//!     r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
//!         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}"#,
//! )?;
//! assert_eq!((model.q_width(), model.kv_width(), model.head_dim), (4096, 1024, 128));
//!
//! // Nothing that changes inference is dropped in silence.
//! let refused = parse_peft_adapter_config(
//!     r#"{"peft_type": "LORA", "r": 0, "lora_alpha": 32, "use_rslora": false, "use_dora": true}"#,
//!     &ParseOptions::default(),
//! );
//! let message = refused.unwrap_err().to_string();
//! assert!(message.starts_with("REJECT[config-r]: r is 0; a rank is a positive integer; REJECT[config-use_dora]: "));
//! # Ok::<(), lora_config::ConfigError>(())
//! ```
//!
//! # What it must not know
//! Tensors, devices, and files other than the ones it parses. Parsers take text: who read it, and from where, is the
//! caller's affair. The environment is read in [`LeverSettings::from_env`] and [`store_settings_from_env`] and nowhere else in the workspace.
//!
//! # Untrusted input
//! Adapter folders come from strangers. No text makes a parser panic; texts over 16 MiB are refused before they are
//! parsed, regular expressions run under limits on size and backtracking, sizes of a model are bounded ([`MAX_LAYERS`],
//! [`MAX_WIDTH`], [`MAX_EXPERTS`], [`MAX_VOCAB`]) before anything is allocated by them, and messages quote at most some eighty
//! characters of a value.

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
pub use levers::{LEVER_PREFIX, LeverSettings, Levers, store_settings_from_env};
pub use model::{
    AttentionKind, FfnKind, GateUpOrder, LayerSpec, LinearAttentionSpec, LinearInputs, MAX_EXPERTS,
    MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, ModelFamily, ModelSpec, MoeSpec, StackedAxes,
};
pub use runtime::{AdapterEntry, BackendKind, RuntimeConfig, RuntimeSettings};
