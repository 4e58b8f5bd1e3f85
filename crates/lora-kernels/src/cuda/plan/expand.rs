//! Expand and fold: which kernel, and how many outputs a block makes.

use super::{EXPAND_BLOCK_OUTPUTS, MOST_GRID_YZ, is_spread, max_rank, sites, usual_tiles};
use crate::cuda::Kernel;
use crate::params::{
    DeltaParams, DeltaSite, EXPAND_AHEAD_16, EXPAND_AHEAD_64, EXPAND_THREADS, EXPAND_UNIT_ROWS,
    LARGE_TILE_ROWS, MAX_SITES, SMALL_TILE_ROWS, SPREAD_AHEAD,
};
use crate::{DeviceCaps, KernelPlan};
use lora_weights::RANK_GRANULE;

/// Waves of blocks of a run each from which on small tiles of spread rows are better served by more blocks at once than by blocks that have more on their way.
const MANY_WAVES: u64 = 2;

/// Room of a kernel whose blocks may make several runs of outputs.
struct RunRoom {
    /// Blocks that a multiprocessor runs at once.
    blocks_a_unit: u64,
    /// Runs that a block makes at most.
    most_runs: u32,
}

impl RunRoom {
    fn blocks_at_once(&self, caps: &DeviceCaps) -> u64 {
        self.blocks_a_unit * u64::from(caps.units.max(1))
    }
}

/// `None`: a block makes one run.
fn run_room(kernel: Kernel) -> Option<RunRoom> {
    let (blocks_a_unit, most_runs) = match kernel {
        Kernel::ExpandSmall16 | Kernel::ExpandSmall32 => (5, 6),
        Kernel::ExpandSmall64 => (4, 6),
        Kernel::ExpandSpreadSmall16 | Kernel::ExpandSpreadSmall32 => (6, 6),
        Kernel::ExpandSpread16 | Kernel::ExpandSpread32 => (4, 8),
        _ => return None,
    };
    Some(RunRoom {
        blocks_a_unit,
        most_runs,
    })
}

/// Whether out is in whole, aligned runs of 8.
pub(super) fn has_whole_outs(params: &DeltaParams) -> bool {
    let whole = |site: &DeltaSite| {
        site.out.is_multiple_of(16)
            && site.out_stride.is_multiple_of(8)
            && site.n_out.is_multiple_of(8)
    };
    sites(params).iter().all(whole)
}

/// `open`: the sums of large tiles are still to be added up.
pub(super) fn expand_kernel(
    params: &DeltaParams,
    caps: &DeviceCaps,
    small: bool,
    open: bool,
) -> Kernel {
    let max_rank = max_rank(params);
    let has_many_waves = |room: RunRoom| {
        let blocks = blocks_a_tile(params, 1) * u64::from(usual_tiles(params));
        blocks > MANY_WAVES * room.blocks_at_once(caps)
    };
    let many_waves =
        |kernel: Kernel| is_spread(params) && run_room(kernel).is_some_and(has_many_waves);
    match (small, max_rank) {
        _ if !has_whole_outs(params) => Kernel::ExpandAny,
        (true, 0..=16) if many_waves(Kernel::ExpandSmall16) => Kernel::ExpandSpreadSmall16,
        (true, 17..=32) if many_waves(Kernel::ExpandSmall32) => Kernel::ExpandSpreadSmall32,
        (true, 0..=16) => Kernel::ExpandSmall16,
        (true, 17..=32) => Kernel::ExpandSmall32,
        (true, 33..=64) => Kernel::ExpandSmall64,
        (false, 0..=16) if open => Kernel::ExpandSpread16,
        (false, 17..=32) if open => Kernel::ExpandSpread32,
        (false, 0..=16) => Kernel::ExpandMixed16,
        (false, 17..=64) => Kernel::ExpandMixed64,
        (_, 65..) => Kernel::ExpandAny,
    }
}

pub(super) fn plan_expand(
    params: &DeltaParams,
    kernel: Kernel,
    block_ends: [u32; MAX_SITES],
) -> KernelPlan<Kernel> {
    let xa_bytes = |most_rows: u32| params.tile_rows.min(most_rows) * xa_pitch(max_rank(params));
    let base_bytes = |ahead: u32| ahead * EXPAND_UNIT_ROWS * EXPAND_BLOCK_OUTPUTS * 2;
    let shared_bytes = match kernel {
        Kernel::ExpandMixed16 => base_bytes(EXPAND_AHEAD_16) + xa_bytes(LARGE_TILE_ROWS),
        Kernel::ExpandMixed64 => base_bytes(EXPAND_AHEAD_64) + xa_bytes(LARGE_TILE_ROWS),
        Kernel::ExpandSpread16 | Kernel::ExpandSpread32 => {
            let base = SPREAD_AHEAD * SMALL_TILE_ROWS * EXPAND_BLOCK_OUTPUTS * 2;
            base + xa_bytes(LARGE_TILE_ROWS)
        }
        Kernel::ExpandAny => xa_bytes(LARGE_TILE_ROWS / 2),
        _ => xa_bytes(SMALL_TILE_ROWS),
    };
    let grid = [
        block_ends[MAX_SITES - 1],
        params.max_tiles.min(MOST_GRID_YZ),
        1,
    ];
    KernelPlan {
        kernel,
        grid,
        block: EXPAND_THREADS,
        shared_bytes,
    }
}

/// More runs of outputs a block mean fewer blocks that each do less setting up. Over large tiles a block takes one.
pub(super) fn expand_runs(params: &DeltaParams, kernel: Kernel, caps: &DeviceCaps) -> u32 {
    let Some(room) = run_room(kernel) else {
        return 1;
    };
    let tiles = u64::from(usual_tiles(params));
    // Setting up a block costs what a run does; blocks of a wave end together.
    let cost = |runs: u32| {
        let waves = (blocks_a_tile(params, runs) * tiles).div_ceil(room.blocks_at_once(caps));
        waves * u64::from(1 + runs)
    };
    (1..=room.most_runs)
        .min_by_key(|&runs| cost(runs))
        .unwrap_or(1)
}

/// Blocks of `runs` runs of outputs each that a tile's sites take.
fn blocks_a_tile(params: &DeltaParams, runs: u32) -> u64 {
    let of_site = |site: &DeltaSite| site.n_out.div_ceil(runs * EXPAND_BLOCK_OUTPUTS);
    sites(params).iter().map(of_site).sum::<u32>().into()
}

/// Bytes from one row of `xa` in shared memory to the next: what keeps the lanes of a phase on different banks.
pub(super) fn xa_pitch(max_rank: u32) -> u32 {
    ((max_rank / RANK_GRANULE) | 1) * RANK_GRANULE * 2
}
