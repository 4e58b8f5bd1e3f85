//! Page-locked host memory that uploads read from.

use super::CudaError;
use super::driver::Named;
use super::memory::{Memory, SMALL_UPLOAD_BYTES, lock};
use cudarc::driver::result;
use lora_weights::device::{MemoryError, StagingBuffer};
use std::sync::Arc;

/// Idle buffers kept for the next small upload.
const KEPT_SMALL: usize = 8;

/// Idle buffers kept for the next slot image. Page-locking 335 MB takes a quarter of a second, in which other threads' calls into the driver wait.
const KEPT_IMAGES: usize = 2;

impl Memory {
    pub(super) fn stage(
        self: &Arc<Self>,
        bytes: usize,
    ) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        let mut pinned = match self.idle_buffer(bytes) {
            Some(buffer) => buffer,
            None => {
                self.context.bind()?;
                Pinned::new(bytes.max(1))?
            }
        };
        pinned.slice_mut(bytes).fill(0);
        Ok(Box::new(Staging {
            pinned: Some(pinned),
            length: bytes,
            memory: Arc::clone(self),
        }))
    }

    pub(super) fn trim_staging(&self) {
        let idle = std::mem::take(&mut *lock(&self.idle_staging));
        if self.context.bind().is_ok() {
            drop(idle);
        }
    }

    /// The smallest idle buffer that is large enough: a row map must not take the buffer of an image.
    fn idle_buffer(&self, bytes: usize) -> Option<Pinned> {
        let mut idle = lock(&self.idle_staging);
        let fits = idle
            .iter()
            .enumerate()
            .filter(|(_, buffer)| buffer.capacity >= bytes);
        let (at, _) = fits.min_by_key(|(_, buffer)| buffer.capacity)?;
        Some(idle.swap_remove(at))
    }
}

/// Page-locked host memory.
pub(super) struct Pinned {
    base: *mut u8,
    capacity: usize,
}

// SAFETY: the memory belongs to this value alone and may be used from any thread.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(capacity: usize) -> Result<Self, CudaError> {
        // SAFETY: the context is current; `Drop` frees it.
        let base = unsafe { result::malloc_host(capacity, 0) }
            .named("allocating pinned memory")?
            .cast::<u8>();
        // SAFETY: the driver returned `capacity` writable bytes.
        unsafe { base.write_bytes(0, capacity) };
        Ok(Self { base, capacity })
    }

    fn slice(&self, bytes: usize) -> &[u8] {
        // SAFETY: `bytes` is at most the capacity (checked), every byte was initialised in `new`, and the borrow of `self` keeps it alive.
        unsafe { std::slice::from_raw_parts(self.base, bytes.min(self.capacity)) }
    }

    fn slice_mut(&mut self, bytes: usize) -> &mut [u8] {
        // SAFETY: as in `slice`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base, bytes.min(self.capacity)) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: `base` came from `malloc_host` and is freed once.
        let _ = unsafe { result::free_host(self.base.cast()) };
    }
}

struct Staging {
    pinned: Option<Pinned>,
    length: usize,
    memory: Arc<Memory>,
}

impl StagingBuffer for Staging {
    fn bytes(&self) -> &[u8] {
        self.pinned
            .as_ref()
            .expect("held until drop")
            .slice(self.length)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.pinned
            .as_mut()
            .expect("held until drop")
            .slice_mut(self.length)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let Some(pinned) = self.pinned.take() else {
            return;
        };
        let is_small = |buffer: &Pinned| buffer.capacity <= SMALL_UPLOAD_BYTES;
        let small = is_small(&pinned);
        let mut idle = lock(&self.memory.idle_staging);
        let alike = idle.iter().filter(|buffer| is_small(buffer) == small);
        if alike.count() < if small { KEPT_SMALL } else { KEPT_IMAGES } {
            idle.push(pinned);
        }
    }
}
