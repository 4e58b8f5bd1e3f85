//! Model geometry: against the recorded base models' own shapes, against what transformers fills in, and what is refused.

use crate::common::{cases, read_json};
use lora_config::{
    AttentionKind, ConfigError, FfnKind, GateUpOrder, LayerSpec, LinearInputs, MAX_LAYERS,
    ModelFamily, ModelSpec, StackedAxes,
};
use serde_json::{Value, json};

fn spec(config: &Value) -> Result<ModelSpec, ConfigError> {
    ModelSpec::from_hf_config(&config.to_string())
}

/// A small config that is valid for `model_type`.
fn small(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 48,
        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "num_experts": 16,
        "intermediate_size_mlp": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    })
}

fn small_with(model_type: &str, changes: Value) -> Value {
    let mut config = small(model_type);
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

/// Out and in of the base model's weight at `path`, if it has one.
fn weight(shapes: &Value, path: &str) -> Option<(usize, usize)> {
    let shape = shapes[path].as_array()?;
    let dim = |index: usize| shape[index].as_u64().unwrap() as usize;
    Some((dim(0), dim(1)))
}

fn stacked(shapes: &Value, path: &str) -> Option<Vec<usize>> {
    let shape = shapes[path].as_array()?;
    Some(
        shape
            .iter()
            .map(|dim| dim.as_u64().unwrap() as usize)
            .collect(),
    )
}

#[test]
fn recorded_models_have_the_shapes_that_their_spec_says() {
    let mut checked = 0;
    for (name, folder) in cases() {
        let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let result = ModelSpec::from_hf_config(&text);
        if name.starts_with("gpt2") {
            assert!(
                matches!(&result, Err(ConfigError::UnknownFamily { model_type }) if model_type == "gpt2"),
                "{result:?}"
            );
            continue;
        }
        let spec = result.unwrap_or_else(|error| panic!("{name}: {error}"));
        let shapes = &read_json(&folder.join("case.json"))["base_shapes"];
        if shapes.is_null() {
            continue;
        }
        let root = if name == "qwen3_vl_names" {
            "model.language_model"
        } else {
            "model"
        };
        assert_eq!(
            weight(shapes, &format!("{root}.embed_tokens.weight")),
            Some((spec.vocab_size, spec.hidden_size)),
            "{name}"
        );
        for (index, layer) in spec.layers.iter().enumerate() {
            let at = |module: &str| format!("{root}.layers.{index}.{module}");
            check_attention(&spec, layer, shapes, &at);
            check_ffn(&spec, layer, shapes, &at);
            checked += 1;
        }
        let next = format!("{root}.layers.{}.input_layernorm.weight", spec.layers.len());
        assert!(shapes[&next].is_null(), "{name} has more layers");
    }
    assert!(checked > 150, "{checked} layers");
}

fn check_attention(
    spec: &ModelSpec,
    layer: &LayerSpec,
    shapes: &Value,
    at: &dyn Fn(&str) -> String,
) {
    let hidden = spec.hidden_size;
    let dims = |module: &str| weight(shapes, &at(&format!("{module}.weight")));
    let when = |has: bool, dims: (usize, usize)| has.then_some(dims);
    let attends = layer.attention.is_attention();
    let apart = attends && !spec.fused_projections;
    assert_eq!(
        dims("self_attn.q_proj"),
        when(apart, (spec.q_width(), hidden))
    );
    assert_eq!(
        dims("self_attn.k_proj"),
        when(apart, (spec.kv_width(), hidden))
    );
    assert_eq!(
        dims("self_attn.v_proj"),
        when(apart, (spec.kv_width(), hidden))
    );
    assert_eq!(
        dims("self_attn.qkv_proj"),
        when(
            spec.fused_projections,
            (spec.q_width() + 2 * spec.kv_width(), hidden)
        )
    );
    assert_eq!(
        dims("self_attn.o_proj"),
        when(attends, (hidden, spec.attention_width()))
    );
    let Some(linear) = spec.linear_attention.as_ref().filter(|_| !attends) else {
        assert_eq!(dims("linear_attn.out_proj"), None);
        return;
    };
    let (key, value) = (linear.key_width(), linear.value_width());
    let split = linear.inputs == LinearInputs::Split;
    assert_eq!(dims("linear_attn.out_proj"), Some((hidden, value)));
    assert_eq!(
        dims("linear_attn.in_proj_qkv"),
        when(split, (2 * key + value, hidden))
    );
    assert_eq!(dims("linear_attn.in_proj_z"), when(split, (value, hidden)));
    assert_eq!(
        dims("linear_attn.in_proj_a"),
        when(split, (linear.value_heads, hidden))
    );
    assert_eq!(
        dims("linear_attn.in_proj_qkvz"),
        when(!split, (2 * key + 2 * value, hidden))
    );
    assert_eq!(
        dims("linear_attn.in_proj_ba"),
        when(!split, (2 * linear.value_heads, hidden))
    );
}

fn check_ffn(spec: &ModelSpec, layer: &LayerSpec, shapes: &Value, at: &dyn Fn(&str) -> String) {
    let hidden = spec.hidden_size;
    let block = spec.ffn_block();
    let inside = |module: &str| at(&format!("{block}.{module}"));
    let dims = |module: &str| weight(shapes, &format!("{}.weight", inside(module)));
    match layer.ffn {
        FfnKind::Dense { width } if spec.fused_projections => {
            assert_eq!(dims("gate_up_proj"), Some((2 * width, hidden)));
            assert_eq!(dims("down_proj"), Some((hidden, width)));
        }
        FfnKind::Dense { width } => {
            assert_eq!(dims("gate_proj"), Some((width, hidden)));
            assert_eq!(dims("up_proj"), Some((width, hidden)));
            assert_eq!(dims("down_proj"), Some((hidden, width)));
        }
        FfnKind::Absent => panic!("no recorded model has a layer without a feed-forward block"),
        FfnKind::Moe => {
            let moe = spec.moe.as_ref().unwrap();
            let (experts, width) = (moe.num_experts, moe.expert_width);
            let stored = |out: usize, input: usize| match moe.stacked_axes {
                StackedAxes::OutIn => Some(vec![experts, out, input]),
                StackedAxes::InOut => Some(vec![experts, input, out]),
            };
            assert_eq!(dims(moe.router_name), Some((experts, hidden)));
            assert_eq!(
                stacked(shapes, &inside("experts.gate_up_proj")),
                stored(2 * width, hidden)
            );
            assert_eq!(
                stacked(shapes, &inside("experts.down_proj")),
                stored(hidden, width)
            );
            assert_eq!(
                dims("shared_expert.up_proj"),
                moe.shared_expert_width.map(|width| (width, hidden))
            );
            assert_eq!(
                dims("shared_expert_gate"),
                moe.shared_expert_gate.then_some((1, hidden))
            );
        }
    }
}

#[test]
fn what_configs_leave_out_is_what_transformers_fills_in() {
    let data: Value = serde_json::from_str(include_str!("../data/hf_defaults.json")).unwrap();
    let cases = data["cases"].as_array().unwrap();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let spec = spec(&case["config"]).unwrap_or_else(|error| panic!("{name}: {error}"));
        let expected = &case["expected"];
        let number = |key: &str| expected[key].as_u64().unwrap() as usize;
        assert_eq!(spec.head_dim, number("head_dim"), "{name}");
        assert_eq!(spec.heads, number("num_attention_heads"), "{name}");
        assert_eq!(spec.kv_heads, number("num_key_value_heads"), "{name}");
        assert_eq!(spec.vocab_size, number("vocab_size"), "{name}");
        assert_eq!(
            spec.tied_embeddings,
            expected["tie_word_embeddings"].as_bool().unwrap(),
            "{name}"
        );
        assert_eq!(
            spec.hidden_act,
            expected["activation"].as_str().unwrap(),
            "{name}"
        );
        let kinds: Vec<&str> = spec
            .layers
            .iter()
            .map(|layer| match layer.attention {
                AttentionKind::Full => "full_attention",
                AttentionKind::Sliding => "sliding_attention",
                AttentionKind::Chunked => "chunked_attention",
                AttentionKind::Linear => "linear_attention",
            })
            .collect();
        assert_eq!(json!(kinds), expected["layer_types"], "{name}");
        let moe: Vec<bool> = spec
            .layers
            .iter()
            .map(|layer| layer.ffn == FfnKind::Moe)
            .collect();
        assert_eq!(json!(moe), expected["moe"], "{name}");
        if let Some(moe) = &spec.moe {
            assert_eq!(moe.top_k, number("num_experts_per_tok"), "{name}");
        }
    }
    let covered: Vec<&Value> = cases
        .iter()
        .map(|case| &case["config"]["model_type"])
        .collect();
    for family in ModelFamily::NAMES {
        let text = format!("{family}_text");
        assert!(
            covered
                .iter()
                .any(|name| **name == *family || **name == *text),
            "{family} has no case"
        );
    }
}

#[test]
fn every_family_is_known_with_and_without_text() {
    for name in ModelFamily::NAMES {
        let family = ModelFamily::from_model_type(name).unwrap();
        assert_eq!(family.name(), name);
        assert_eq!(spec(&small(name)).unwrap().family, family);
        assert_eq!(
            spec(&small(&format!("{name}_text"))).unwrap().family,
            family
        );
    }
    for other in ["gpt2", "", "llama_text_text", "Llama", "qwen2_vl"] {
        assert_eq!(ModelFamily::from_model_type(other), None);
    }
    assert_eq!(ModelFamily::Custom.name(), "custom");
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
fn stacked_experts_are_stored_as_each_family_stores_them() {
    let stored = |name: &str| {
        let moe = spec(&small(name)).unwrap().moe.unwrap();
        (moe.stacked_axes, moe.gate_up, moe.is_transposed)
    };
    use GateUpOrder::{Concatenated, Interleaved};
    use StackedAxes::{InOut, OutIn};
    for name in [
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe",
        "mixtral",
    ] {
        assert_eq!(stored(name), (OutIn, Concatenated, false), "{name}");
    }
    assert_eq!(stored("gpt_oss"), (InOut, Interleaved, true));
    assert_eq!(stored("llama4"), (InOut, Concatenated, false));
}

#[test]
fn gated_attention_follows_the_family_unless_stated() {
    for name in ModelFamily::NAMES {
        let gated = matches!(name, "qwen3_next" | "qwen3_5" | "qwen3_5_moe");
        assert_eq!(spec(&small(name)).unwrap().gated_attention, gated, "{name}");
    }
    let stated = spec(&small_with("qwen3_5", json!({"attn_output_gate": false}))).unwrap();
    assert!(!stated.gated_attention);
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
fn sizes_that_no_layer_uses_may_be_absent() {
    let all_moe = small_with("qwen3_moe", json!({"intermediate_size": "<absent>"}));
    assert!(spec(&all_moe).is_ok());
    let all_dense = small_with(
        "qwen3_moe",
        json!({"mlp_only_layers": [0, 1, 2, 3], "num_experts": "<absent>", "moe_intermediate_size": "<absent>"}),
    );
    assert_eq!(spec(&all_dense).unwrap().moe, None);
    let no_experts = small_with("qwen3_moe", json!({"num_experts": 0}));
    let no_experts = spec(&no_experts).unwrap();
    assert_eq!(no_experts.moe, None);
    assert!(
        no_experts
            .layers
            .iter()
            .all(|layer| layer.ffn == FfnKind::Dense { width: 40 })
    );
    let all_attention = small_with(
        "qwen3_5",
        json!({"layer_types": vec!["full_attention"; 4], "linear_num_key_heads": "<absent>"}),
    );
    assert_eq!(spec(&all_attention).unwrap().linear_attention, None);
    let no_shared = small_with("qwen2_moe", json!({"shared_expert_intermediate_size": 0}));
    let moe = spec(&no_shared).unwrap().moe.unwrap();
    assert_eq!(
        (moe.shared_expert_width, moe.shared_expert_gate),
        (None, false)
    );
}

#[test]
fn moe_layers_are_dense_where_a_config_says_so() {
    let moe = |config: Value| -> Vec<bool> {
        let layers = spec(&config).unwrap().layers;
        layers
            .iter()
            .map(|layer| layer.ffn == FfnKind::Moe)
            .collect()
    };
    assert_eq!(
        moe(small_with("qwen3_moe", json!({"decoder_sparse_step": 2}))),
        [false, true, false, true]
    );
    assert_eq!(
        moe(small_with("qwen3_moe", json!({"mlp_only_layers": [2, 99]}))),
        [true, true, false, true]
    );
    assert_eq!(
        moe(small_with("qwen3_moe", json!({"first_k_dense_replace": 1}))),
        [false, true, true, true]
    );
    assert_eq!(
        moe(small_with(
            "llama4",
            json!({"interleave_moe_layer_step": 4})
        )),
        [false, false, false, true]
    );
    let llama4 = spec(&small_with("llama4", json!({"moe_layers": [1]}))).unwrap();
    assert_eq!(llama4.layers[0].ffn, FfnKind::Dense { width: 24 });
    assert_eq!(llama4.moe.unwrap().expert_width, 40);
    let dense_llama4 = spec(&small_with("llama4", json!({"moe_layers": []}))).unwrap();
    assert_eq!(
        (dense_llama4.moe.as_ref(), dense_llama4.ffn_block()),
        (None, "feed_forward")
    );
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
fn the_text_model_of_a_multimodal_config_is_read() {
    let config = json!({
        "model_type": "some_vlm", "hidden_size": 7, "tie_word_embeddings": true,
        "text_config": small_with("qwen3", json!({"tie_word_embeddings": false})),
    });
    let spec = spec(&config).unwrap();
    assert_eq!((spec.family, spec.hidden_size), (ModelFamily::Qwen3, 32));
    assert!(
        spec.tied_embeddings,
        "the outer flag is the one that Hugging Face acts on"
    );
    let mut untyped = small("");
    untyped.as_object_mut().unwrap().remove("model_type");
    let outer = json!({"model_type": "qwen3_vl", "text_config": untyped});
    assert_eq!(self::spec(&outer).unwrap().family, ModelFamily::Qwen3Vl);
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
