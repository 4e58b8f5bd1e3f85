use super::driver::{self, Device, Launch, Named};
use super::memory::{Context, Memory};
use super::module::{Kernel, Kernels, PtxTarget};
use super::plan::{
    GroupSource, HeadClusters, plan_delta, plan_delta_spread, plan_gather_rows, plan_group_rows,
    plan_head_logits, plan_replace_rows, plan_row_diff,
};
use super::{CudaError, DeviceTimer, Graph};
use crate::params::{EntryParams, FLAG_OPEN_SUMS, FLAG_TILES_READY, GroupParams};
use crate::{
    DeltaParams, DeviceCaps, GatherRowsParams, KernelError, KernelPlan, LogitsParams, LoraBackend,
    ReplaceRowsParams, RowDiffParams, Stream,
};
use bytemuck::Pod;
use cudarc::driver::{result, sys};
use lora_weights::device::{
    Completion, DeviceMemory, DevicePtr, MemoryError, MemoryInfo, StagingBuffer, UploadCopy,
};
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// An NVIDIA GPU, through an engine's own context or the device's primary one.
///
/// Launches go to the stream that they are given; nothing here synchronizes it. Uploads have a stream of their own.
pub struct CudaBackend {
    memory: Arc<Memory>,
    kernels: Kernels,
    stream: sys::CUstream,
    caps: DeviceCaps,
    target: PtxTarget,
    just_grouped: JustGrouped,
    head_clusters: HeadClusters,
}

// SAFETY: handles are driver-owned names that any thread may use once it has bound the context, which every method does first.
unsafe impl Send for CudaBackend {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for CudaBackend {}

impl CudaBackend {
    /// Device `ordinal`, its primary context, a stream of its own.
    ///
    /// # Errors
    /// [`CudaError`] names what is missing: the driver, the device, or kernels for its architecture.
    pub fn new(ordinal: u32) -> Result<Self, CudaError> {
        let device = Device::open(ordinal)?;
        let context = Context::primary(&device)?;
        Self::build(&device, context)
    }

    /// An engine's own context (a `CUcontext` as an integer).
    ///
    /// # Safety
    /// `context` is live and stays so while this backend lives.
    ///
    /// # Errors
    /// As [`CudaBackend::new`].
    pub unsafe fn with_context(context: u64) -> Result<Self, CudaError> {
        driver::init()?;
        // SAFETY: the caller vouches for the context.
        let context = unsafe { Context::borrowed(context as sys::CUcontext) };
        context.bind()?;
        Self::build(&Device::current()?, context)
    }

    fn build(device: &Device, context: Context) -> Result<Self, CudaError> {
        let target = PtxTarget::for_device(device.major, device.minor)?;
        let memory = Arc::new(Memory::new(context, device.memory_pools)?);
        let kernels = Kernels::load(&target, device)?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .named("creating the launch stream")?;
        let caps = DeviceCaps {
            name: device.name.clone(),
            units: device.multiprocessors,
            shared_bytes: device.shared_bytes,
            l2_bytes: device.l2_bytes,
            warpgroup_mma: target.has_warpgroup_mma(),
        };
        let mut backend = Self {
            memory,
            kernels,
            stream,
            caps,
            target,
            just_grouped: JustGrouped::default(),
            head_clusters: HeadClusters::default(),
        };
        backend.head_clusters = HeadClusters::ask(&backend.caps, |plan, blocks| {
            driver::resident_clusters(&backend.launch_of(plan, Stream::OWN), blocks)
        })?;
        Ok(backend)
    }

    /// The PTX in use.
    pub fn target(&self) -> &PtxTarget {
        &self.target
    }

    /// Captures what `enqueue` launches on the given stream into a graph.
    ///
    /// # Errors
    /// What `enqueue` returns, or [`CudaError`] where the driver refuses the capture.
    pub fn capture(
        &self,
        enqueue: impl FnOnce(Stream) -> Result<(), KernelError>,
    ) -> Result<Graph, KernelError> {
        self.memory.context.bind()?;
        Graph::capture(self.stream, || enqueue(Stream::OWN))
    }

    /// Replays `graph` on the backend's own stream.
    ///
    /// # Errors
    /// [`CudaError`] where the driver refuses.
    pub fn replay(&self, graph: &Graph) -> Result<(), KernelError> {
        self.memory.context.bind()?;
        Ok(graph.launch(self.stream)?)
    }

    /// A pair of events that time work on the backend's own stream.
    ///
    /// # Errors
    /// [`CudaError`] where the driver refuses.
    pub fn timer(&self) -> Result<DeviceTimer, KernelError> {
        self.memory.context.bind()?;
        Ok(DeviceTimer::new(self.stream)?)
    }

    fn raw(&self, stream: Stream) -> sys::CUstream {
        if stream == Stream::OWN {
            self.stream
        } else {
            stream.raw() as sys::CUstream
        }
    }

    fn launch_of(&self, plan: &KernelPlan<Kernel>, stream: Stream) -> Launch {
        Launch {
            function: self.kernels.function(plan.kernel),
            grid: plan.grid,
            block: plan.block,
            shared_bytes: plan.shared_bytes,
            stream: self.raw(stream),
        }
    }

    /// Enqueues a kernel whose one argument is `params`.
    fn enqueue_one<P: Pod>(
        &self,
        launch: &KernelPlan<Kernel>,
        stream: Stream,
        mut params: P,
    ) -> Result<(), KernelError> {
        self.memory.context.bind()?;
        Ok(self.enqueue(launch, stream, &mut [(&raw mut params).cast()])?)
    }

    fn enqueue(
        &self,
        launch: &KernelPlan<Kernel>,
        stream: Stream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        if launch.shared_bytes > self.caps.shared_bytes {
            return Err(CudaError::SharedMemory {
                kernel: launch.kernel.symbol(),
                needed: launch.shared_bytes,
                limit: self.caps.shared_bytes,
            });
        }
        let launch = self.launch_of(launch, stream);
        // SAFETY: callers pass exactly the parameters of the kernel that the plan names. Views of engine memory were vouched for when
        // they were made; pool, tables and scratch are owned by objects that outlive their launches.
        unsafe { driver::launch(&launch, arguments) }
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        if self.memory.context.bind().is_ok() {
            // SAFETY: created in `build`; waited for and not used again.
            unsafe {
                let _ = result::stream::synchronize(self.stream);
                let _ = result::stream::destroy(self.stream);
            }
            self.kernels.unload();
        }
    }
}

impl LoraBackend for CudaBackend {
    fn caps(&self) -> &DeviceCaps {
        &self.caps
    }

    fn group_rows(&self, stream: Stream, params: &GroupParams) -> Result<(), KernelError> {
        self.memory.context.bind()?;
        let mut params = *params;
        let mut plan = plan_group_rows(GroupSource::Slots, &params);
        let mut arguments = [(&raw mut params).cast(), (&raw mut plan.capacity).cast()];
        self.enqueue(&plan.launch, stream, &mut arguments)?;
        self.just_grouped.set(stream);
        Ok(())
    }

    fn group_experts(
        &self,
        stream: Stream,
        params: &GroupParams,
        entries: &EntryParams,
    ) -> Result<(), KernelError> {
        self.memory.context.bind()?;
        let (mut params, mut entries) = (*params, *entries);
        let mut plan = plan_group_rows(GroupSource::Experts, &params);
        let mut arguments = [
            (&raw mut params).cast(),
            (&raw mut entries).cast(),
            (&raw mut plan.capacity).cast(),
        ];
        self.enqueue(&plan.launch, stream, &mut arguments)?;
        self.just_grouped.set(stream);
        Ok(())
    }

    fn uses_scratch(&self, params: &DeltaParams) -> bool {
        plan_delta_spread(params, &self.caps).is_none()
    }

    fn delta(&self, stream: Stream, params: &DeltaParams) -> Result<(), KernelError> {
        self.memory.context.bind()?;
        let mut params = *params;
        // A map of x rows may come straight from a kernel of the engine.
        let tiles_are_ready = !self.just_grouped.take(stream) && params.x_rows == 0;
        if tiles_are_ready {
            params.flags |= FLAG_TILES_READY;
        }
        if let Some(mut plan) = plan_delta_spread(&params, &self.caps) {
            let mut arguments = [
                (&raw mut params).cast(),
                (&raw mut plan.block_ends).cast(),
                (&raw mut plan.outputs).cast(),
            ];
            return Ok(self.enqueue(&plan.launch, stream, &mut arguments)?);
        }
        let mut plan = plan_delta(&params, &self.caps);
        let mut shrink = [
            (&raw mut params).cast(),
            plan.shrink_shares.as_argument(),
            (&raw mut plan.shrink_groups).cast(),
        ];
        self.enqueue(&plan.shrink, stream, &mut shrink)?;
        // What follows starts when all blocks of the shrink kernel have waited for the grouping.
        params.flags |= FLAG_TILES_READY;
        if plan.shrink.kernel.leaves_sums_open() {
            params.flags |= FLAG_OPEN_SUMS;
        }
        if let Some(sum) = &plan.sum {
            self.enqueue(sum, stream, &mut [(&raw mut params).cast()])?;
        }
        let mut expand = [
            (&raw mut params).cast(),
            (&raw mut plan.block_ends).cast(),
            (&raw mut plan.expand_runs).cast(),
        ];
        let arguments = match plan.expand.kernel {
            Kernel::ExpandMixed16 | Kernel::ExpandMixed64 | Kernel::ExpandAny => &mut expand[..2],
            _ => &mut expand,
        };
        self.enqueue(&plan.expand, stream, arguments)?;
        Ok(())
    }

    fn row_diff(&self, stream: Stream, params: &RowDiffParams) -> Result<(), KernelError> {
        self.enqueue_one(&plan_row_diff(params), stream, *params)
    }

    fn gather_rows(&self, stream: Stream, params: &GatherRowsParams) -> Result<(), KernelError> {
        self.enqueue_one(&plan_gather_rows(params), stream, *params)
    }

    fn replace_rows(&self, stream: Stream, params: &ReplaceRowsParams) -> Result<(), KernelError> {
        self.enqueue_one(&plan_replace_rows(params, &self.caps), stream, *params)
    }

    fn head_logits(&self, stream: Stream, params: &LogitsParams) -> Result<(), KernelError> {
        let mut params = *params;
        if !self.just_grouped.take(stream) {
            params.flags |= FLAG_TILES_READY;
        }
        let launch = plan_head_logits(&params, &self.caps, &self.head_clusters);
        self.enqueue_one(&launch, stream, params)
    }

    fn synchronize(&self, stream: Stream) -> Result<(), KernelError> {
        self.memory.context.bind()?;
        // SAFETY: the stream is live: it is the backend's own, or vouched for by `Stream::from_raw`.
        Ok(unsafe { result::stream::synchronize(self.raw(stream)) }
            .named("waiting for a stream")?)
    }
}

impl DeviceMemory for CudaBackend {
    fn alloc_zeroed(&self, bytes: u64) -> Result<DevicePtr, MemoryError> {
        self.memory.alloc_zeroed(bytes, true)
    }

    fn alloc_resident(&self, bytes: u64) -> Result<DevicePtr, MemoryError> {
        self.memory.alloc_zeroed(bytes, false)
    }

    fn free(&self, ptr: DevicePtr) -> Result<(), MemoryError> {
        self.memory.free(ptr)
    }

    fn memory_info(&self) -> Result<MemoryInfo, MemoryError> {
        self.memory.info()
    }

    fn stage(&self, bytes: usize) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        self.memory.stage(bytes)
    }

    fn trim_staging(&self) {
        self.memory.trim_staging();
    }

    fn upload(
        &self,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError> {
        self.memory.upload(source, copies)
    }

    fn download(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), MemoryError> {
        self.memory.download(src, dst)
    }
}

/// Streams whose last launch from here grouped rows. The next delta launch there must not read the tiles before its wait.
#[derive(Default)]
struct JustGrouped {
    count: AtomicUsize,
    streams: Mutex<Vec<Stream>>,
}

impl JustGrouped {
    fn set(&self, stream: Stream) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if !streams.contains(&stream) {
            streams.push(stream);
        }
        self.count.store(streams.len(), Ordering::Release);
    }

    fn take(&self, stream: Stream) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let found = streams
            .iter()
            .position(|other| *other == stream)
            .map(|at| streams.swap_remove(at))
            .is_some();
        self.count.store(streams.len(), Ordering::Release);
        found
    }
}
