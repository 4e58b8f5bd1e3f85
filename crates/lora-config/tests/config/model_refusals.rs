//! Configs, and specs filled in by hand, that give no geometry.

use crate::common::{small, small_with, spec};
use lora_config::{ConfigError, FfnKind, MAX_LAYERS, ModelFamily, ModelSpec};
use serde_json::{Value, json};

/// Asserts that the config is refused over `field`, in a message that names the family and holds `says`.
fn refuses(config: Value, field: &str, says: &str) {
    let error = spec(&config).unwrap_err();
    let ConfigError::ModelField {
        model_type,
        field: found,
        problem,
    } = &error
    else {
        panic!("{config}: {error}");
    };
    assert_eq!(found, field, "{error}");
    assert_eq!(config["model_type"], model_type.as_str());
    assert!(problem.contains(says), "{problem:?} does not say {says:?}");
}

#[test]
fn an_unknown_family_is_an_error_that_names_the_known_ones() {
    let error = spec(&small("gpt2")).unwrap_err().to_string();
    assert!(
        error.contains("\"gpt2\"") && error.contains("qwen3_next") && error.contains("validate"),
        "{error}"
    );
}

#[test]
fn sizes_that_a_config_must_state_are_named_when_missing() {
    for field in [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    ] {
        for name in ["llama", "qwen3", "phi3"] {
            refuses(
                small_with(name, json!({ field: "<absent>" })),
                field,
                "is missing",
            );
            refuses_null(name, field);
        }
    }
    refuses(
        small_with("qwen3_moe", json!({"num_key_value_heads": "<absent>"})),
        "num_key_value_heads",
        "is missing",
    );
    for field in ["moe_intermediate_size", "shared_expert_intermediate_size"] {
        refuses(
            small_with("qwen2_moe", json!({ field: "<absent>" })),
            field,
            "is missing",
        );
    }
    refuses(
        small_with("mixtral", json!({"num_experts": "<absent>"})),
        "num_experts (or num_local_experts)",
        "is missing",
    );
    refuses(
        small_with(
            "llama4",
            json!({"intermediate_size_mlp": "<absent>", "moe_layers": [0]}),
        ),
        "intermediate_size_mlp",
        "is missing",
    );
    for field in [
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ] {
        refuses(
            small_with("qwen3_5", json!({ field: "<absent>" })),
            field,
            "is missing",
        );
    }
}

fn refuses_null(name: &str, field: &str) {
    refuses(
        small_with(name, json!({ field: null })),
        field,
        "is missing",
    );
}

#[test]
fn a_missing_model_type_is_said() {
    let error = spec(&json!({"hidden_size": 1})).unwrap_err();
    assert!(matches!(&error, ConfigError::ModelJson { message } if message.contains("model_type")));
}

#[test]
fn two_names_of_one_number_must_agree() {
    let agree = small_with("qwen3_moe", json!({"num_local_experts": 16}));
    assert_eq!(spec(&agree).unwrap().moe.unwrap().num_experts, 16);
    refuses(
        small_with("qwen3_moe", json!({"num_local_experts": 8})),
        "num_experts",
        "num_local_experts, another name for it, is 8",
    );
}

#[test]
fn layer_types_must_fit_the_model() {
    let with_types = |types: Value| small_with("qwen3", json!({ "layer_types": types }));
    refuses(
        with_types(json!(["full_attention"])),
        "layer_types",
        "1 entries",
    );
    let odd = json!([
        "full_attention",
        "mamba2",
        "full_attention",
        "full_attention"
    ]);
    refuses(with_types(odd), "layer_types[1]", "\"mamba2\"");
    let linear = json!(["linear_attention", 3, "full_attention", "full_attention"]);
    refuses(with_types(linear), "layer_types[0]", "linear_attention");
    refuses(
        with_types(json!("full_attention")),
        "layer_types",
        "it is a list",
    );
}

#[test]
fn numbers_that_cannot_be_are_refused() {
    for field in [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "vocab_size",
    ] {
        for value in [
            json!(0),
            json!(-1),
            json!(1e18),
            json!(1.5),
            json!("32"),
            json!(true),
            json!([32]),
            json!(18446744073709551615_u64),
            json!(1_000_000_000_000_000_000_u64),
        ] {
            let config = small_with("llama", json!({ field: value }));
            let error = spec(&config).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("llama model: {field} is ")),
                "{error}"
            );
        }
    }
    refuses(
        small_with("llama", json!({"num_hidden_layers": MAX_LAYERS + 1})),
        "num_hidden_layers",
        "4097",
    );
    for (name, field) in [
        ("qwen3_next", "full_attention_interval"),
        ("qwen3_moe", "decoder_sparse_step"),
        ("llama4", "interleave_moe_layer_step"),
        ("llama4", "no_rope_layer_interval"),
        ("gemma3", "sliding_window_pattern"),
        ("mixtral", "num_experts"),
        ("qwen3_moe", "num_experts_per_tok"),
    ] {
        refuses(small_with(name, json!({ field: 0 })), field, "is 0");
        refuses(small_with(name, json!({ field: -3 })), field, "is -3");
    }
    refuses(
        small_with("qwen3_moe", json!({"num_experts": 1e9})),
        "num_experts",
        "1000000000",
    );
}

#[test]
fn numbers_that_contradict_each_other_are_refused() {
    refuses(
        small_with("llama", json!({"num_key_value_heads": 3})),
        "num_attention_heads",
        "not a multiple of num_key_value_heads, 3",
    );
    refuses(
        small_with("llama", json!({"head_dim": null, "num_attention_heads": 6})),
        "head_dim",
        "32 is not a multiple of num_attention_heads 6",
    );
    refuses(
        small_with(
            "llama",
            json!({"num_attention_heads": 65536, "head_dim": 65536}),
        ),
        "q_proj's width",
        "4294967296",
    );
    refuses(
        small_with("qwen3_moe", json!({"num_experts_per_tok": 17})),
        "num_experts_per_tok",
        "is 17, and there are 16 experts",
    );
    refuses(
        small_with("qwen3_5", json!({"linear_num_value_heads": 3})),
        "linear_num_value_heads",
        "not a multiple",
    );
    refuses(
        small_with("llama4", json!({"no_rope_layers": [1, 0]})),
        "no_rope_layers",
        "has 2 entries",
    );
    refuses(
        small_with("llama4", json!({"moe_layers": [0, -1]})),
        "moe_layers[1]",
        "is -1",
    );
    refuses(
        small_with("llama", json!({"tie_word_embeddings": 1})),
        "tie_word_embeddings",
        "is 1",
    );
}

#[test]
fn a_text_that_is_no_object_or_repeats_a_key_is_refused() {
    for (text, says) in [
        ("", "not valid JSON"),
        ("[]", "a list"),
        (
            "{\"model_type\": \"llama\", \"model_type\": \"llama\"}",
            "\"model_type\" stands more than once",
        ),
        ("{\"text_config\": 3}", "text_config is 3"),
    ] {
        let error = ModelSpec::from_hf_config(text).unwrap_err().to_string();
        assert!(
            error.starts_with("config.json: ") && error.contains(says),
            "{text}: {error}"
        );
    }
}

#[test]
fn a_spec_filled_in_by_hand_is_checked() {
    let valid = spec(&small("qwen3_next")).unwrap();
    valid.validate().unwrap();
    let problem = |change: &dyn Fn(&mut ModelSpec)| {
        let mut spec = valid.clone();
        spec.family = ModelFamily::Custom;
        change(&mut spec);
        spec.validate().unwrap_err().to_string()
    };
    for (says, change) in [
        (
            "custom model: hidden_size is 0",
            (&|s: &mut ModelSpec| s.hidden_size = 0) as &dyn Fn(&mut ModelSpec),
        ),
        ("num_hidden_layers is 0", &|s| s.layers.clear()),
        ("num_key_value_heads is 0", &|s| s.kv_heads = 0),
        ("q_proj's width is", &|s| s.head_dim = 1 << 23),
        ("moe is None, and layer 0 is MoE", &|s| s.moe = None),
        ("linear_attention is None, and layer 0", &|s| {
            s.linear_attention = None
        }),
        ("intermediate_size is 0", &|s| {
            s.layers[1].ffn = FfnKind::Dense { width: 0 }
        }),
        ("the experts' width is 0", &|s| {
            s.moe.as_mut().unwrap().expert_width = 0
        }),
        ("the shared expert's width is 0", &|s| {
            s.moe.as_mut().unwrap().shared_expert_width = Some(0)
        }),
        ("values' width is", &|s| {
            s.linear_attention.as_mut().unwrap().value_head_dim = 1 << 24
        }),
        ("linear_num_key_heads is 0", &|s| {
            s.linear_attention.as_mut().unwrap().key_heads = 0
        }),
    ] {
        let found = problem(change);
        assert!(found.contains(says), "{found:?} does not say {says:?}");
    }
}
