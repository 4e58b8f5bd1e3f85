//! Time to parse an adapter's and a model's config, and to look one module's scale up.
//!
//! `cargo bench -p lora-config`; with `cargo test -p lora-config --benches` each body runs once.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use lora_config::{AdapterConfig, ModelSpec, ParseOptions, parse_peft_adapter_config};
use std::hint::black_box;

/// What PEFT writes for all seven projections of a dense model, with `keys` as `rank_pattern`.
fn adapter_json(keys: &[String]) -> String {
    let keys: Vec<String> = keys.iter().map(|key| format!("{key:?}: 8")).collect();
    format!(
        r#"{{"alpha_pattern": {{}}, "bias": "none", "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false,
            "inference_mode": true, "init_lora_weights": true, "layers_to_transform": null, "loftq_config": {{}},
            "lora_alpha": 16, "lora_bias": false, "lora_dropout": 0.0, "megatron_core": "megatron.core",
            "modules_to_save": null, "peft_type": "LORA", "peft_version": "0.21.2", "r": 64, "rank_pattern": {{{}}},
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "task_type": "CAUSAL_LM", "use_dora": false, "use_qalora": false, "use_rslora": false}}"#,
        keys.join(", ")
    )
}

/// One key a module of a 32-layer model: what EVA leaves.
fn key_per_module() -> Vec<String> {
    let modules = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ];
    (0..32)
        .flat_map(|layer| modules.map(|module| format!("model.layers.{layer}.{module}")))
        .collect()
}

const MODEL: &str = r#"{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": true, "tie_word_embeddings": false}"#;

fn parse(json: &str) -> AdapterConfig {
    parse_peft_adapter_config(json, &ParseOptions::default()).expect("a valid config")
}

fn benches(c: &mut Criterion) {
    let plain = adapter_json(&[]);
    let patterns = adapter_json(&key_per_module());
    let regexes = adapter_json(&[
        r".*\.[0-7]\.mlp\.(gate|up)_proj".to_owned(),
        "(?!x)y".to_owned(),
    ]);

    // Correct first.
    let path = "model.layers.31.mlp.down_proj";
    assert_eq!(parse(&plain).scaling(path), 0.25);
    assert_eq!(parse(&patterns).scaling(path), 2.0);
    assert_eq!(parse(&regexes).module("model.layers.3.mlp.up_proj").rank, 8);
    assert_eq!(
        ModelSpec::from_hf_config(MODEL)
            .expect("a valid config")
            .layers
            .len(),
        48
    );

    let mut group = c.benchmark_group("parse");
    group.bench_function("adapter_config", |b| b.iter(|| parse(black_box(&plain))));
    group.bench_function("adapter_config, 224 pattern keys", |b| {
        b.iter(|| parse(black_box(&patterns)))
    });
    group.bench_function("adapter_config, 2 regex keys", |b| {
        b.iter(|| parse(black_box(&regexes)))
    });
    group.bench_function("model config", |b| {
        b.iter(|| ModelSpec::from_hf_config(black_box(MODEL)))
    });
    group.finish();

    let mut group = c.benchmark_group("module scale");
    for (name, json) in [
        ("no pattern", &plain),
        ("224 pattern keys", &patterns),
        ("2 regex keys", &regexes),
    ] {
        let config = parse(json);
        group.bench_function(name, |b| b.iter(|| config.module(black_box(path))));
    }
    group.finish();

    // A fresh config each time: the first match builds its automaton.
    c.bench_function("first match of a regex key", |b| {
        b.iter_batched(
            || parse(&regexes),
            |config| config.module(black_box(path)),
            BatchSize::SmallInput,
        )
    });
}

criterion_group!(parse_benches, benches);
criterion_main!(parse_benches);
