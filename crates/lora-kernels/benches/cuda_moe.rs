//! Deltas of a MoE block's experts on a GPU, routing of the rows included, weights cold: correct first, then timed by device events. After criterion's own lines
//! a table of all shapes, each launch apart, with floor and goals beside them. Without `--bench`, tiny sizes; without a GPU, nothing but why.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lora_kernels::LaunchOptions;
use lora_kernels::bench::{
    BenchDevice, H200_MOE_SHAPES, MoeBench, MoeLayer, MoeShape, MoeTable, QWEN3_30B_LAYER,
    TINY_MOE_LAYER, TINY_MOE_SHAPES,
};
use lora_kernels::cuda::CudaBackend;
use std::time::Duration;

/// Replays of a graph whose median the table shows.
const RUNS: usize = 20;

fn cuda_moe(c: &mut Criterion) {
    let device = match CudaBackend::new(0) {
        Ok(backend) => BenchDevice::cuda(backend),
        Err(error) => {
            println!("cuda_moe: skipped: {error}");
            return;
        }
    };
    // What criterion goes by: cargo bench passes `--bench`, cargo test does not.
    let timed = std::env::args().any(|argument| argument == "--bench");
    let (shapes, layer): (&[MoeShape], MoeLayer) = if timed {
        (&H200_MOE_SHAPES, QWEN3_30B_LAYER)
    } else {
        (&TINY_MOE_SHAPES, TINY_MOE_LAYER)
    };
    let mut group = c.benchmark_group("cuda_moe");
    group.warm_up_time(Duration::from_millis(200));
    group.measurement_time(Duration::from_secs(1));
    group.sample_size(10);
    let mut table = MoeTable::new(&device);
    for &shape in shapes {
        let options = LaunchOptions::default();
        let mut bench = MoeBench::new(&device, shape, layer, options).expect("set up");
        let verdict = bench.check().expect("check");
        assert!(verdict.passes(), "{shape}: {verdict:?}");
        table.lines.push(bench.measure(RUNS).expect("measure"));
        let (copies, bytes) = (bench.copies() as u64, bench.bytes().floor());
        let mut work = bench.work().expect("capture");
        group.throughput(Throughput::Bytes(bytes));
        group.bench_function(shape.to_string(), |b| {
            b.iter_custom(|layers| work.device_time(layers, copies).expect("replay"));
        });
    }
    group.finish();
    println!("{table}");
}

criterion_group!(benches, cuda_moe);
criterion_main!(benches);
