//! What the tests of this crate share: a valid config to change, and the workspace's recorded cases.

use lora_config::{
    AdapterConfig, ConfigError, ConfigFinding, ModelSpec, ParseOptions, parse_peft_adapter_config,
};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A config as PEFT saves it, whose fields say nothing unusual.
pub(crate) fn plain() -> Value {
    json!({
        "peft_type": "LORA", "peft_version": "0.21.2", "r": 4, "lora_alpha": 8, "use_rslora": false,
        "rank_pattern": {}, "alpha_pattern": {}, "target_modules": ["q_proj"], "bias": "none",
        "use_dora": false, "init_lora_weights": true, "modules_to_save": null,
    })
}

/// [`plain`] with `changes` over it.
pub(crate) fn with(changes: Value) -> Value {
    changed(plain(), &changes)
}

/// `config` with `changes` over it; a string `"<absent>"` takes a field out.
fn changed(mut config: Value, changes: &Value) -> Value {
    let fields = config.as_object_mut().unwrap();
    for (name, value) in changes.as_object().unwrap() {
        if value == "<absent>" {
            fields.remove(name);
        } else {
            fields.insert(name.clone(), value.clone());
        }
    }
    config
}

pub(crate) fn parse_with(
    options: ParseOptions,
    config: &Value,
) -> Result<AdapterConfig, ConfigError> {
    parse_peft_adapter_config(&config.to_string(), &options)
}

pub(crate) fn parse(config: &Value) -> Result<AdapterConfig, ConfigError> {
    parse_with(ParseOptions::default(), config)
}

/// The findings of a refusal.
pub(crate) fn rejected(result: Result<AdapterConfig, ConfigError>) -> Vec<ConfigFinding> {
    match result {
        Err(ConfigError::Rejected(findings)) => findings,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

/// Folders of the recorded cases, by name.
pub(crate) fn cases() -> Vec<(String, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/cases");
    let mut found: Vec<(String, PathBuf)> = std::fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("case.json").is_file())
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, path)
        })
        .collect();
    found.sort();
    assert!(found.len() > 90, "{} cases", found.len());
    found
}

pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

pub(crate) fn spec(config: &Value) -> Result<ModelSpec, ConfigError> {
    ModelSpec::from_hf_config(&config.to_string())
}

/// A small config that is valid for `model_type`.
pub(crate) fn small(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 48,
        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "num_experts": 16,
        "intermediate_size_mlp": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    })
}

/// [`small`] with `changes` over it.
pub(crate) fn small_with(model_type: &str, changes: Value) -> Value {
    changed(small(model_type), &changes)
}

/// Asserts that `changes` give one refusal, `config-<field>`, whose message holds all of `says`.
pub(crate) fn refuses(field: &str, changes: Value, says: &[&str]) {
    let findings = rejected(parse(&with(changes.clone())));
    assert_eq!(findings.len(), 1, "{changes}: {findings:?}");
    let shown = findings[0].to_string();
    assert!(
        shown.starts_with(&format!("REJECT[config-{field}]: ")),
        "{changes}: {shown}"
    );
    for part in says {
        assert!(
            shown.contains(part),
            "{changes}: {shown:?} does not say {part:?}"
        );
    }
}

pub(crate) fn loads(changes: Value) -> AdapterConfig {
    parse(&with(changes.clone())).unwrap_or_else(|error| panic!("{changes}: {error}"))
}
