//! A host whose memory fails on demand, and which tells when memory is freed too early for a device that works on its own.

use lora_kernels::host::{HostBackend, HostOptions};
use lora_kernels::testing::TestBackend;
use lora_kernels::{
    DeltaParams, DeviceCaps, EntryParams, GatherRowsParams, GroupParams, KernelError, LogitsParams,
    LoraBackend, ReplaceRowsParams, RowDiffParams, Stream,
};
use lora_weights::device::{
    Completion, DeviceMemory, DevicePtr, MemoryError, MemoryInfo, StagingBuffer, UploadCopy,
};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Every one from now on.
pub(crate) const BROKEN: u32 = u32::MAX;

/// 0: none fails; n: the n-th from now on.
#[derive(Default)]
struct Countdown(AtomicU32);

impl Countdown {
    fn set(&self, n: u32) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// Counts one, which may have to fail.
    fn check(&self, operation: &'static str) -> Result<(), MemoryError> {
        let left = self.0.load(Ordering::Relaxed);
        if left != 0 && left != BROKEN {
            self.set(left - 1);
        }
        if left != 1 && left != BROKEN {
            return Ok(());
        }
        Err(MemoryError::Driver {
            operation,
            detail: "asked to fail".to_owned(),
        })
    }
}

pub(crate) struct Faulty {
    host: Arc<HostBackend>,
    uploads: Countdown,
    calls: Countdown,
    /// Buffers of launches that nobody has waited for.
    in_use: Mutex<Vec<u64>>,
    freed_early: AtomicU32,
}

impl Faulty {
    /// A host with so much memory.
    pub(crate) fn new(memory_limit: u64) -> Arc<Self> {
        let options = HostOptions {
            memory_limit: Some(memory_limit),
            ..HostOptions::default()
        };
        Arc::new(Self {
            host: Arc::new(HostBackend::with_options(options).expect("a host")),
            uploads: Countdown::default(),
            calls: Countdown::default(),
            in_use: Mutex::default(),
            freed_early: AtomicU32::new(0),
        })
    }

    /// Has an upload fail.
    pub(crate) fn fail_upload(&self, n: u32) {
        self.uploads.set(n);
    }

    /// Takes back a failure of uploads; whether it had come.
    pub(crate) fn heal_uploads(&self) -> bool {
        self.uploads.0.swap(0, Ordering::Relaxed) == 0
    }

    /// Has an allocation, an upload or a download fail, whichever is the n-th.
    pub(crate) fn fail_call(&self, n: u32) {
        self.calls.set(n);
    }

    /// The host itself, whose memory is there.
    pub(crate) fn sound(&self) -> TestBackend {
        Arc::clone(&self.host) as Arc<_>
    }

    /// Buffers freed while a launch was using them.
    pub(crate) fn freed_early(&self) -> u32 {
        self.freed_early.load(Ordering::Relaxed)
    }

    fn used(&self) -> MutexGuard<'_, Vec<u64>> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceMemory for Faulty {
    fn alloc_zeroed(&self, bytes: u64) -> Result<DevicePtr, MemoryError> {
        self.calls.check("allocating")?;
        self.host.alloc_zeroed(bytes)
    }

    fn free(&self, ptr: DevicePtr) -> Result<(), MemoryError> {
        if !ptr.is_null() && self.used().contains(&ptr.0) {
            self.freed_early.fetch_add(1, Ordering::Relaxed);
        }
        self.host.free(ptr)
    }

    fn memory_info(&self) -> Result<MemoryInfo, MemoryError> {
        self.host.memory_info()
    }

    fn stage(&self, bytes: usize) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        self.calls.check("allocating")?;
        self.host.stage(bytes)
    }

    fn upload(
        &self,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError> {
        self.uploads.check("uploading")?;
        self.calls.check("uploading")?;
        self.host.upload(source, copies)
    }

    fn download(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), MemoryError> {
        self.calls.check("downloading")?;
        self.host.download(src, dst)
    }
}

impl LoraBackend for Faulty {
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
        self.used().extend([params.a, params.b, params.distances]);
        self.host.row_diff(stream, params)
    }

    fn gather_rows(&self, stream: Stream, params: &GatherRowsParams) -> Result<(), KernelError> {
        self.used()
            .extend([params.base, params.delta, params.index, params.out]);
        self.host.gather_rows(stream, params)
    }

    fn replace_rows(&self, stream: Stream, params: &ReplaceRowsParams) -> Result<(), KernelError> {
        self.host.replace_rows(stream, params)
    }

    fn head_logits(&self, stream: Stream, params: &LogitsParams) -> Result<(), KernelError> {
        self.host.head_logits(stream, params)
    }

    fn synchronize(&self, stream: Stream) -> Result<(), KernelError> {
        self.used().clear();
        self.host.synchronize(stream)
    }
}
