//! Model geometry: against the recorded base models' own shapes, and against what transformers fills in.

use crate::common::{cases, read_json, small, small_with, spec};
use lora_config::{
    AttentionKind, ConfigError, FfnKind, GateUpOrder, LayerSpec, LinearInputs, ModelFamily,
    ModelSpec, StackedAxes,
};
use serde_json::{Value, json};

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
