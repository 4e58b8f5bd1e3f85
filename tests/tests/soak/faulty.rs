//! A host backend whose uploads fail on demand.

use lora_kernels::host::{HostBackend, HostOptions};
use lora_kernels::{
    DeltaParams, DeviceCaps, EntryParams, GatherRowsParams, GroupParams, KernelError, LogitsParams,
    LoraBackend, ReplaceRowsParams, RowDiffParams, Stream,
};
use lora_runtime::weights::device::{
    Completion, DeviceMemory, DevicePtr, MemoryError, MemoryInfo, StagingBuffer, UploadCopy,
};
use std::cell::Cell;
use std::sync::Arc;

thread_local! {
    /// Uploads of this thread until one fails, and whether it does so in landing.
    static FAULT: Cell<Option<(u64, bool)>> = const { Cell::new(None) };
}

/// The `n`-th upload of this thread from now on (1 is the next) fails, when started or in landing.
pub(crate) fn fail_upload(n: u64, landing: bool) {
    FAULT.set(Some((n, landing)));
}

/// Takes back a failure that has not come.
pub(crate) fn heal() {
    FAULT.set(None);
}

/// The host, and uploads that fail: after half of their copies, the rest of what they were to write scribbled over, since
/// nothing may be assumed of it.
pub(crate) struct FaultyBackend {
    host: Arc<HostBackend>,
}

impl FaultyBackend {
    pub(crate) fn new(options: HostOptions) -> Result<Self, KernelError> {
        let host = Arc::new(HostBackend::with_options(options)?);
        Ok(Self { host })
    }
}

fn injected() -> MemoryError {
    MemoryError::Driver {
        operation: "uploading",
        detail: "injected".to_owned(),
    }
}

/// Does what is left of a failing upload.
fn spoil(host: &HostBackend, mut source: Box<dyn StagingBuffer>, copies: &[UploadCopy]) {
    let (first, rest) = copies.split_at(copies.len() / 2);
    // What is in range is what a real upload would have reached.
    if let Ok(landing) = host.upload(source, first)
        && let Ok(back) = landing.wait()
    {
        source = back;
        source.bytes_mut().fill(0x3f);
        let _ = host.upload(source, rest).and_then(Completion::wait);
    }
}

struct Failing {
    host: Arc<HostBackend>,
    source: Option<Box<dyn StagingBuffer>>,
    copies: Vec<UploadCopy>,
}

impl Failing {
    fn end(&mut self) {
        if let Some(source) = self.source.take() {
            spoil(&self.host, source, &self.copies);
        }
    }
}

impl Completion for Failing {
    fn is_done(&self) -> Result<bool, MemoryError> {
        Ok(false)
    }

    fn wait(mut self: Box<Self>) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        self.end();
        Err(injected())
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        self.end();
    }
}

impl DeviceMemory for FaultyBackend {
    fn alloc_zeroed(&self, bytes: u64) -> Result<DevicePtr, MemoryError> {
        self.host.alloc_zeroed(bytes)
    }

    fn free(&self, ptr: DevicePtr) -> Result<(), MemoryError> {
        self.host.free(ptr)
    }

    fn memory_info(&self) -> Result<MemoryInfo, MemoryError> {
        self.host.memory_info()
    }

    fn stage(&self, bytes: usize) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        self.host.stage(bytes)
    }

    fn upload(
        &self,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError> {
        match FAULT.get() {
            Some((1, landing)) => {
                heal();
                if landing {
                    return Ok(Box::new(Failing {
                        host: Arc::clone(&self.host),
                        source: Some(source),
                        copies: copies.to_vec(),
                    }));
                }
                spoil(&self.host, source, copies);
                return Err(injected());
            }
            Some((n, landing)) => FAULT.set(Some((n - 1, landing))),
            None => {}
        }
        self.host.upload(source, copies)
    }

    fn download(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), MemoryError> {
        self.host.download(src, dst)
    }
}

impl LoraBackend for FaultyBackend {
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

    fn delta(&self, stream: Stream, params: &DeltaParams) -> Result<(), KernelError> {
        self.host.delta(stream, params)
    }

    fn row_diff(&self, stream: Stream, params: &RowDiffParams) -> Result<(), KernelError> {
        self.host.row_diff(stream, params)
    }

    fn gather_rows(&self, stream: Stream, params: &GatherRowsParams) -> Result<(), KernelError> {
        self.host.gather_rows(stream, params)
    }

    fn replace_rows(&self, stream: Stream, params: &ReplaceRowsParams) -> Result<(), KernelError> {
        self.host.replace_rows(stream, params)
    }

    fn head_logits(&self, stream: Stream, params: &LogitsParams) -> Result<(), KernelError> {
        self.host.head_logits(stream, params)
    }

    fn synchronize(&self, stream: Stream) -> Result<(), KernelError> {
        self.host.synchronize(stream)
    }
}
