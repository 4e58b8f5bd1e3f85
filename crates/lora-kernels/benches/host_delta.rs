//! Deltas on the host, 4096 -> 4096, two threads: correct first, then timed.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use lora_kernels::host::{HostBackend, HostOptions, SimdLevel};
use lora_kernels::testing::{Batch, BatchShape, DeviceBatch, TestBackend, Via};
use lora_kernels::{LaunchOptions, Problem, Stream, bytes_moved};
use std::sync::Arc;

const WIDTH: u32 = 4096;

/// (rank, rows, adapters): one row and a batch of one adapter, and a batch in which each row has its own.
const SHAPES: [(u32, u32, u32); 8] = [
    (16, 1, 1),
    (16, 8, 1),
    (16, 64, 1),
    (16, 8, 8),
    (64, 1, 1),
    (64, 8, 1),
    (64, 64, 1),
    (64, 8, 8),
];

fn backend(simd: SimdLevel) -> Option<TestBackend> {
    let options = HostOptions {
        threads: 2,
        simd: Some(simd),
        ..HostOptions::default()
    };
    Some(Arc::new(HostBackend::with_options(options).ok()?))
}

fn host_delta(c: &mut Criterion) {
    for simd in [SimdLevel::Avx512, SimdLevel::Avx2] {
        let Some(backend) = backend(simd) else {
            continue;
        };
        let mut group = c.benchmark_group(format!("host_delta/{simd:?}"));
        for (rank, rows, adapters) in SHAPES {
            let shape = BatchShape {
                slots: adapters,
                ..BatchShape::single(1, rank, (WIDTH, WIDTH))
            };
            let slots: Vec<i32> = (0..rows).map(|row| (row % adapters) as i32).collect();
            let batch = Batch::random(&shape, &slots);
            batch.assert_correct(&backend, Via::Routed);

            let problem = Problem::uniform(rows, adapters, rank, (WIDTH, &[WIDTH]));
            group.throughput(Throughput::Bytes(bytes_moved(&problem).floor()));
            let options = LaunchOptions::default();
            let mut device = DeviceBatch::new(&backend, &batch, Via::Routed, options);
            device.group(Stream::OWN);
            let id = BenchmarkId::new(
                format!("rank{rank}"),
                format!("{rows}rows_{adapters}adapters"),
            );
            group.bench_function(id, |b| b.iter(|| device.launch(Stream::OWN)));
        }
    }
}

criterion_group!(benches, host_delta);
criterion_main!(benches);
