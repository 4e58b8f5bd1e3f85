use crate::{DeltaParams, GroupParams, KernelError};
use lora_weights::device::DeviceMemory;

/// An execution queue. [`Stream::OWN`] is the backend's own; an engine passes its `CUstream`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream(u64);

impl Stream {
    /// The backend's own stream.
    pub const OWN: Self = Self(0);

    /// An engine's `CUstream`.
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

/// What plans need to know of a device. Queried, never assumed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceCaps {
    /// Name.
    pub name: String,
    /// Streaming multiprocessors, or threads on the host.
    pub units: u32,
    /// Largest shared memory of a block, bytes.
    pub shared_bytes: u32,
}

/// What every backend does. Launches only enqueue: they allocate nothing and never synchronize.
pub trait LoraBackend: DeviceMemory {
    /// The device.
    fn caps(&self) -> &DeviceCaps;
    /// Groups rows by table entry.
    fn group_rows(&self, stream: Stream, params: &GroupParams) -> Result<(), KernelError>;
    /// Shrink, then expand and fold.
    fn delta(&self, stream: Stream, params: &DeltaParams) -> Result<(), KernelError>;
    /// Blocks until everything enqueued on `stream` is done: for tests and tools, not for serving.
    fn synchronize(&self, stream: Stream) -> Result<(), KernelError>;
}
