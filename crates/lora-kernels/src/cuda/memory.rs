//! Device memory, and uploads on streams of their own.
//!
//! Nothing here waits for a stream of the engine, and nothing that serving needs waits for a slot image on its way: images go
//! on one stream, everything small (row maps, table entries, zeroing, frees) on another. Allocations are the driver's
//! stream-ordered ones, since `cuMemAlloc` and `cuMemFree` wait for the whole device; only memory that lives as long as the pool comes from
//! `cuMemAlloc`, so that an engine can register it for RDMA.

use super::driver::{self, HostToDevice, Named};
use super::staging::Pinned;
use super::upload::{Event, Landing};
use super::{CudaError, driver::Device};
use cudarc::driver::{DriverError, result, sys};
use lora_weights::device::{
    Completion, DevicePtr, MemoryError, MemoryInfo, StagingBuffer, UploadCopy,
};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

impl From<CudaError> for MemoryError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Driver { operation, detail } => Self::Driver { operation, detail },
            other => Self::Driver {
                operation: "using CUDA",
                detail: other.to_string(),
            },
        }
    }
}

/// A context that is kept alive, or borrowed from an engine.
pub(super) struct Context {
    raw: sys::CUcontext,
    primary_of: Option<sys::CUdevice>,
}

impl Context {
    /// Retains the device's primary context, the one that the runtime API and most engines use.
    pub(super) fn primary(device: &Device) -> Result<Self, CudaError> {
        // SAFETY: the device handle came from the driver; `Drop` releases what is retained here.
        let raw = unsafe { result::primary_ctx::retain(device.handle) }
            .named("retaining the primary context")?;
        Ok(Self {
            raw,
            primary_of: Some(device.handle),
        })
    }

    /// Borrows a context.
    ///
    /// # Safety
    /// `raw` is a live context and stays so while this value lives.
    pub(super) unsafe fn borrowed(raw: sys::CUcontext) -> Self {
        Self {
            raw,
            primary_of: None,
        }
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: `raw` is live while `self` is.
        unsafe { result::ctx::set_current(self.raw) }.named("making the context current")
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(device) = self.primary_of {
            // SAFETY: `primary` retained it once.
            let _ = unsafe { result::primary_ctx::release(device) };
        }
    }
}

/// What allocations, staging buffers and uploads share.
pub(super) struct Memory {
    pub(super) context: Context,
    /// Slot images.
    image_stream: sys::CUstream,
    /// Everything that takes microseconds: row maps, tables, zeroing, allocations and frees.
    small_stream: sys::CUstream,
    /// Whether the device has stream-ordered allocations.
    pools: bool,
    allocations: Mutex<BTreeMap<u64, Allocation>>,
    pub(super) idle_staging: Mutex<Vec<Pinned>>,
}

/// Uploads up to this size go on the stream of small ones: a megabyte takes some twenty microseconds of a PCIe 5 link.
pub(super) const SMALL_UPLOAD_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Copy)]
struct Allocation {
    bytes: u64,
    /// From `cuMemAllocAsync`.
    ordered: bool,
}

// SAFETY: the stream and context handles are driver-owned names that any thread may use once it has bound the context, which every
// method does first; the rest is behind mutexes.
unsafe impl Send for Memory {}
// SAFETY: what threads share is behind mutexes, and the driver locks for itself.
unsafe impl Sync for Memory {}

impl Memory {
    /// `pools`: whether the device has stream-ordered allocations.
    pub(super) fn new(context: Context, pools: bool) -> Result<Self, CudaError> {
        context.bind()?;
        let stream = || {
            result::stream::create(result::stream::StreamKind::NonBlocking)
                .named("creating an upload stream")
        };
        Ok(Self {
            context,
            image_stream: stream()?,
            small_stream: stream()?,
            pools,
            allocations: Mutex::default(),
            idle_staging: Mutex::default(),
        })
    }

    /// `ordered`: without waiting for the device.
    pub(super) fn alloc_zeroed(&self, bytes: u64, ordered: bool) -> Result<DevicePtr, MemoryError> {
        if bytes == 0 {
            return Ok(DevicePtr::NULL);
        }
        self.context.bind()?;
        let ordered = ordered && self.pools;
        let size = bytes as usize;
        // SAFETY: the context is current; the address is freed in `free` or in `drop`.
        let allocated = unsafe {
            match ordered {
                true => result::malloc_async(self.small_stream, size),
                false => result::malloc_sync(size),
            }
        };
        let address = match allocated {
            Ok(address) => address,
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                return Err(MemoryError::OutOfMemory {
                    requested: bytes,
                    free: self.info()?.free,
                });
            }
            Err(error) => {
                return Err(Err::<(), _>(error)
                    .named("allocating device memory")
                    .unwrap_err()
                    .into());
            }
        };
        lock(&self.allocations).insert(address, Allocation { bytes, ordered });
        // SAFETY: the range was allocated just now, on this stream or for all of them. Nobody knows its address before the stream is drained.
        let filled = unsafe { result::memset_d8_async(address, 0, size, self.small_stream) }
            .named("zeroing device memory")
            .and_then(|()| self.drain(self.small_stream));
        if let Err(error) = filled {
            let _ = self.free(DevicePtr(address));
            return Err(error.into());
        }
        Ok(DevicePtr(address))
    }

    pub(super) fn drain(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: both streams live as long as `self`.
        unsafe { result::stream::synchronize(stream) }.named("waiting for an upload stream")
    }

    pub(super) fn free(&self, ptr: DevicePtr) -> Result<(), MemoryError> {
        if ptr.is_null() {
            return Ok(());
        }
        let Some(allocation) = lock(&self.allocations).remove(&ptr.0) else {
            return Err(MemoryError::OutOfBounds { ptr, bytes: 0 });
        };
        self.context.bind()?;
        tracing::trace!(%ptr, bytes = allocation.bytes, "freeing device memory");
        // SAFETY: the address came from the allocator that the registry names, and was in the registry until now, so it is freed once.
        let freed = unsafe {
            match allocation.ordered {
                true => result::free_async(ptr.0, self.small_stream),
                false => result::free_sync(ptr.0),
            }
        };
        Ok(freed.named("freeing device memory")?)
    }

    pub(super) fn info(&self) -> Result<MemoryInfo, MemoryError> {
        self.context.bind()?;
        // What was freed in stream order goes back to the device once the stream is waited for.
        self.drain(self.small_stream)?;
        let (free, total) = result::mem_get_info().named("asking for free memory")?;
        Ok(MemoryInfo {
            free: free as u64,
            total: total as u64,
        })
    }

    pub(super) fn check(&self, ptr: DevicePtr, bytes: u64) -> Result<(), MemoryError> {
        let allocations = lock(&self.allocations);
        let inside = allocations
            .range(..=ptr.0)
            .next_back()
            .is_some_and(|(base, allocation)| {
                ptr.0
                    .checked_add(bytes)
                    .is_some_and(|end| end <= base + allocation.bytes)
            });
        if inside {
            Ok(())
        } else {
            Err(MemoryError::OutOfBounds { ptr, bytes })
        }
    }

    pub(super) fn upload(
        self: &Arc<Self>,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError> {
        let available = source.bytes();
        for copy in copies {
            self.check_copy(copy, available.len())?;
        }
        self.context.bind()?;
        let bytes = copies.iter().map(|copy| copy.rows * copy.row_bytes);
        let stream = if bytes.sum::<usize>() <= SMALL_UPLOAD_BYTES {
            self.small_stream
        } else {
            self.image_stream
        };
        let landing = Landing {
            event: Event::new()?,
            stream,
            source: Some(source),
            memory: Arc::clone(self),
        };
        for copy in copies
            .iter()
            .filter(|copy| copy.rows > 0 && copy.row_bytes > 0)
        {
            let base = landing.source.as_ref().expect("set above").bytes().as_ptr();
            let plan = HostToDevice {
                source: base.wrapping_add(copy.src_offset).cast::<c_void>(),
                source_pitch: copy.src_stride,
                destination: copy.dst.0,
                destination_pitch: copy.dst_stride,
                row_bytes: copy.row_bytes,
                rows: copy.rows,
            };
            // SAFETY: `check_copy` has found both ranges inside live memory. `landing` keeps the source until the copy has run, also when a
            // later copy fails, since its drop waits; allocations are freed by callers that hold no upload to them.
            unsafe { driver::copy_to_device(&plan, stream) }?;
        }
        landing.event.record(stream)?;
        Ok(Box::new(landing))
    }

    fn check_copy(&self, copy: &UploadCopy, available: usize) -> Result<(), MemoryError> {
        let bad = |side| MemoryError::BadCopy {
            rows: copy.rows as u64,
            row_bytes: copy.row_bytes as u64,
            side,
        };
        let span = |stride: usize| match copy.rows {
            0 => Some(0),
            rows => stride
                .checked_mul(rows - 1)
                .and_then(|bytes| bytes.checked_add(copy.row_bytes)),
        };
        let strided = copy.rows > 1;
        let source = span(copy.src_stride).and_then(|bytes| bytes.checked_add(copy.src_offset));
        if source.is_none_or(|end| end > available) || (strided && copy.src_stride < copy.row_bytes)
        {
            return Err(bad("source"));
        }
        let destination = span(copy.dst_stride).ok_or_else(|| bad("destination"))?;
        if strided && copy.dst_stride < copy.row_bytes {
            return Err(bad("destination"));
        }
        if destination == 0 {
            Ok(())
        } else {
            self.check(copy.dst, destination as u64)
        }
    }

    pub(super) fn download(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), MemoryError> {
        if dst.is_empty() {
            return Ok(());
        }
        self.check(src, dst.len() as u64)?;
        self.context.bind()?;
        // SAFETY: the source range is in a live allocation; the destination is a slice that is borrowed until the stream has been waited for, which
        // is before this returns, also where the wait fails: the context is lost then and runs nothing more.
        let copied = unsafe { result::memcpy_dtoh_async(dst, src.0, self.small_stream) }
            .named("copying from the device");
        self.drain(self.small_stream)?;
        Ok(copied?)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        let _ = self.drain(self.image_stream);
        lock(&self.idle_staging).clear();
        let left: Vec<u64> = lock(&self.allocations).keys().copied().collect();
        for address in left {
            let _ = self.free(DevicePtr(address));
        }
        let _ = self.drain(self.small_stream);
        for stream in [self.image_stream, self.small_stream] {
            // SAFETY: the stream was created in `new`, has no work left and is not used again.
            let _ = unsafe { result::stream::destroy(stream) };
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
