//! What an engine does a step or a request: row maps, leases, look-ups.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Adapter, Geometry, TestMemory, tiny_model};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lora_weights::{
    BASE_SLOT, LoraModule, LoraSites, LoraWeights, PoolSpec, fill_seq_slot_host, uniform_seq_slots,
};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};

const SLOTS: u32 = 64;

fn serving() -> LoraWeights {
    let model = tiny_model();
    let geometry = Geometry::dense(&model, 4);
    let memory = TestMemory::new(1 << 30);
    let weights = LoraWeights::new(memory, model.clone(), PoolSpec::new(SLOTS, 8)).unwrap();
    let active = Adapter::new("active", &geometry, 1.0);
    weights.load(&[active.input()]).unwrap();
    for slot in 1..SLOTS {
        let name = format!("adapter {slot}");
        let adapter = Adapter::new(&name, &geometry, 1.0);
        weights.promote(&adapter.input()).unwrap();
    }
    weights
}

fn rows(c: &mut Criterion, weights: &LoraWeights) {
    let mut group = c.benchmark_group("rows");
    for count in [1usize, 64, 4096] {
        let requests: Vec<i32> = (0..count as i32)
            .map(|row| match row % 8 {
                6 => -1,
                7 => BASE_SLOT,
                _ => row % SLOTS as i32,
            })
            .collect();
        let mut map = vec![0; count + 8];
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(format!("build_seq_slot_host/{count}"), |b| {
            b.iter(|| {
                fill_seq_slot_host(black_box(&requests), &mut map, weights.slot_space()).unwrap();
            });
        });
    }
    group.finish();
    c.bench_function("uniform_seq_slots/64", |b| {
        let space = weights.slot_space();
        b.iter(|| uniform_seq_slots(black_box(3), 64, LoraSites::MultiSeq, space).unwrap());
    });
}

fn leases(c: &mut Criterion, weights: &LoraWeights) {
    c.bench_function("acquire_release", |b| {
        b.iter(|| {
            let slot = weights.acquire_slot(black_box(5));
            weights.release_slot(slot)
        });
    });
    c.bench_function("lease", |b| {
        b.iter(|| weights.lease(black_box(5)).unwrap().slot());
    });
    c.bench_function("select_routed_pair", |b| {
        b.iter(|| weights.select_routed_pair(black_box(5), 1, LoraModule::DownProj));
    });
    // Another slot changes hands all the while.
    let stop = AtomicBool::new(false);
    let model = tiny_model();
    let swapped = Adapter::new("swapped", &Geometry::dense(&model, 4), 2.0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                weights.swap(9, &swapped.input()).unwrap();
            }
        });
        c.bench_function("acquire_release/during_swaps", |b| {
            b.iter(|| {
                let slot = weights.acquire_slot(black_box(5));
                weights.release_slot(slot)
            });
        });
        stop.store(true, Ordering::Relaxed);
    });
}

fn bench(c: &mut Criterion) {
    let weights = serving();
    rows(c, &weights);
    leases(c, &weights);
}

criterion_group!(benches, bench);
criterion_main!(benches);
