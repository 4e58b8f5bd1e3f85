//! Device memory, pinned staging and uploads on a stream of their own.

use super::driver::{self, HostToDevice, Named};
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
    upload_stream: sys::CUstream,
    allocations: Mutex<BTreeMap<u64, u64>>,
    idle_staging: Mutex<Vec<Pinned>>,
}

// SAFETY: the stream and context handles are driver-owned names that any thread may use once it has bound the context, which every
// method does first; the rest is behind mutexes.
unsafe impl Send for Memory {}
// SAFETY: what threads share is behind mutexes, and the driver locks for itself.
unsafe impl Sync for Memory {}

/// Idle pinned buffers kept for the next upload.
const KEPT_STAGING_BUFFERS: usize = 4;

impl Memory {
    pub(super) fn new(context: Context) -> Result<Self, CudaError> {
        context.bind()?;
        let upload_stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .named("creating the upload stream")?;
        Ok(Self {
            context,
            upload_stream,
            allocations: Mutex::default(),
            idle_staging: Mutex::default(),
        })
    }

    pub(super) fn alloc_zeroed(&self, bytes: u64) -> Result<DevicePtr, MemoryError> {
        if bytes == 0 {
            return Ok(DevicePtr::NULL);
        }
        self.context.bind()?;
        // SAFETY: the context is current; the address is freed in `free` or in `drop`.
        let address = match unsafe { result::malloc_sync(bytes as usize) } {
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
        lock(&self.allocations).insert(address, bytes);
        // SAFETY: the range was allocated just now. The upload stream orders the fill before every upload.
        let filled =
            unsafe { result::memset_d8_async(address, 0, bytes as usize, self.upload_stream) }
                .named("zeroing device memory")
                .and_then(|()| self.drain());
        if let Err(error) = filled {
            let _ = self.free(DevicePtr(address));
            return Err(error.into());
        }
        Ok(DevicePtr(address))
    }

    fn drain(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.upload_stream) }
            .named("waiting for the upload stream")
    }

    pub(super) fn free(&self, ptr: DevicePtr) -> Result<(), MemoryError> {
        if ptr.is_null() {
            return Ok(());
        }
        let Some(bytes) = lock(&self.allocations).remove(&ptr.0) else {
            return Err(MemoryError::OutOfBounds { ptr, bytes: 0 });
        };
        self.context.bind()?;
        tracing::trace!(%ptr, bytes, "freeing device memory");
        // SAFETY: the address came from `malloc_sync` and was in the registry until now, so it is freed once.
        Ok(unsafe { result::free_sync(ptr.0) }.named("freeing device memory")?)
    }

    pub(super) fn info(&self) -> Result<MemoryInfo, MemoryError> {
        self.context.bind()?;
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
            .is_some_and(|(base, length)| {
                ptr.0
                    .checked_add(bytes)
                    .is_some_and(|end| end <= base + length)
            });
        if inside {
            Ok(())
        } else {
            Err(MemoryError::OutOfBounds { ptr, bytes })
        }
    }

    pub(super) fn stage(
        self: &Arc<Self>,
        bytes: usize,
    ) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        let recycled = {
            let mut idle = lock(&self.idle_staging);
            idle.iter()
                .position(|buffer| buffer.capacity >= bytes)
                .map(|at| idle.swap_remove(at))
        };
        let mut pinned = match recycled {
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
        let event = Event::new()?;
        let landing = Landing {
            event,
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
            unsafe { driver::copy_to_device(&plan, self.upload_stream) }?;
        }
        landing.event.record(self.upload_stream)?;
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
        // SAFETY: the source range is in a live allocation, the destination is a slice; the call returns once the copy is done.
        Ok(unsafe { result::memcpy_dtoh_sync(dst, src.0) }.named("copying from the device")?)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        let _ = self.drain();
        lock(&self.idle_staging).clear();
        for (address, _) in std::mem::take(&mut *lock(&self.allocations)) {
            // SAFETY: registered addresses came from `malloc_sync` and have not been freed.
            let _ = unsafe { result::free_sync(address) };
        }
        // SAFETY: the stream was created in `new`, has no work left and is not used again.
        let _ = unsafe { result::stream::destroy(self.upload_stream) };
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Page-locked host memory.
struct Pinned {
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
        let pinned = self.pinned.take();
        let mut idle = lock(&self.memory.idle_staging);
        if idle.len() < KEPT_STAGING_BUFFERS {
            idle.extend(pinned);
        }
    }
}

/// An event without timing.
struct Event(sys::CUevent);

// SAFETY: an event handle is a driver-owned name that any thread may use.
unsafe impl Send for Event {}

impl Event {
    fn new() -> Result<Self, CudaError> {
        Ok(Self(
            result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
                .named("creating an upload event")?,
        ))
    }

    fn record(&self, stream: sys::CUstream) -> Result<(), CudaError> {
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

struct Landing {
    event: Event,
    source: Option<Box<dyn StagingBuffer>>,
    memory: Arc<Memory>,
}

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
            let _ = self.memory.drain();
        }
    }
}
