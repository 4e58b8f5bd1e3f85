//! Uploads to a host backend that fail on demand.

use lora_kernels::host::HostBackend;
use lora_kernels::testing::HostHooks;
use lora_runtime::weights::device::{
    Completion, DeviceMemory, MemoryError, StagingBuffer, UploadCopy,
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

/// Uploads that fail: after half of their copies, the rest of what they were to write scribbled over, since nothing may be
/// assumed of it.
pub(crate) struct FaultyUploads;

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

impl HostHooks for FaultyUploads {
    fn upload(
        &self,
        host: &Arc<HostBackend>,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError> {
        match FAULT.get() {
            Some((1, landing)) => {
                heal();
                if landing {
                    return Ok(Box::new(Failing {
                        host: Arc::clone(host),
                        source: Some(source),
                        copies: copies.to_vec(),
                    }));
                }
                spoil(host, source, copies);
                return Err(injected());
            }
            Some((n, landing)) => FAULT.set(Some((n - 1, landing))),
            None => {}
        }
        host.upload(source, copies)
    }
}
