//! A host whose memory fails on demand, and which tells when memory is freed too early for a device that works on its own.

use lora_kernels::host::{HostBackend, HostOptions};
use lora_kernels::testing::{HostHooks, WatchedHost};
use lora_weights::device::{
    Completion, DeviceMemory, DevicePtr, MemoryError, StagingBuffer, UploadCopy,
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

/// A host and its [`Faults`].
pub(crate) type Faulty = WatchedHost<Faults>;

/// A host with so much memory, which is there as long as nobody says otherwise.
pub(crate) fn faulty(memory_limit: u64) -> Arc<Faulty> {
    let options = HostOptions {
        memory_limit: Some(memory_limit),
        ..HostOptions::default()
    };
    Arc::new(WatchedHost::new(options, Faults::default()).expect("a host"))
}

#[derive(Default)]
pub(crate) struct Faults {
    uploads: Countdown,
    calls: Countdown,
    /// Buffers of launches that nobody has waited for.
    in_use: Mutex<Vec<u64>>,
    freed_early: AtomicU32,
}

impl Faults {
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

    /// Buffers freed while a launch was using them.
    pub(crate) fn freed_early(&self) -> u32 {
        self.freed_early.load(Ordering::Relaxed)
    }

    fn used(&self) -> MutexGuard<'_, Vec<u64>> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostHooks for Faults {
    fn before(&self, operation: &'static str) -> Result<(), MemoryError> {
        self.calls.check(operation)
    }

    fn upload(
        &self,
        host: &Arc<HostBackend>,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError> {
        self.uploads.check("uploading")?;
        host.upload(source, copies)
    }

    fn launched(&self, addresses: &[u64]) {
        self.used().extend(addresses);
    }

    fn synchronized(&self) {
        self.used().clear();
    }

    fn freed(&self, ptr: DevicePtr) {
        if !ptr.is_null() && self.used().contains(&ptr.0) {
            self.freed_early.fetch_add(1, Ordering::Relaxed);
        }
    }
}
