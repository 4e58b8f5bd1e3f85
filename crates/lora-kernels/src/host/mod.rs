//! The host backend: deltas on the CPU, several threads, the widest SIMD the machine has.
//!
//! It executes the same [`DeltaParams`] and [`GroupParams`] as a device, over memory of its own. Where a device would read a stray
//! address, it gives an error: every address and every row number is looked up before anything runs.
//!
//! Rounding points are those of docs/numerics.md; the order of summation is its own, and fixed for each row: the bits of a row do not depend on the other
//! rows, on where it stands among them, on tile sizes, threads or SIMD level, nor on whether the padded or the true rank is given. The fold
//! `out + scale * delta` is one fused multiply-add.

mod capacity;
mod check;
mod expand;
mod expert_entries;
mod job;
mod memory;
mod overlay;
mod pool;
mod shrink;
mod simd;
mod staging;
#[cfg(test)]
mod tests;
mod workspace;

pub use simd::SimdLevel;

pub(crate) use job::{expand_tasks, shrink_tasks};
pub(crate) use workspace::workspace_bytes;

use crate::{
    DeltaParams, DeviceCaps, EntryParams, GatherRowsParams, GroupParams, Grouping, KernelError,
    LogitsParams, LoraBackend, Operand, ReplaceRowsParams, RowDiffParams, Stream, Tile,
};
use capacity::Capacity;
use check::check_delta;
use expert_entries::find_entries;
use job::{Delta, DeltaJob};
use lora_weights::device::{
    Completion, DeviceMemory, DevicePtr, Landed, MemoryError, MemoryInfo, StagingBuffer, UploadCopy,
};
use memory::Arena;
use overlay::{DiffJob, Head, HeadJob};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use pool::{Job, Pool};
use simd::Simd;
use staging::{StagingPool, run_copy};
use std::fmt;
use std::sync::Arc;

/// Products below which waking a sleeping thread costs more than it saves: about five microseconds of one thread. In a run of launches the
/// threads are awake.
const WORTH_WAKING: u64 = 1 << 16;

/// How a [`HostBackend`] is made. [`Default`] takes what the machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostOptions {
    /// Threads, the calling one among them; 0 = as many as the system offers.
    pub threads: usize,
    /// Instructions; `None` = the best there are.
    pub simd: Option<SimdLevel>,
    /// Bytes that allocations may take together; `None` = what the machine has available.
    pub memory_limit: Option<u64>,
}

/// The CPU as a LoRA device.
///
/// Launches run at once, on the calling thread and the backend's own; calls from several threads take turns. Uploads to other
/// addresses than a launch uses hold it up for microseconds at most.
///
/// ```
/// use lora_kernels::host::{HostBackend, HostOptions};
/// use lora_kernels::LoraBackend;
///
/// let backend = HostBackend::with_options(HostOptions { threads: 2, ..Default::default() })?;
/// assert_eq!(backend.caps().units, 2);
/// # Ok::<(), lora_kernels::KernelError>(())
/// ```
pub struct HostBackend {
    state: Mutex<State>,
    staging: Arc<StagingPool>,
    caps: DeviceCaps,
    simd: SimdLevel,
}

/// What one call at a time has to itself.
struct State {
    arena: Arena,
    pool: Pool,
}

impl HostBackend {
    /// A backend with the machine's threads, SIMD and memory. Where threads cannot be started it runs on the calling one alone.
    pub fn new() -> Self {
        let pool = Pool::new(available_threads()).unwrap_or_else(|error| {
            tracing::warn!(%error, "the host backend runs on the calling thread alone");
            Pool::single()
        });
        Self::assemble(pool, SimdLevel::detect(), Capacity::Machine)
    }

    /// A backend as asked for.
    ///
    /// # Errors
    /// [`KernelError::NoSimd`] for instructions that the CPU lacks; [`KernelError::Thread`] if a thread cannot be started.
    pub fn with_options(options: HostOptions) -> Result<Self, KernelError> {
        let best = SimdLevel::detect();
        let simd = options.simd.unwrap_or(best);
        if !simd.is_available() {
            return Err(KernelError::NoSimd { level: simd, best });
        }
        let threads = match options.threads {
            0 => available_threads(),
            threads => threads,
        };
        let capacity = options
            .memory_limit
            .map_or(Capacity::Machine, Capacity::Limit);
        Ok(Self::assemble(Pool::new(threads)?, simd, capacity))
    }

    /// The instructions it runs on.
    pub fn simd(&self) -> SimdLevel {
        self.simd
    }

    fn assemble(pool: Pool, simd: SimdLevel, capacity: Capacity) -> Self {
        let caps = DeviceCaps {
            name: format!("host, {} threads, {simd:?}", pool.threads()),
            units: pool.threads() as u32,
            shared_bytes: 32 << 10,
            l2_bytes: 0,
            warpgroup_mma: false,
        };
        Self {
            state: Mutex::new(State {
                arena: Arena::new(capacity),
                pool,
            }),
            staging: Arc::default(),
            caps,
            simd,
        }
    }

    fn arena(&self) -> MappedMutexGuard<'_, Arena> {
        MutexGuard::map(self.state.lock(), |state| &mut state.arena)
    }

    fn job<W: Vectorized>(&self, work: W, threads: usize) -> Box<dyn Job> {
        match self.simd {
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 if let Some(simd) = simd::Avx512::new() => work.job(simd, threads),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 if let Some(simd) = simd::Avx2::new() => work.job(simd, threads),
            _ => work.job(simd::Portable, threads),
        }
    }
}

/// Checked work that runs in some SIMD level's instructions.
trait Vectorized {
    fn job<S: Simd>(self, simd: S, threads: usize) -> Box<dyn Job>;
}

impl Vectorized for Delta {
    fn job<S: Simd>(self, simd: S, threads: usize) -> Box<dyn Job> {
        Box::new(DeltaJob::new(simd, self, threads))
    }
}

impl Vectorized for Head {
    fn job<S: Simd>(self, simd: S, _: usize) -> Box<dyn Job> {
        Box::new(HeadJob::new(simd, self))
    }
}

impl Default for HostBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for HostBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBackend")
            .field("caps", &self.caps)
            .finish_non_exhaustive()
    }
}

fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl DeviceMemory for HostBackend {
    fn alloc_zeroed(&self, bytes: u64) -> Result<DevicePtr, MemoryError> {
        self.arena().alloc_zeroed(bytes)
    }

    fn free(&self, ptr: DevicePtr) -> Result<(), MemoryError> {
        self.arena().free(ptr)
    }

    fn memory_info(&self) -> Result<MemoryInfo, MemoryError> {
        Ok(self.arena().info())
    }

    fn stage(&self, bytes: usize) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        self.staging.stage(bytes)
    }

    fn trim_staging(&self) {
        self.staging.trim();
    }

    fn upload(
        &self,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError> {
        for copy in copies {
            run_copy(source.bytes(), copy, || self.arena())?;
        }
        Ok(Box::new(Landed(source)))
    }

    fn download(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), MemoryError> {
        dst.copy_from_slice(self.arena().bytes(src, dst.len())?);
        Ok(())
    }
}

/// Writes tiles and permutation, or nothing where they do not fit.
fn store_grouping(
    arena: &mut Arena,
    params: &GroupParams,
    Grouping { tiles, perm }: &Grouping,
) -> Result<(), KernelError> {
    let count = tiles.len() as u32;
    if count > params.max_tiles {
        return Err(KernelError::BadIndex {
            operand: Operand::shared("tile count"),
            index: 0,
            value: count.into(),
            limit: u64::from(params.max_tiles) + 1,
        });
    }
    let [tiles_name, perm_name] = [Operand::shared("tiles"), Operand::shared("permutation")];
    // Looked up before anything is written.
    arena.span::<Tile>(tiles_name, params.tiles, tiles.len() as u64)?;
    arena.span::<u32>(perm_name, params.perm, perm.len() as u64)?;
    arena.store(Operand::shared("tile count"), params.tile_count, &[count])?;
    arena.store(tiles_name, params.tiles, tiles)?;
    arena.store(perm_name, params.perm, perm)
}

impl LoraBackend for HostBackend {
    fn caps(&self) -> &DeviceCaps {
        &self.caps
    }

    fn group_rows(&self, _stream: Stream, params: &GroupParams) -> Result<(), KernelError> {
        let mut arena = self.arena();
        let seq_slot = Operand::shared("row slots");
        let rows: &[i32] = arena.list(seq_slot, params.seq_slot, params.rows.into())?;
        let grouping = Grouping::of_rows(rows, params.slots, params.small_max);
        store_grouping(&mut arena, params, &grouping)
    }

    fn group_experts(
        &self,
        _stream: Stream,
        params: &GroupParams,
        entries: &EntryParams,
    ) -> Result<(), KernelError> {
        let mut arena = self.arena();
        let rows = find_entries(&arena, params.rows, entries)?;
        let grouping = Grouping::of_rows(&rows, params.slots, params.small_max);
        store_grouping(&mut arena, params, &grouping)
    }

    fn delta(&self, _stream: Stream, params: &DeltaParams) -> Result<(), KernelError> {
        let mut state = self.state.lock();
        let State { arena, pool } = &mut *state;
        let Some(delta) = check_delta(arena, params)? else {
            return Ok(());
        };
        let wake = delta.products() >= WORTH_WAKING;
        let job = self.job(delta, pool.threads());
        // The arena stays locked until every task is done: that is what makes the tasks' spans valid.
        pool.run(job, wake);
        Ok(())
    }

    fn row_diff(&self, _stream: Stream, params: &RowDiffParams) -> Result<(), KernelError> {
        let mut state = self.state.lock();
        let State { arena, pool } = &mut *state;
        let job = DiffJob::check(arena, params)?;
        let elements = u64::from(params.rows) * u64::from(params.cols);
        // The arena stays locked until every task is done, here and below.
        pool.run(Box::new(job), elements >= WORTH_WAKING);
        Ok(())
    }

    fn gather_rows(&self, _stream: Stream, params: &GatherRowsParams) -> Result<(), KernelError> {
        overlay::gather(&mut self.arena(), params)
    }

    fn replace_rows(&self, _stream: Stream, params: &ReplaceRowsParams) -> Result<(), KernelError> {
        overlay::replace(&mut self.arena(), params)
    }

    fn head_logits(&self, _stream: Stream, params: &LogitsParams) -> Result<(), KernelError> {
        let mut state = self.state.lock();
        let State { arena, pool } = &mut *state;
        let head = Head::check(arena, params)?;
        let wake = head.products() >= WORTH_WAKING;
        let job = self.job(head, pool.threads());
        pool.run(job, wake);
        Ok(())
    }

    fn synchronize(&self, _stream: Stream) -> Result<(), KernelError> {
        Ok(())
    }
}
