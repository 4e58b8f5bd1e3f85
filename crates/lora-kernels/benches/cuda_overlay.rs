//! Token overlays on a GPU, cold: correct first, then timed by device events; prints a table with floors and goals. Without `--bench`, tiny
//! sizes; without a GPU, nothing but why.

use lora_kernels::bench::{
    BenchDevice, H200_OVERLAYS, OverlayBench, OverlayReport, OverlayShape, TINY_OVERLAYS,
};
use lora_kernels::cuda::CudaBackend;

/// Replays of a graph whose median is shown.
const RUNS: usize = 20;

fn main() {
    let device = match CudaBackend::new(0) {
        Ok(backend) => BenchDevice::cuda(backend),
        Err(error) => {
            println!("cuda_overlay: skipped: {error}");
            return;
        }
    };
    // What criterion goes by too: cargo bench passes `--bench`, cargo test does not.
    let timed = std::env::args().any(|argument| argument == "--bench");
    let shapes: &[OverlayShape] = if timed {
        &H200_OVERLAYS
    } else {
        &TINY_OVERLAYS
    };
    let mut report = OverlayReport::new(&device);
    for &shape in shapes {
        let mut bench = OverlayBench::new(&device, shape).expect("set up");
        let verdict = bench.check().expect("check");
        assert!(verdict.passes(), "{shape}: {verdict:?}");
        report.lines.push(bench.measure(RUNS).expect("measure"));
        println!("{shape}: worst {:.2} of what is allowed", verdict.worst);
    }
    println!("{report}");
}
