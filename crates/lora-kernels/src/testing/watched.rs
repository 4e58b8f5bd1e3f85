//! A host backend whose memory fails, or is watched, as a test wants it.

use crate::host::{HostBackend, HostOptions};
use crate::{
    DeltaParams, DeviceCaps, EntryParams, GatherRowsParams, GroupParams, KernelError, LogitsParams,
    LoraBackend, ReplaceRowsParams, RowDiffParams, Stream,
};
use lora_weights::device::{
    Completion, DeviceMemory, DevicePtr, MemoryError, MemoryInfo, StagingBuffer, UploadCopy,
};
use std::sync::Arc;

/// What a test has to say about the memory of a [`WatchedHost`]. As it is, everything works and nothing is noted.
pub trait HostHooks: Send + Sync {
    /// Before an allocation of device or staging memory, an upload or a download.
    ///
    /// # Errors
    /// What the call is to fail with.
    fn before(&self, operation: &'static str) -> Result<(), MemoryError> {
        let _ = operation;
        Ok(())
    }

    /// An upload to `host`.
    ///
    /// # Errors
    /// As [`DeviceMemory::upload`].
    fn upload(
        &self,
        host: &Arc<HostBackend>,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError> {
        host.upload(source, copies)
    }

    /// A launch that compares or copies rows of vocabulary tables uses these addresses.
    fn launched(&self, addresses: &[u64]) {
        let _ = addresses;
    }

    /// Whether a delta is to hand sums over, as the host's does.
    fn uses_scratch(&self) -> bool {
        true
    }

    /// A pass of a delta on `host`.
    ///
    /// # Errors
    /// As [`LoraBackend::delta`].
    fn delta(
        &self,
        host: &Arc<HostBackend>,
        stream: Stream,
        params: &DeltaParams,
    ) -> Result<(), KernelError> {
        host.delta(stream, params)
    }

    /// What was launched has been waited for.
    fn synchronized(&self) {}

    /// Device memory is about to be freed.
    fn freed(&self, ptr: DevicePtr) {
        let _ = ptr;
    }
}

/// The host backend with [`HostHooks`] around its memory.
pub struct WatchedHost<H> {
    host: Arc<HostBackend>,
    hooks: H,
}

impl<H: HostHooks> WatchedHost<H> {
    /// A host backend with `options`.
    ///
    /// # Errors
    /// As [`HostBackend::with_options`].
    pub fn new(options: HostOptions, hooks: H) -> Result<Self, KernelError> {
        let host = Arc::new(HostBackend::with_options(options)?);
        Ok(Self { host, hooks })
    }

    /// The backend itself, past the hooks.
    pub fn host(&self) -> &Arc<HostBackend> {
        &self.host
    }

    /// The hooks.
    pub fn hooks(&self) -> &H {
        &self.hooks
    }
}

impl<H: HostHooks> DeviceMemory for WatchedHost<H> {
    fn alloc_zeroed(&self, bytes: u64) -> Result<DevicePtr, MemoryError> {
        self.hooks.before("allocating")?;
        self.host.alloc_zeroed(bytes)
    }

    fn free(&self, ptr: DevicePtr) -> Result<(), MemoryError> {
        self.hooks.freed(ptr);
        self.host.free(ptr)
    }

    fn memory_info(&self) -> Result<MemoryInfo, MemoryError> {
        self.host.memory_info()
    }

    fn stage(&self, bytes: usize) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        self.hooks.before("allocating")?;
        self.host.stage(bytes)
    }

    fn upload(
        &self,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError> {
        self.hooks.before("uploading")?;
        self.hooks.upload(&self.host, source, copies)
    }

    fn download(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), MemoryError> {
        self.hooks.before("downloading")?;
        self.host.download(src, dst)
    }
}

impl<H: HostHooks> LoraBackend for WatchedHost<H> {
    fn caps(&self) -> &DeviceCaps {
        self.host.caps()
    }

    fn group_rows(&self, stream: Stream, params: &GroupParams) -> Result<(), KernelError> {
        self.host.group_rows(stream, params)
    }

    fn group_experts(
        &self,
        stream: Stream,
        groups: &GroupParams,
        entries: &EntryParams,
    ) -> Result<(), KernelError> {
        self.host.group_experts(stream, groups, entries)
    }

    fn uses_scratch(&self, params: &DeltaParams) -> bool {
        self.hooks.uses_scratch() && self.host.uses_scratch(params)
    }

    fn delta(&self, stream: Stream, params: &DeltaParams) -> Result<(), KernelError> {
        self.hooks.delta(&self.host, stream, params)
    }

    fn row_diff(&self, stream: Stream, params: &RowDiffParams) -> Result<(), KernelError> {
        self.hooks.launched(&[params.a, params.b, params.distances]);
        self.host.row_diff(stream, params)
    }

    fn gather_rows(&self, stream: Stream, params: &GatherRowsParams) -> Result<(), KernelError> {
        self.hooks
            .launched(&[params.base, params.delta, params.index, params.out]);
        self.host.gather_rows(stream, params)
    }

    fn replace_rows(&self, stream: Stream, params: &ReplaceRowsParams) -> Result<(), KernelError> {
        self.host.replace_rows(stream, params)
    }

    fn head_logits(&self, stream: Stream, params: &LogitsParams) -> Result<(), KernelError> {
        self.host.head_logits(stream, params)
    }

    fn synchronize(&self, stream: Stream) -> Result<(), KernelError> {
        self.hooks.synchronized();
        self.host.synchronize(stream)
    }
}
