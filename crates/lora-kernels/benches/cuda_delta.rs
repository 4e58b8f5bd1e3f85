//! Deltas of a layer on a GPU, weights cold: correct first, then timed by device events. Prints every launch's plan with the bytes it moves,
//! and, after criterion's own lines, a table of all shapes with floor and goals beside them. Without `--bench`, tiny sizes; without a GPU, nothing but why.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lora_kernels::bench::{
    BenchDevice, DeltaBench, DeltaShape, DeltaTable, H200_SHAPES, LLAMA_8B_LAYER, LayerSite,
    TINY_LAYER, TINY_SHAPES,
};
use lora_kernels::cuda::{CudaBackend, plan};
use std::time::Duration;

/// Replays of a graph whose median the table shows.
const RUNS: usize = 20;

fn cuda_delta(c: &mut Criterion) {
    let device = match CudaBackend::new(0) {
        Ok(backend) => BenchDevice::cuda(backend),
        Err(error) => {
            println!("cuda_delta: skipped: {error}");
            return;
        }
    };
    // What criterion goes by: cargo bench passes `--bench`, cargo test does not.
    let timed = std::env::args().any(|argument| argument == "--bench");
    let (shapes, layer): (&[DeltaShape], &[LayerSite]) = if timed {
        (&H200_SHAPES, &LLAMA_8B_LAYER)
    } else {
        (&TINY_SHAPES, &TINY_LAYER)
    };
    let mut group = c.benchmark_group("cuda_delta");
    group.warm_up_time(Duration::from_millis(200));
    group.measurement_time(Duration::from_secs(1));
    group.sample_size(10);
    let mut table = DeltaTable::new(&device);
    for &shape in shapes {
        let mut bench = DeltaBench::new(&device, shape, layer).expect("set up");
        let verdict = bench.check().expect("check");
        assert!(verdict.passes(), "{shape}: {verdict:?}");
        for site in layer {
            let plan = plan(&shape.problem(site), device.backend().caps());
            println!("{shape}, {}: {plan}", site.name);
        }
        table.lines.push(bench.measure(RUNS).expect("measure"));
        let copies = bench.copies() as u64;
        let mut work = bench.work(0..layer.len()).expect("capture");
        group.throughput(Throughput::Bytes(shape.bytes(layer).floor()));
        group.bench_function(shape.to_string(), |b| {
            b.iter_custom(|layers| work.device_time(layers, copies).expect("replay"));
        });
    }
    group.finish();
    println!("{table}");
}

criterion_group!(benches, cuda_delta);
criterion_main!(benches);
