use crate::cuda::CudaError;
use lora_weights::device::MemoryError;

/// Why a launch was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Device memory refused.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// CUDA cannot be used, or refused a call.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}
