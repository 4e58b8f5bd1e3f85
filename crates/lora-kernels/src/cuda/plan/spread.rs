//! A whole delta of spread rows in one launch.

use super::expand::xa_pitch;
use super::shrink::{EXCHANGE_BYTES, STREAM_RING_BYTES, has_few_rows_an_entry};
use super::{
    MOST_GRID_YZ, ends, has_aligned_x, has_whole_outs, is_spread, max_rank, sites, usual_tiles,
};
use crate::cuda::Kernel;
use crate::params::{
    DELTA_BLOCKS, DeltaParams, DeltaSite, LARGE_TILE_ROWS, MAX_SITES, SHRINK_THREADS,
    SMALL_TILE_ROWS, TILE_BLOCKS, WARP_OUTPUTS, WIDE_TILE_BLOCKS,
};
use crate::{DeviceCaps, KernelPlan, ScratchSpec};
use lora_weights::RANK_GRANULE;

/// Waves of blocks from which on two launches, whose blocks are smaller, end sooner where tiles have up to 8 rows.
const MOST_WAVES: u64 = 2;
/// Outputs that a block makes at a time.
const RUN_OUTPUTS: u32 = SHRINK_THREADS / 32 * WARP_OUTPUTS;
/// Most of those times of tiles of up to 8 rows: more would keep the second block from fitting a multiprocessor of the smallest device.
const MOST_RUNS: u32 = 2;

/// Rows an entry up to which a block serves a tile well alone: a quarter of a tile.
const FEW_ROWS: u32 = LARGE_TILE_ROWS / 4;
/// Eighths of the blocks that run at once from which on one launch with a block a tile ends sooner than two launches.
const ROWS_EIGHTHS: u64 = 7;
/// The same with several blocks a tile.
const CLUSTER_EIGHTHS: u64 = 5;
/// The same with up to [`FEW_ROWS`] rows an entry.
const CLUSTER_EIGHTHS_OF_FEW: u64 = 3;
/// Ranks of the kernels that take two groups of 16.
const TWO_GROUPS: u32 = 2 * RANK_GRANULE;
/// Addresses of a row's x and out.
const ADDRESS_BYTES: u32 = 16;

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
    let routed = |site: &DeltaSite| site.a_table != 0;
    let is_served = is_spread(params)
        && params.tiles != 0
        && params.perm != 0
        && params.max_tiles <= MOST_GRID_YZ
        && sites(params).iter().all(routed)
        && has_aligned_x(params)
        && has_whole_outs(params);
    match params.tile_rows {
        _ if !is_served => None,
        0..=SMALL_TILE_ROWS => plan_few_rows(params, caps),
        _ => plan_large_tiles(params, caps),
    }
}

/// Blocks that all multiprocessors run at once.
fn blocks_at_once(caps: &DeviceCaps) -> u64 {
    u64::from(DELTA_BLOCKS) * u64::from(caps.units.max(1))
}

/// Outputs of the widest site.
fn widest(params: &DeltaParams) -> u32 {
    let widths = sites(params).iter().map(|site| site.n_out);
    widths.max().unwrap_or(0)
}

/// Blocks of the usual tiles, whose sites take up to `outputs` outputs a block.
fn usual_blocks(params: &DeltaParams, outputs: u32) -> u64 {
    let of_tile = ends(params, |site| site.n_out.div_ceil(outputs));
    u64::from(usual_tiles(params)) * u64::from(of_tile[MAX_SITES - 1])
}

fn launch(params: &DeltaParams, kernel: Kernel, outputs: u32, shared_bytes: u32) -> SpreadPlan {
    let block_ends = ends(params, |site| site.n_out.div_ceil(outputs));
    SpreadPlan {
        launch: KernelPlan {
            kernel,
            grid: [block_ends[MAX_SITES - 1], params.max_tiles, 1],
            block: SHRINK_THREADS,
            shared_bytes,
        },
        block_ends,
        outputs,
    }
}

/// Tiles of up to 8 rows, few of them, whose pairs are small.
fn plan_few_rows(params: &DeltaParams, caps: &DeviceCaps) -> Option<SpreadPlan> {
    let kernel = match (params.k_blocks, max_rank(params)) {
        (1, ..=RANK_GRANULE) => Kernel::DeltaSpread1024,
        (2, ..=RANK_GRANULE) => Kernel::DeltaSpread2048,
        _ => return None,
    };
    let units = u64::from(caps.units.max(1));
    // Every block of a tile reads all of its A: that is worth while where multiprocessors would have nothing to do.
    let runs = if usual_blocks(params, RUN_OUTPUTS) <= units {
        1
    } else {
        MOST_RUNS
    };
    let outputs = runs * RUN_OUTPUTS;
    if usual_blocks(params, outputs) > MOST_WAVES * blocks_at_once(caps) {
        return None;
    }
    let held = outputs.min(widest(params).next_multiple_of(WARP_OUTPUTS));
    Some(launch(params, kernel, outputs, held * RANK_GRANULE * 2))
}

/// A kernel whose blocks have rows of larger tiles pass by A.
struct RowsKernel {
    kernel: Kernel,
    ranks: u32,
    /// Sums that a block keeps of every row, FP32.
    sums: u32,
    /// Exchanges of chunk sums that it has.
    exchanges: u32,
}

impl RowsKernel {
    /// One whose blocks have all `k_blocks` k blocks of their rows.
    fn of_whole_rows(kernel: Kernel, ranks: u32, k_blocks: u32) -> Self {
        Self {
            kernel,
            ranks,
            sums: (k_blocks - 1) * ranks,
            exchanges: ranks / RANK_GRANULE,
        }
    }

    /// x on its way, xa, sums.
    fn shared_bytes(&self) -> u32 {
        STREAM_RING_BYTES + LARGE_TILE_ROWS * (xa_pitch(self.ranks) + self.sums * 4)
    }

    /// Whether a multiprocessor has room for two of its blocks.
    fn fits(&self, caps: &DeviceCaps) -> bool {
        let fixed_bytes = EXCHANGE_BYTES * self.exchanges + LARGE_TILE_ROWS * ADDRESS_BYTES;
        DELTA_BLOCKS * (self.shared_bytes() + fixed_bytes) <= caps.shared_bytes
    }
}

/// Whether the blocks are at least so many eighths of those that run at once.
fn fill(blocks: u64, eighths: u64, caps: &DeviceCaps) -> bool {
    8 * blocks >= eighths * blocks_at_once(caps)
}

/// Larger tiles.
fn plan_large_tiles(params: &DeltaParams, caps: &DeviceCaps) -> Option<SpreadPlan> {
    plan_rows(params, caps).or_else(|| plan_clusters(params, caps))
}

/// A block a tile at every site: it makes all outputs, so that it is for few rows, or for so many ranks that two sites cannot share a block.
fn plan_rows(params: &DeltaParams, caps: &DeviceCaps) -> Option<SpreadPlan> {
    let few_rows = has_few_rows_an_entry(params, FEW_ROWS);
    let (kernel, ranks) = match (params.k_blocks, max_rank(params)) {
        (1, ..=RANK_GRANULE) if few_rows => (Kernel::DeltaRows16, RANK_GRANULE),
        (1, ..=TWO_GROUPS) if few_rows => (Kernel::DeltaRows32, TWO_GROUPS),
        (2, TWO_GROUPS) => (Kernel::DeltaRows32Of2048, TWO_GROUPS),
        _ => return None,
    };
    let block = RowsKernel::of_whole_rows(kernel, ranks, params.k_blocks);
    let outputs = widest(params).max(1);
    let serves = block.fits(caps) && fill(usual_blocks(params, outputs), ROWS_EIGHTHS, caps);
    serves.then(|| launch(params, block.kernel, outputs, block.shared_bytes()))
}

/// Two blocks a tile. Four, of more k blocks, where two launches would take several passes: in one pass it varies which is quicker.
fn plan_clusters(params: &DeltaParams, caps: &DeviceCaps) -> Option<SpreadPlan> {
    let takes_passes = params.rows > ScratchSpec::PASS_ROWS
        && !has_few_rows_an_entry(params, LARGE_TILE_ROWS / 2 - 1);
    let cross = |kernel, blocks: u32| {
        let block = RowsKernel {
            kernel,
            ranks: RANK_GRANULE,
            sums: blocks * RANK_GRANULE,
            exchanges: params.site_count,
        };
        (blocks, block)
    };
    let halves = |kernel, ranks| {
        let block = RowsKernel::of_whole_rows(kernel, ranks, params.k_blocks);
        (TILE_BLOCKS, block)
    };
    let (tile_blocks, block) = match (params.k_blocks, max_rank(params), params.site_count) {
        (1, ..=RANK_GRANULE, 1) => halves(Kernel::DeltaHalves16, RANK_GRANULE),
        (1, ..=TWO_GROUPS, 1) => halves(Kernel::DeltaHalves32, TWO_GROUPS),
        (2, ..=RANK_GRANULE, 1) => cross(Kernel::DeltaCross16, TILE_BLOCKS),
        (2, ..=RANK_GRANULE, 2) => cross(Kernel::DeltaCross16Pair, TILE_BLOCKS),
        (3..=WIDE_TILE_BLOCKS, ..=RANK_GRANULE, 1) if takes_passes => {
            cross(Kernel::DeltaCross16Of4096, WIDE_TILE_BLOCKS)
        }
        (3..=WIDE_TILE_BLOCKS, ..=RANK_GRANULE, 2) if takes_passes => {
            cross(Kernel::DeltaCross16PairOf4096, WIDE_TILE_BLOCKS)
        }
        _ => return None,
    };
    let share = widest(params).div_ceil(tile_blocks / params.site_count);
    let outputs = share.next_multiple_of(WARP_OUTPUTS);
    let eighths = if has_few_rows_an_entry(params, FEW_ROWS) {
        CLUSTER_EIGHTHS_OF_FEW
    } else {
        CLUSTER_EIGHTHS
    };
    let blocks = u64::from(tile_blocks) * u64::from(usual_tiles(params));
    let serves = block.fits(caps) && fill(blocks, eighths, caps);
    serves.then(|| {
        let mut plan = launch(params, block.kernel, outputs, block.shared_bytes());
        plan.launch.grid[0] = tile_blocks;
        plan
    })
}
