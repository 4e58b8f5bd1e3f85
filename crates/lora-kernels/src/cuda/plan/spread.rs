//! A whole delta of spread rows in one launch, where they are few and their pairs small.

use super::{
    MOST_GRID_YZ, ends, has_aligned_x, has_whole_outs, is_spread, max_rank, sites, usual_tiles,
};
use crate::cuda::Kernel;
use crate::params::{
    DeltaParams, DeltaSite, MAX_SITES, SHRINK_THREADS, SMALL_TILE_ROWS, WARP_OUTPUTS,
};
use crate::{DeviceCaps, KernelPlan};
use lora_weights::RANK_GRANULE;

/// Blocks that a multiprocessor runs at once.
const BLOCKS_A_UNIT: u64 = 2;
/// Waves of blocks from which on two launches, whose blocks are smaller, end sooner.
const MOST_WAVES: u64 = 2;
/// Outputs that a block makes at a time.
const RUN_OUTPUTS: u32 = SHRINK_THREADS / 32 * WARP_OUTPUTS;
/// Most of those times: more would keep the second block from fitting a multiprocessor of the smallest device.
const MOST_RUNS: u32 = 2;

/// The launch of a whole delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpreadPlan {
    /// The launch.
    pub launch: KernelPlan<Kernel>,
    /// Where the blocks of each site end in x of the grid.
    pub block_ends: [u32; MAX_SITES],
    /// Outputs of a block.
    pub outputs: u32,
}

/// Plans a delta of spread rows as one launch; `None` where the launches of [`plan_delta`](super::plan_delta) serve it, or serve it sooner.
pub fn plan_delta_spread(params: &DeltaParams, caps: &DeviceCaps) -> Option<SpreadPlan> {
    let kernel = match params.k_blocks {
        1 => Kernel::DeltaSpread1024,
        2 => Kernel::DeltaSpread2048,
        _ => return None,
    };
    let routed = |site: &DeltaSite| site.a_table != 0;
    let is_served = is_spread(params)
        && params.tiles != 0
        && params.perm != 0
        && params.tile_rows <= SMALL_TILE_ROWS
        && params.max_tiles <= MOST_GRID_YZ
        && max_rank(params) <= RANK_GRANULE
        && sites(params).iter().all(routed)
        && has_aligned_x(params)
        && has_whole_outs(params);
    if !is_served {
        return None;
    }
    let ends_of = |runs: u32| ends(params, |site| site.n_out.div_ceil(runs * RUN_OUTPUTS));
    let blocks = |runs| u64::from(usual_tiles(params)) * u64::from(ends_of(runs)[MAX_SITES - 1]);
    let units = u64::from(caps.units.max(1));
    // Every block of a tile reads all of its A: that is worth while where multiprocessors would have nothing to do.
    let runs = if blocks(1) <= units { 1 } else { MOST_RUNS };
    if blocks(runs) > MOST_WAVES * BLOCKS_A_UNIT * units {
        return None;
    }
    let block_ends = ends_of(runs);
    let outputs = runs * RUN_OUTPUTS;
    let widest = sites(params).iter().map(|site| site.n_out).max()?;
    let held = outputs.min(widest.next_multiple_of(WARP_OUTPUTS));
    Some(SpreadPlan {
        launch: KernelPlan {
            kernel,
            grid: [block_ends[MAX_SITES - 1], params.max_tiles, 1],
            block: SHRINK_THREADS,
            shared_bytes: held * RANK_GRANULE * 2,
        },
        block_ends,
        outputs,
    })
}
