//! Deltas of the experts of a MoE block.

use super::RUNS;
use crate::CliError;
use lora_kernels::LaunchOptions;
use lora_kernels::bench::{
    BenchDevice, H200_MOE_SHAPES, HOST_MOE_SHAPES, MoeBench, MoeLayer, MoeShape, MoeTable,
    QWEN3_30B_LAYER, TINY_MOE_LAYER, TINY_MOE_SHAPES,
};
use lora_runtime::RuntimeError;

/// Times of the experts of a Qwen3-30B-A3B block, or of a tiny one where `quick`, each shape checked before it is timed.
///
/// # Errors
/// A backend without room, and [`CliError::WrongExperts`] for a result that is not what the reference gives.
pub fn expert_times(
    device: &BenchDevice,
    options: LaunchOptions,
    quick: bool,
) -> Result<MoeTable, CliError> {
    let (shapes, layer): (&[MoeShape], MoeLayer) = match quick {
        true => (&TINY_MOE_SHAPES, TINY_MOE_LAYER),
        false if device.is_asynchronous() => (&H200_MOE_SHAPES, QWEN3_30B_LAYER),
        false => (&HOST_MOE_SHAPES, QWEN3_30B_LAYER),
    };
    let mut table = MoeTable::new(device);
    for &shape in shapes {
        let bench = MoeBench::new(device, shape, layer, options);
        let mut bench = bench.map_err(RuntimeError::from)?;
        let verdict = bench.check().map_err(RuntimeError::from)?;
        if !verdict.passes() {
            return Err(CliError::WrongExperts { shape, verdict });
        }
        let times = bench.measure(RUNS).map_err(RuntimeError::from)?;
        table.lines.push(times);
    }
    Ok(table)
}
