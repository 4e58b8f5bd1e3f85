//! No text makes a parser panic, hang or allocate without bound.

use crate::common::{plain, small};
use lora_config::{ModelSpec, ParseOptions, parse_peft_adapter_config};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Values of every type, edge cases among them.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-3_i64..70).prop_map(Value::from),
        any::<f64>().prop_map(|number| json!(number)),
        "[a-z_.*()|^\\\\\\[\\]0-9]{0,12}".prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map("[a-z_.^(|]{0,8}", inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// `base` with some of `fields` replaced.
fn object(base: Value, fields: &'static [&'static str]) -> impl Strategy<Value = Value> {
    prop::collection::vec((prop::sample::select(fields), value()), 0..6).prop_map(move |changes| {
        let mut object = base.clone();
        for (name, value) in changes {
            object[name] = value;
        }
        object
    })
}

const ADAPTER_FIELDS: &[&str] = &[
    "peft_type",
    "peft_version",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "target_parameters",
    "modules_to_save",
    "trainable_token_indices",
    "ensure_weight_tying",
    "init_lora_weights",
    "bias",
    "lora_B_layout",
    "velora_config",
    "kasa_config",
    "use_dora",
    "unknown",
];

const MODEL_FIELDS: &[&str] = &[
    "model_type",
    "text_config",
    "hidden_size",
    "intermediate_size",
    "intermediate_size_mlp",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "layer_types",
    "full_attention_interval",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
    "no_rope_layers",
    "attention_chunk_size",
    "decoder_sparse_step",
    "mlp_only_layers",
    "first_k_dense_replace",
    "moe_layers",
    "interleave_moe_layer_step",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "linear_num_key_heads",
    "linear_value_head_dim",
    "tie_word_embeddings",
];

fn model() -> impl Strategy<Value = Value> {
    prop::sample::select(&lora_config::ModelFamily::NAMES[..])
        .prop_flat_map(|family| object(small(family), MODEL_FIELDS))
}

proptest! {
    #[test]
    fn any_text(text in any::<String>()) {
        let _ = parse_peft_adapter_config(&text, &ParseOptions::default());
        let _ = ModelSpec::from_hf_config(&text);
    }

    #[test]
    fn any_adapter_config(config in object(plain(), ADAPTER_FIELDS), path in "[a-z_.0-9]{0,40}") {
        for assume in [false, true] {
            let options = ParseOptions { assume_peft_defaults: assume, assume_base: assume };
            if let Ok(config) = parse_peft_adapter_config(&config.to_string(), &options) {
                let module = config.module(&path);
                prop_assert!(module.rank > 0 && module.alpha.is_finite() && module.scaling.is_finite());
                config.targets(&path);
                config.undecided_pattern(&path);
                let _ = lora_config::validate_peft_config(&config, 16);
            }
        }
    }

    #[test]
    fn any_model_config(config in model()) {
        if let Ok(spec) = ModelSpec::from_hf_config(&config.to_string()) {
            prop_assert!(spec.validate().is_ok());
            prop_assert!(spec.layers.len() <= lora_config::MAX_LAYERS);
            prop_assert!(spec.q_width() <= lora_config::MAX_WIDTH);
        }
    }

    /// A valid file cut off, or with one byte changed.
    #[test]
    fn damaged_text(cut in 0_usize..400, at in 0_usize..400, byte in any::<u8>()) {
        let mut bytes = plain().to_string().into_bytes();
        let length = bytes.len();
        bytes[at % length] = byte;
        bytes.truncate(cut.max(1).min(length));
        let text = String::from_utf8_lossy(&bytes);
        let _ = parse_peft_adapter_config(&text, &ParseOptions::default());
        let _ = ModelSpec::from_hf_config(&text);
    }
}

#[test]
fn hostile_sizes_stay_cheap() {
    let started = std::time::Instant::now();
    let options = ParseOptions::default();
    let names = vec!["q_proj"; 200_000];
    let mut config = plain();
    config["target_modules"] = json!(names);
    assert!(parse_peft_adapter_config(&config.to_string(), &options).is_ok());
    let keys: serde_json::Map<String, Value> = (0..20_000)
        .map(|index| (format!("layers.{index}.q_proj"), json!(2)))
        .collect();
    let mut config = plain();
    config["rank_pattern"] = Value::Object(keys);
    let parsed = parse_peft_adapter_config(&config.to_string(), &options).unwrap();
    assert_eq!(parsed.module("model.layers.19999.q_proj").rank, 2);
    let ids: Vec<u32> = (0..200_000).collect();
    let mut config = plain();
    config["trainable_token_indices"] = json!(ids);
    assert!(parse_peft_adapter_config(&config.to_string(), &options).is_ok());
    let nested = "{\"a\":".repeat(50_000);
    assert!(parse_peft_adapter_config(&nested, &options).is_err());
    let elapsed = started.elapsed();
    assert!(elapsed.as_secs() < 20, "{elapsed:?}");
}
