//! What `lora bench` measures: bringing an adapter in, swapping one while others decode, adding deltas, and token overlays.

mod deltas;
mod experts;
mod loading;
mod overlays;
mod swapping;
mod synthetic;

pub use deltas::{bench_device, delta_times};
pub use experts::expert_times;
pub use loading::{Synthetic, adapter_times};
pub use overlays::overlay_times;
pub use swapping::{PhaseTimes, Spread, SwapTimes, swap_times};
pub use synthetic::Shape;

use std::time::Instant;

/// Counted runs of each time of a backend.
const RUNS: usize = 20;

/// Median time of `runs` calls, microseconds, after one that is not counted.
fn median_us<E>(runs: usize, mut call: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    call()?;
    let mut times = Vec::with_capacity(runs);
    for _ in 0..runs {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
