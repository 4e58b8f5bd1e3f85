use lora_weights::device::{
    Completion, DeviceMemory, DevicePtr, HostStaging, MemoryError, MemoryInfo, StagingBuffer,
    UploadCopy,
};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Device memory in host vectors that counts everything, checks every copy, and fails on demand.
///
/// An upload that fails has first written half of its copies and scribbled over the rest of their destination, since
/// nothing may be assumed of it.
pub struct TestMemory {
    state: Arc<(Mutex<State>, Condvar)>,
    total: u64,
}

#[derive(Default)]
struct State {
    allocations: BTreeMap<u64, Vec<u8>>,
    next: u64,
    used: u64,
    staging_buffers: usize,
    stagings: u64,
    uploads: u64,
    /// Number of the upload (counted from 1) that fails, and where.
    fail: Option<(u64, FailAt)>,
    /// Every upload fails on landing.
    broken: bool,
    fail_alloc: Option<u64>,
    held: bool,
    in_flight: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FailAt {
    Start,
    Landing,
}

/// What is alive, and what was done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    pub allocations: usize,
    pub used: u64,
    /// Staging buffers alive.
    pub staging_buffers: usize,
    /// Staging buffers ever made.
    pub stagings: u64,
    /// Uploads ever started.
    pub uploads: u64,
    /// Uploads started and not waited for.
    pub in_flight: usize,
}

impl TestMemory {
    pub fn new(total: u64) -> Arc<Self> {
        let state = State {
            next: 1 << 12,
            ..State::default()
        };
        Arc::new(Self {
            state: Arc::new((Mutex::new(state), Condvar::new())),
            total,
        })
    }

    pub fn totals(&self) -> Totals {
        let state = self.state.0.lock();
        Totals {
            allocations: state.allocations.len(),
            used: state.used,
            staging_buffers: state.staging_buffers,
            stagings: state.stagings,
            uploads: state.uploads,
            in_flight: state.in_flight,
        }
    }

    /// The `n`-th upload from now (1 is the next) fails, before it is started or when it is waited for.
    pub fn fail_upload(&self, n: u64, when_landing: bool) {
        let mut state = self.state.0.lock();
        let at = if when_landing {
            FailAt::Landing
        } else {
            FailAt::Start
        };
        state.fail = Some((state.uploads + n, at));
    }

    /// True where the failure asked for has not come.
    pub fn failure_pending(&self) -> bool {
        self.state.0.lock().fail.is_some()
    }

    /// Every upload fails when it is waited for, until healed.
    pub fn break_uploads(&self) {
        self.state.0.lock().broken = true;
    }

    pub fn heal(&self) {
        let mut state = self.state.0.lock();
        state.broken = false;
        state.fail = None;
        state.fail_alloc = None;
    }

    /// The `n`-th allocation from now (1 is the next) fails.
    pub fn fail_allocation(&self, n: u64) {
        self.state.0.lock().fail_alloc = Some(n);
    }

    /// Uploads started from now on do not land until [`land`](Self::land).
    pub fn hold_uploads(&self) {
        self.state.0.lock().held = true;
    }

    pub fn land(&self) {
        self.state.0.lock().held = false;
        self.state.1.notify_all();
    }

    /// All device bytes, by allocation.
    pub fn snapshot(&self) -> BTreeMap<u64, Vec<u8>> {
        self.state.0.lock().allocations.clone()
    }

    pub fn read(&self, src: DevicePtr, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.download(src, &mut read).unwrap();
        read
    }

    /// Overwrites device bytes, as a stranger would.
    pub fn scribble(&self, dst: DevicePtr, bytes: usize) {
        self.state.0.lock().slice(dst, bytes).unwrap().fill(0xa5);
    }
}

impl State {
    fn slice(&mut self, ptr: DevicePtr, bytes: usize) -> Result<&mut [u8], MemoryError> {
        let outside = MemoryError::OutOfBounds {
            ptr,
            bytes: bytes as u64,
        };
        let (base, memory) = self
            .allocations
            .range_mut(..=ptr.0)
            .next_back()
            .ok_or(outside.clone())?;
        let start = (ptr.0 - base) as usize;
        memory.get_mut(start..start + bytes).ok_or(outside)
    }

    fn copy(
        &mut self,
        source: &[u8],
        copy: &UploadCopy,
        scribble: bool,
    ) -> Result<(), MemoryError> {
        for (from, dst) in copy.row_starts() {
            let source = source
                .get(from..from + copy.row_bytes)
                .ok_or(MemoryError::BadCopy {
                    rows: copy.rows as u64,
                    row_bytes: copy.row_bytes as u64,
                    side: "source",
                })?;
            let dst = self.slice(dst, copy.row_bytes)?;
            if scribble {
                dst.fill(0xa5);
            } else {
                dst.copy_from_slice(source);
            }
        }
        Ok(())
    }

    fn run(
        &mut self,
        source: &[u8],
        copies: &[UploadCopy],
        fails: bool,
    ) -> Result<(), MemoryError> {
        for (at, copy) in copies.iter().enumerate() {
            self.copy(source, copy, fails && at >= copies.len() / 2)?;
        }
        if fails {
            return Err(injected("upload"));
        }
        Ok(())
    }
}

fn injected(operation: &'static str) -> MemoryError {
    MemoryError::Driver {
        operation,
        detail: "injected".to_owned(),
    }
}

struct TestStaging {
    staging: HostStaging,
    state: Arc<(Mutex<State>, Condvar)>,
}

impl StagingBuffer for TestStaging {
    fn bytes(&self) -> &[u8] {
        self.staging.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.staging.bytes_mut()
    }
}

impl Drop for TestStaging {
    fn drop(&mut self) {
        self.state.0.lock().staging_buffers -= 1;
    }
}

struct TestUpload {
    source: Option<Box<dyn StagingBuffer>>,
    copies: Vec<UploadCopy>,
    fails: bool,
    state: Arc<(Mutex<State>, Condvar)>,
}

impl TestUpload {
    fn finish(&mut self) -> Result<Option<Box<dyn StagingBuffer>>, MemoryError> {
        let Some(source) = self.source.take() else {
            return Ok(None);
        };
        let (lock, landed) = &*self.state;
        let mut state = lock.lock();
        while state.held {
            landed.wait(&mut state);
        }
        state.in_flight -= 1;
        let done = state.run(source.bytes(), &self.copies, self.fails);
        drop(state);
        done.map(|()| Some(source))
    }
}

impl Completion for TestUpload {
    fn is_done(&self) -> Result<bool, MemoryError> {
        Ok(!self.state.0.lock().held)
    }

    fn wait(mut self: Box<Self>) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        Ok(self.finish()?.expect("waited for once"))
    }
}

impl Drop for TestUpload {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

impl DeviceMemory for TestMemory {
    fn alloc_zeroed(&self, bytes: u64) -> Result<DevicePtr, MemoryError> {
        if bytes == 0 {
            return Ok(DevicePtr::NULL);
        }
        let mut state = self.state.0.lock();
        if let Some(n) = state.fail_alloc.as_mut() {
            *n -= 1;
            if *n == 0 {
                state.fail_alloc = None;
                return Err(injected("alloc"));
            }
        }
        let base = state.next.next_multiple_of(256);
        // A gap, so that a run past an allocation is caught.
        state.next = base + bytes + 256;
        state.used += bytes;
        state.allocations.insert(base, vec![0; bytes as usize]);
        Ok(DevicePtr(base))
    }

    fn free(&self, ptr: DevicePtr) -> Result<(), MemoryError> {
        if ptr.is_null() {
            return Ok(());
        }
        let mut state = self.state.0.lock();
        let freed = state.allocations.remove(&ptr.0);
        let freed = freed.ok_or(MemoryError::OutOfBounds { ptr, bytes: 0 })?;
        state.used -= freed.len() as u64;
        Ok(())
    }

    fn memory_info(&self) -> Result<MemoryInfo, MemoryError> {
        Ok(MemoryInfo {
            free: self.total - self.state.0.lock().used,
            total: self.total,
        })
    }

    fn stage(&self, bytes: usize) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        let mut state = self.state.0.lock();
        state.staging_buffers += 1;
        state.stagings += 1;
        drop(state);
        Ok(Box::new(TestStaging {
            staging: HostStaging::zeroed(bytes)?,
            state: Arc::clone(&self.state),
        }))
    }

    fn upload(
        &self,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError> {
        let mut state = self.state.0.lock();
        state.uploads += 1;
        let fails = match state.fail {
            Some((upload, at)) if upload == state.uploads => {
                state.fail = None;
                Some(at)
            }
            _ => None,
        };
        if fails == Some(FailAt::Start) {
            state.run(source.bytes(), copies, true)?;
        }
        state.in_flight += 1;
        let broken = state.broken;
        drop(state);
        Ok(Box::new(TestUpload {
            source: Some(source),
            copies: copies.to_vec(),
            fails: fails.is_some() || broken,
            state: Arc::clone(&self.state),
        }))
    }

    fn download(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), MemoryError> {
        let mut state = self.state.0.lock();
        let bytes = state.slice(src, dst.len())?;
        dst.copy_from_slice(bytes);
        Ok(())
    }
}
