//! Token overlays.

use super::RUNS;
use crate::CliError;
use lora_kernels::bench::{
    BenchDevice, H200_OVERLAYS, HOST_OVERLAYS, OverlayBench, OverlayReport, OverlayShape,
    TINY_OVERLAYS,
};
use lora_runtime::RuntimeError;

/// Times of building an overlay and of applying overlays to a batch, of a large vocabulary or of a tiny one where `quick`, each shape checked before
/// it is timed.
///
/// # Errors
/// A backend without room, and [`CliError::WrongOverlay`] for a result that is not what the reference gives.
pub fn overlay_times(device: &BenchDevice, quick: bool) -> Result<OverlayReport, CliError> {
    let shapes: &[OverlayShape] = match quick {
        true => &TINY_OVERLAYS,
        false if device.is_asynchronous() => &H200_OVERLAYS,
        false => &HOST_OVERLAYS,
    };
    let mut report = OverlayReport::new(device);
    for &shape in shapes {
        let mut bench = OverlayBench::new(device, shape).map_err(RuntimeError::from)?;
        let verdict = bench.check().map_err(RuntimeError::from)?;
        if !verdict.passes() {
            return Err(CliError::WrongOverlay { shape, verdict });
        }
        let times = bench.measure(RUNS).map_err(RuntimeError::from)?;
        report.lines.push(times);
    }
    Ok(report)
}
