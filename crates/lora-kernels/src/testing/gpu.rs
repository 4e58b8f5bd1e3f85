//! The GPU that tests run on.

use crate::cuda::{CudaBackend, CudaError};
use std::sync::Arc;

/// Asks for a GPU where a test is to be skipped without one.
#[derive(Debug, Clone, Copy)]
pub struct GpuTest<'a> {
    /// Name, for the message.
    pub name: &'a str,
    /// Whether this machine is there to run such tests, so that a missing GPU is a failure. Tests pass whether `LORA_REQUIRE_CUDA` is 1.
    pub required: bool,
}

impl GpuTest<'_> {
    /// The first GPU; `None`, said on stderr with the reason, where there is none.
    ///
    /// # Panics
    /// Where there is none and one is required, and for any other failure.
    pub fn open(self) -> Option<Arc<CudaBackend>> {
        let name = self.name;
        match CudaBackend::new(0) {
            Ok(backend) => Some(Arc::new(backend)),
            Err(error @ (CudaError::NoDriver | CudaError::NoDevice { .. })) if !self.required => {
                eprintln!("{name}: skipped: {error}");
                None
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }
}
