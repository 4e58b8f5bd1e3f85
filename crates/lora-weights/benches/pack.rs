//! Packing a slot image, and the rest of what brings an adapter into a slot.
//!
//! The adapter has the sizes of Llama 3 8B with all seven projections at rank 64 in BF16: 335 MB, in memory. In test mode it
//! is a tiny one.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Adapter, Geometry, TestMemory, tiny_model};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use lora_config::ModelSpec;
use lora_weights::{
    AuditReport, LoadPolicy, LoraWeights, PackSource, PoolLayout, PoolSpec, SlotTarget,
    image_bytes, pack_adapter,
};
use std::hint::black_box;

fn model() -> ModelSpec {
    let argument = |name: &str| std::env::args().any(|arg| arg == name);
    if argument("--test") || !argument("--bench") {
        return tiny_model();
    }
    let config = r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}"#;
    ModelSpec::from_hf_config(config).unwrap()
}

fn pool() -> PoolSpec {
    PoolSpec {
        policy: LoadPolicy {
            allow_rotation: true,
            ..LoadPolicy::default()
        },
        ..PoolSpec::new(2, 64)
    }
}

fn pack(adapter: &Adapter, report: &AuditReport, layout: &PoolLayout, image: &mut [u64]) {
    let source = PackSource {
        store: &adapter.store,
        pairs: &report.pairs,
    };
    pack_adapter(source, layout, bytemuck::cast_slice_mut(image)).unwrap();
}

fn bench(c: &mut Criterion) {
    let model = model();
    let layout = PoolLayout::new(&model, &pool()).unwrap();
    let memory = TestMemory::new(1 << 40);
    let weights = LoraWeights::new(memory, model.clone(), pool()).unwrap();
    let mut group = c.benchmark_group("pack");
    group.sample_size(10);
    // The pool's own rank, where rows are copied whole, and one below, where every row of B is padded.
    for rank in [64, 48] {
        let adapter = Adapter::new("a", &Geometry::dense(&model, rank), 0.5);
        let report = weights.audit(&adapter.input());
        let bytes = image_bytes(&layout, &report.pairs).unwrap();
        group.throughput(Throughput::Bytes(bytes as u64));
        let words = bytes.div_ceil(8);
        let mut recycled = vec![0; words];
        group.bench_function(format!("rank_{rank}/recycled_staging"), |b| {
            b.iter(|| pack(&adapter, &report, &layout, black_box(&mut recycled)));
        });
        group.bench_function(format!("rank_{rank}/fresh_staging"), |b| {
            let fresh = || vec![0u64; words];
            let run = |mut image: Vec<u64>| {
                pack(&adapter, &report, &layout, &mut image);
                image
            };
            b.iter_batched(fresh, run, BatchSize::PerIteration);
        });
        let input = adapter.input().with_report(&report);
        let staged = || weights.stage(&input).unwrap();
        group.bench_function(format!("rank_{rank}/begin_to_visible"), |b| {
            let install = |staged| weights.pack_store_into_slot(SlotTarget::Slot(1), staged);
            b.iter_batched(staged, install, BatchSize::PerIteration);
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
