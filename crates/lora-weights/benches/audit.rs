//! Opening, auditing and packing adapters, from the page cache, on rayon's threads.
//!
//! `dense` is Llama 3 8B with all seven projections at rank 64 in BF16: 335 MB. `experts` is per-expert tensors: many small
//! ones, where names and lookups count. Run as a test, both shrink to sizes that run in CI.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use lora_config::{AdapterConfig, ModelSpec, ParseOptions, parse_peft_adapter_config};
use lora_weights::{
    AdapterStore, ExpertPoolSpec, ExpertProj, LoraModule, LoraTarget, PackSource, PoolLayout,
    PoolSpec, audit_adapter, image_bytes, pack_adapter,
};
use std::hint::black_box;
use std::io::{BufWriter, Write};
use std::path::Path;

struct Shape {
    config_json: String,
    layers: usize,
    rank: usize,
    targets: fn(&ModelSpec, usize) -> Vec<LoraTarget>,
}

/// True unless `cargo bench` runs it for numbers.
fn small() -> bool {
    let given = |wanted: &str| std::env::args().any(|arg| arg == wanted);
    given("--test") || !given("--bench")
}

fn dense() -> Shape {
    let (layers, hidden, width) = if small() {
        (2, 64, 128)
    } else {
        (32, 4096, 14336)
    };
    let config_json = format!(
        r#"{{"model_type": "llama", "hidden_size": {hidden}, "intermediate_size": {width}, "num_hidden_layers": {layers},
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": {}, "vocab_size": 1000}}"#,
        hidden / 32
    );
    Shape {
        config_json,
        layers,
        rank: 64,
        targets: |spec, layer| {
            let modules = LoraModule::ALL.into_iter();
            let here = modules.filter(|module| module.applies_to_layer(spec, layer));
            here.map(LoraTarget::Attn).collect()
        },
    }
}

fn experts() -> Shape {
    let (layers, experts) = if small() { (2, 4) } else { (16, 128) };
    let config_json = format!(
        r#"{{"model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
            "num_hidden_layers": {layers}, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32,
            "vocab_size": 1000, "num_experts": {experts}, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "norm_topk_prob": true}}"#
    );
    Shape {
        config_json,
        layers,
        rank: 8,
        targets: |spec, _| {
            let experts = spec.moe.as_ref().map_or(0, |moe| moe.num_experts);
            let projections = |n| ExpertProj::ALL.map(|proj| LoraTarget::Expert { n, proj });
            (0..experts).flat_map(projections).collect()
        },
    }
}

fn path(layer: usize, target: LoraTarget) -> String {
    match target {
        LoraTarget::Expert { n, proj } => {
            format!("model.layers.{layer}.mlp.experts.{n}.{}", proj.peft_name())
        }
        _ => format!("model.layers.{layer}.{}", target.module_name()),
    }
}

/// Writes an adapter folder; values are 1/256 throughout.
fn write_adapter(dir: &Path, shape: &Shape, spec: &ModelSpec) -> u64 {
    let config = format!(
        r#"{{"peft_type": "LORA", "r": {}, "lora_alpha": 16, "use_rslora": false, "peft_version": "0.21.2",
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}}"#,
        shape.rank
    );
    let config = match spec.moe {
        Some(_) => config.replace(r#""q_proj", "k_proj", "v_proj", "o_proj", "#, ""),
        None => config,
    };
    std::fs::write(dir.join("adapter_config.json"), config).unwrap();
    let mut header = String::from("{");
    let mut bytes = 0u64;
    for layer in 0..shape.layers {
        for target in (shape.targets)(spec, layer) {
            let (out, k_in) = target.dims(spec, layer).unwrap();
            for (suffix, rows, columns) in
                [("lora_A", shape.rank, k_in), ("lora_B", out, shape.rank)]
            {
                let end = bytes + 2 * (rows * columns) as u64;
                let comma = if bytes == 0 { "" } else { "," };
                header += &format!(
                    r#"{comma}"base_model.model.{}.{suffix}.weight":{{"dtype":"BF16","shape":[{rows},{columns}],"data_offsets":[{bytes},{end}]}}"#,
                    path(layer, target)
                );
                bytes = end;
            }
        }
    }
    header += "}";
    let file = std::fs::File::create(dir.join("adapter_model.safetensors")).unwrap();
    let mut file = BufWriter::new(file);
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let piece: Vec<u8> = half::bf16::from_f32(1.0 / 256.0)
        .to_le_bytes()
        .repeat(1 << 16);
    let mut left = bytes as usize;
    while left > 0 {
        let count = left.min(piece.len());
        file.write_all(&piece[..count]).unwrap();
        left -= count;
    }
    file.flush().unwrap();
    bytes
}

fn open(dir: &Path) -> (AdapterStore, AdapterConfig) {
    let store = AdapterStore::open(dir).unwrap();
    let config = parse_peft_adapter_config(store.config_json(), &ParseOptions::default()).unwrap();
    (store, config)
}

fn bench(c: &mut Criterion) {
    for (name, shape) in [("dense", dense()), ("experts", experts())] {
        let spec = ModelSpec::from_hf_config(&shape.config_json).unwrap();
        let mut pool = PoolSpec::new(1, shape.rank as u32);
        pool.experts = spec.moe.as_ref().map(|_| ExpertPoolSpec {
            max_rank: shape.rank as u32,
            units: 1 << 16,
        });
        let dir = tempfile::tempdir().unwrap();
        let bytes = write_adapter(dir.path(), &shape, &spec);
        let layout = PoolLayout::new(&spec, &pool).unwrap();
        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Bytes(bytes)).sample_size(10);
        group.bench_function("open", |b| b.iter(|| black_box(open(dir.path()))));
        group.bench_function("audit", |b| {
            b.iter(|| {
                let (store, config) = open(dir.path());
                let report = audit_adapter(&store, &config, &spec, &pool);
                assert!(report.ok(), "{:?}", report.findings);
                report
            });
        });
        group.bench_function("audit_and_pack", |b| {
            let (store, config) = open(dir.path());
            let report = audit_adapter(&store, &config, &spec, &pool);
            // A staging buffer is made once and used again: a fresh one would time the kernel's page faults.
            let mut image = vec![0u8; image_bytes(&layout, &report.pairs).unwrap() + 16];
            let aligned = image.as_ptr().align_offset(16);
            b.iter_batched(
                || (),
                |()| {
                    let (store, config) = open(dir.path());
                    let report = audit_adapter(&store, &config, &spec, &pool);
                    let source = PackSource {
                        store: &store,
                        pairs: &report.pairs,
                    };
                    pack_adapter(source, &layout, &mut image[aligned..]).unwrap();
                },
                BatchSize::PerIteration,
            );
        });
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
