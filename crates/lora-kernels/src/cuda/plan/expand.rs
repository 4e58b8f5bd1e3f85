//! Expand and fold: which kernel, and how many outputs a block makes.

use super::{EXPAND_BLOCK_OUTPUTS, MOST_GRID_YZ, usual_tiles};
use crate::cuda::Kernel;
use crate::params::{
    DeltaParams, DeltaSite, EXPAND_AHEAD_16, EXPAND_AHEAD_64, EXPAND_THREADS, EXPAND_UNIT_ROWS,
    FLAG_SPREAD, LARGE_TILE_ROWS, MAX_SITES, SMALL_TILE_ROWS, SPREAD_AHEAD,
};
use crate::{DeviceCaps, KernelPlan};
use lora_weights::RANK_GRANULE;

/// Blocks of [`Kernel::ExpandSmall16`] or [`Kernel::ExpandSmall32`] that a multiprocessor runs at once.
const SMALL_BLOCKS_A_UNIT: u64 = 5;
/// The same of [`Kernel::ExpandSmall64`].
const SMALL_64_BLOCKS_A_UNIT: u64 = 4;
/// The same of [`Kernel::ExpandSpreadSmall16`].
const SPREAD_SMALL_16_BLOCKS_A_UNIT: u64 = 7;
/// The same of [`Kernel::ExpandSpreadSmall32`].
const SPREAD_SMALL_32_BLOCKS_A_UNIT: u64 = 6;
/// Waves of blocks of a run each from which on small tiles of spread rows are better served by more blocks at once than by blocks that have more on their way.
const MANY_WAVES: u64 = 2;
/// Runs of outputs that a block of those makes at most.
const MOST_SMALL_RUNS: u32 = 6;
/// Blocks of [`Kernel::ExpandSpread16`] or [`Kernel::ExpandSpread32`] that a multiprocessor runs at once.
const SPREAD_BLOCKS_A_UNIT: u64 = 4;
/// Runs of outputs that a block of those makes at most.
const MOST_SPREAD_RUNS: u32 = 8;

/// `open`: the sums of large tiles are still to be added up.
pub(super) fn expand_kernel(
    params: &DeltaParams,
    caps: &DeviceCaps,
    small: bool,
    open: bool,
) -> Kernel {
    let sites = &params.sites[..params.site_count as usize];
    let max_rank = sites.iter().map(|site| site.max_rank).max().unwrap_or(0);
    let many = params.flags & FLAG_SPREAD != 0
        && blocks(params, sites, 1)
            > MANY_WAVES * SMALL_BLOCKS_A_UNIT * u64::from(caps.units.max(1));
    let whole = |site: &DeltaSite| {
        site.out.is_multiple_of(16)
            && site.out_stride.is_multiple_of(8)
            && site.n_out.is_multiple_of(8)
    };
    match (small, max_rank) {
        _ if !sites.iter().all(whole) => Kernel::ExpandAny,
        (true, 0..=16) if many => Kernel::ExpandSpreadSmall16,
        (true, 17..=32) if many => Kernel::ExpandSpreadSmall32,
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
    max_rank: u32,
    kernel: Kernel,
    block_ends: [u32; MAX_SITES],
) -> KernelPlan<Kernel> {
    let xa_bytes = |most_rows: u32| params.tile_rows.min(most_rows) * xa_pitch(max_rank);
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
pub(super) fn expand_runs(
    params: &DeltaParams,
    sites: &[DeltaSite],
    kernel: Kernel,
    caps: &DeviceCaps,
) -> u32 {
    let units = u64::from(caps.units.max(1));
    // Setting up a block costs what a run does; blocks of a wave end together.
    let soonest = |room: u64, most_runs: u32| {
        let cost = |runs: u32| {
            let waves = blocks(params, sites, runs).div_ceil(room);
            waves * u64::from(1 + runs)
        };
        (1..=most_runs).min_by_key(|&runs| cost(runs))
    };
    let runs = match kernel {
        Kernel::ExpandSmall16 | Kernel::ExpandSmall32 => {
            soonest(units * SMALL_BLOCKS_A_UNIT, MOST_SMALL_RUNS)
        }
        Kernel::ExpandSpreadSmall16 => {
            soonest(units * SPREAD_SMALL_16_BLOCKS_A_UNIT, MOST_SMALL_RUNS)
        }
        Kernel::ExpandSpreadSmall32 => {
            soonest(units * SPREAD_SMALL_32_BLOCKS_A_UNIT, MOST_SMALL_RUNS)
        }
        Kernel::ExpandSmall64 => soonest(units * SMALL_64_BLOCKS_A_UNIT, MOST_SMALL_RUNS),
        Kernel::ExpandSpread16 | Kernel::ExpandSpread32 => {
            soonest(units * SPREAD_BLOCKS_A_UNIT, MOST_SPREAD_RUNS)
        }
        _ => None,
    };
    runs.unwrap_or(1)
}

/// Blocks of `runs` runs of outputs each, over the tiles that there usually are.
fn blocks(params: &DeltaParams, sites: &[DeltaSite], runs: u32) -> u64 {
    let of_site = |site: &DeltaSite| site.n_out.div_ceil(runs * EXPAND_BLOCK_OUTPUTS);
    u64::from(sites.iter().map(of_site).sum::<u32>()) * u64::from(usual_tiles(params))
}

/// Bytes from one row of `xa` in shared memory to the next: what keeps the lanes of a phase on different banks.
fn xa_pitch(max_rank: u32) -> u32 {
    ((max_rank / RANK_GRANULE) | 1) * RANK_GRANULE * 2
}
