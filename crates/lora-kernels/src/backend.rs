//! What a backend is.

use crate::{
    DeltaParams, EntryParams, GatherRowsParams, GroupParams, KernelError, LogitsParams,
    ReplaceRowsParams, RowDiffParams,
};
use lora_weights::device::DeviceMemory;

/// An execution queue: work enqueued on one stream runs in order. [`Stream::OWN`] is the backend's own; an engine passes its
/// `CUstream`. The host backend has one queue and runs work at once, whatever the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream(u64);

impl Stream {
    /// The backend's own stream.
    pub const OWN: Self = Self(0);

    /// An engine's `CUstream`, as an integer.
    ///
    /// # Safety
    /// `handle` is a live stream of the backend's context and stays so for every launch it is given to.
    pub unsafe fn from_raw(handle: u64) -> Self {
        Self(handle)
    }

    /// The handle; 0 for [`Stream::OWN`].
    pub fn raw(self) -> u64 {
        self.0
    }
}

/// What plans need to know of a device. Queried from it, never assumed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceCaps {
    /// The device's own name.
    pub name: String,
    /// Streaming multiprocessors, or threads on the host.
    pub units: u32,
    /// Largest shared memory of a block, bytes; on the host a core's first-level cache, as far as kernels assume one.
    pub shared_bytes: u32,
    /// Bytes of the L2 cache, 0 where it plays no part.
    pub l2_bytes: u64,
    /// Whether kernels that use Hopper's MMA of four warps can run.
    pub warpgroup_mma: bool,
}

/// What every backend does. Launches only enqueue: they allocate no device memory and never synchronize.
///
/// Operations take plain addresses. Launchers make them from typed views and check them; a backend that can (the host) checks every address again.
pub trait LoraBackend: DeviceMemory {
    /// The device.
    fn caps(&self) -> &DeviceCaps;

    /// Makes everything ready that a first launch would otherwise load: call it outside graph capture.
    ///
    /// # Errors
    /// What loading gives.
    fn warm_up(&self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Groups rows by table entry, by the rule of [`Grouping::of_rows`](crate::Grouping::of_rows).
    ///
    /// # Errors
    /// What enqueueing gives; on the host also an address outside its allocations.
    fn group_rows(&self, stream: Stream, params: &GroupParams) -> Result<(), KernelError>;

    /// Groups the rows of a MoE block by table entry, which each finds by the rule of [`EntryParams`].
    ///
    /// # Errors
    /// What enqueueing gives; on the host also an address outside its allocations.
    fn group_experts(
        &self,
        stream: Stream,
        params: &GroupParams,
        entries: &EntryParams,
    ) -> Result<(), KernelError>;

    /// Whether a delta hands sums over through scratch. Where it does not, all its rows are one pass, however little scratch there is.
    fn uses_scratch(&self, params: &DeltaParams) -> bool {
        let _ = params;
        true
    }

    /// Runs one pass of a delta: shrink, then expand and fold.
    ///
    /// # Errors
    /// What enqueueing gives; on the host also an address outside its allocations, or device data that leads outside.
    fn delta(&self, stream: Stream, params: &DeltaParams) -> Result<(), KernelError>;

    /// Finds by how much each row of two tables differs, by the rule of [`RowDiffParams`].
    ///
    /// # Errors
    /// What enqueueing gives; on the host also an address outside its allocations.
    fn row_diff(&self, stream: Stream, params: &RowDiffParams) -> Result<(), KernelError>;

    /// Copies rows of two tables into one, by the rule of [`GatherRowsParams`].
    ///
    /// # Errors
    /// What enqueueing gives; on the host also an address outside its allocations.
    fn gather_rows(&self, stream: Stream, params: &GatherRowsParams) -> Result<(), KernelError>;

    /// Replaces embedding rows, by the rule of [`ReplaceRowsParams`].
    ///
    /// # Errors
    /// What enqueueing gives; on the host also an address outside its allocations.
    fn replace_rows(&self, stream: Stream, params: &ReplaceRowsParams) -> Result<(), KernelError>;

    /// Computes logits of overridden ids, by the rule of [`LogitsParams`].
    ///
    /// # Errors
    /// What enqueueing gives; on the host also an address outside its allocations, or device data that leads outside.
    fn head_logits(&self, stream: Stream, params: &LogitsParams) -> Result<(), KernelError>;

    /// Blocks until everything enqueued on `stream` is done: for tests and tools, not for serving.
    ///
    /// # Errors
    /// What the enqueued work failed with.
    fn synchronize(&self, stream: Stream) -> Result<(), KernelError>;
}
