//! Owners of device and staging memory.

use crate::device::{DeviceMemory, DevicePtr, MemoryError, StagingBuffer};
use parking_lot::Mutex;
use std::sync::Arc;

/// Device memory of the pool, freed when dropped.
pub(super) struct DeviceRegion {
    memory: Arc<dyn DeviceMemory>,
    base: DevicePtr,
}

impl DeviceRegion {
    pub(super) fn zeroed(memory: &Arc<dyn DeviceMemory>, bytes: u64) -> Result<Self, MemoryError> {
        Ok(Self {
            memory: Arc::clone(memory),
            base: memory.alloc_resident(bytes)?,
        })
    }

    pub(super) fn base(&self) -> DevicePtr {
        self.base
    }
}

impl Drop for DeviceRegion {
    fn drop(&mut self) {
        if let Err(error) = self.memory.free(self.base) {
            tracing::warn!(ptr = %self.base, %error, "device memory was not freed");
        }
    }
}

/// Keeps the largest staging buffer that came back, so that the next image finds its pages mapped (and, on a GPU,
/// pinned). At most one is kept idle; images staged at the same time get one each.
pub(super) struct StagingCache {
    memory: Arc<dyn DeviceMemory>,
    idle: Mutex<Option<Box<dyn StagingBuffer>>>,
}

impl StagingCache {
    pub(super) fn new(memory: &Arc<dyn DeviceMemory>) -> Self {
        Self {
            memory: Arc::clone(memory),
            idle: Mutex::new(None),
        }
    }

    /// A buffer of at least `bytes` bytes, of unspecified contents.
    pub(super) fn take(&self, bytes: usize) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        // Taken out of the lock first: a buffer that is too small is freed before its successor is allocated.
        let idle = self.idle.lock().take();
        match idle.filter(|buffer| buffer.bytes().len() >= bytes) {
            Some(buffer) => Ok(buffer),
            None => self.memory.stage(bytes),
        }
    }

    /// Takes a buffer back.
    pub(super) fn put(&self, buffer: Box<dyn StagingBuffer>) {
        let mut idle = self.idle.lock();
        let larger = idle
            .as_ref()
            .is_none_or(|kept| kept.bytes().len() < buffer.bytes().len());
        let dropped = if larger {
            idle.replace(buffer)
        } else {
            Some(buffer)
        };
        drop(idle);
        drop(dropped);
    }

    /// Frees the idle buffer.
    pub(super) fn clear(&self) {
        let idle = self.idle.lock().take();
        drop(idle);
    }
}
