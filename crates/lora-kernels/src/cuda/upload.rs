//! Uploads on their way, and the events that say when they have landed.

use super::CudaError;
use super::driver::Named;
use super::memory::Memory;
use cudarc::driver::{DriverError, result, sys};
use lora_weights::device::{Completion, MemoryError, StagingBuffer};
use std::sync::Arc;

/// An event without timing.
pub(super) struct Event(sys::CUevent);

// SAFETY: an event handle is a driver-owned name that any thread may use.
unsafe impl Send for Event {}

impl Event {
    pub(super) fn new() -> Result<Self, CudaError> {
        Ok(Self(
            result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
                .named("creating an upload event")?,
        ))
    }

    pub(super) fn record(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: event and stream are live and of the current context.
        unsafe { result::event::record(self.0, stream) }.named("recording an upload event")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; the driver defers destruction of a pending event.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// An upload on its way.
pub(super) struct Landing {
    pub(super) event: Event,
    pub(super) stream: sys::CUstream,
    pub(super) source: Option<Box<dyn StagingBuffer>>,
    pub(super) memory: Arc<Memory>,
}

// SAFETY: the stream is a driver-owned name that any thread may use once it has bound the context; the rest is `Send` for itself.
unsafe impl Send for Landing {}

impl Completion for Landing {
    fn is_done(&self) -> Result<bool, MemoryError> {
        self.memory.context.bind()?;
        // SAFETY: the event lives as long as `self`.
        match unsafe { result::event::query(self.event.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(Err::<(), _>(error)
                .named("polling an upload")
                .unwrap_err()
                .into()),
        }
    }

    fn wait(mut self: Box<Self>) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        self.memory.context.bind()?;
        // SAFETY: the event lives as long as `self`.
        unsafe { result::event::synchronize(self.event.0) }.named("waiting for an upload")?;
        Ok(self.source.take().expect("given back once"))
    }

    fn event(&self) -> Option<u64> {
        Some(self.event.0 as u64)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if self.source.is_some() && self.memory.context.bind().is_ok() {
            let _ = self.memory.drain(self.stream);
        }
    }
}
