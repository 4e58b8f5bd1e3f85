//! Deltas of one layer of a model.

use super::RUNS;
use crate::CliError;
use crate::options::BackendArg;
use lora_kernels::KernelError;
use lora_kernels::bench::{
    BenchDevice, DeltaBench, DeltaShape, DeltaTable, H200_SHAPES, HOST_SHAPES, LLAMA_8B_LAYER,
    LayerSite, TINY_LAYER, TINY_SHAPES,
};
use lora_kernels::cuda::CudaBackend;
use lora_kernels::host::HostBackend;
use lora_runtime::RuntimeError;

/// The device that `backend` names.
///
/// # Errors
/// For CUDA what is missing: driver, device, kernels for its architecture.
pub fn bench_device(backend: BackendArg) -> Result<BenchDevice, CliError> {
    match backend {
        BackendArg::Host => Ok(BenchDevice::host(HostBackend::new())),
        BackendArg::Cuda => {
            let backend = CudaBackend::new(0).map_err(KernelError::from);
            Ok(BenchDevice::cuda(backend.map_err(RuntimeError::from)?))
        }
    }
}

/// Times of the deltas of a layer of a Llama of 8 billion parameters, or of a tiny one where `quick`, each shape checked
/// before it is timed.
///
/// # Errors
/// A backend without room, and [`CliError::WrongDelta`] for a result that is not what the reference gives.
pub fn delta_times(device: &BenchDevice, quick: bool) -> Result<DeltaTable, CliError> {
    let (shapes, layer): (&[DeltaShape], &[LayerSite]) = match quick {
        true => (&TINY_SHAPES, &TINY_LAYER),
        false if device.is_asynchronous() => (&H200_SHAPES, &LLAMA_8B_LAYER),
        false => (&HOST_SHAPES, &LLAMA_8B_LAYER),
    };
    let mut table = DeltaTable::new(device);
    for &shape in shapes {
        let mut bench = DeltaBench::new(device, shape, layer).map_err(RuntimeError::from)?;
        let verdict = bench.check().map_err(RuntimeError::from)?;
        if !verdict.passes() {
            return Err(CliError::WrongDelta { shape, verdict });
        }
        let times = bench.measure(RUNS).map_err(RuntimeError::from)?;
        table.lines.push(times);
    }
    Ok(table)
}
