//! Which device deltas run on.

use crate::RuntimeError;
use lora_config::BackendKind;
use lora_kernels::cuda::CudaBackend;
use lora_kernels::host::HostBackend;
use lora_kernels::{KernelError, LoraBackend};
use std::sync::Arc;

/// Opens a backend, its kernels resolved: the host, or the first NVIDIA GPU through its primary context. An engine with
/// another GPU or a context of its own makes the [`CudaBackend`] itself.
///
/// # Errors
/// For CUDA an error that says what is missing (driver, device, kernels for its architecture) and names the host backend.
pub fn open_backend(kind: BackendKind) -> Result<Arc<dyn LoraBackend>, RuntimeError> {
    match kind {
        BackendKind::Cuda => Ok(Arc::new(CudaBackend::new(0).map_err(KernelError::from)?)),
        // `Host`, and no other: the enum may grow, and this crate with it.
        _ => Ok(Arc::new(HostBackend::new())),
    }
}
