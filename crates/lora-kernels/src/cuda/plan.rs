//! Which kernels a launch takes, with which grid: pure functions of the problem and the device.

use super::Kernel;
use crate::params::{
    BLOCK_K, DeltaParams, DeltaSite, GroupParams, LARGE_TILE_ROWS, RANKS_A_BLOCK, SMALL_TILE_ROWS,
};
use crate::{DeviceCaps, Tile};
use lora_weights::RANK_GRANULE;

/// One kernel launch, as a plain value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelLaunch {
    /// Kernel.
    pub kernel: Kernel,
    /// Blocks, x and y.
    pub grid: [u32; 2],
    /// Threads a block.
    pub block: u32,
    /// Dynamic shared memory a block, bytes.
    pub shared_bytes: u32,
}

/// The two launches of a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaPlan {
    /// Partial sums of `x @ A^T`.
    pub shrink: KernelLaunch,
    /// `@ B^T` and the fold.
    pub expand: KernelLaunch,
    /// Runs of 256 outputs that an expand block makes one after the other.
    pub expand_steps: u32,
}

const SHRINK_THREADS: u32 = 256;
const EXPAND_THREADS: u32 = 128;
const GROUP_THREADS: u32 = 1024;

/// Outputs that an expand block makes at a time.
const EXPAND_BLOCK_OUTPUTS: u32 = 256;

const STAGES: u32 = 3;
const CHUNK_BYTES: u32 = 256;
/// The exchange of chunk sums that the unaligned kernel keeps in dynamic shared memory.
const EXCHANGE_BYTES: u32 = 8 * 8 * 20 * 4;
const MOST_GRID_Y: u32 = 65_535;
/// Waves of blocks that a grid over both kinds of tile has at most; blocks loop over the rest.
const MIXED_WAVES: u32 = 8;

/// Plans a delta launch.
pub fn plan_delta(params: &DeltaParams, caps: &DeviceCaps) -> DeltaPlan {
    let sites = &params.sites[..params.site_count as usize];
    let max_rank = sites.iter().map(|site| site.max_rank).max().unwrap_or(0);
    let shrink = plan_shrink(params, max_rank, caps);
    let expand_steps = expand_steps(params, sites, caps);
    let outputs = expand_steps * EXPAND_BLOCK_OUTPUTS;
    let kernel = match max_rank {
        0..=16 => Kernel::Expand16,
        17..=64 => Kernel::Expand64,
        _ => Kernel::Expand512,
    };
    let expand = KernelLaunch {
        kernel,
        grid: [
            sites.iter().map(|site| site.n_out.div_ceil(outputs)).sum(),
            params.max_tiles.min(MOST_GRID_Y),
        ],
        block: EXPAND_THREADS,
        shared_bytes: params.tile_rows * xa_pitch(max_rank),
    };
    DeltaPlan {
        shrink,
        expand,
        expand_steps,
    }
}

fn plan_shrink(params: &DeltaParams, max_rank: u32, caps: &DeviceCaps) -> KernelLaunch {
    let aligned = params.k_in.is_multiple_of(8)
        && params.x_stride.is_multiple_of(8)
        && params.x.is_multiple_of(16);
    let (kernel, ranks, shared_bytes) = if !aligned {
        (Kernel::ShrinkUnaligned, RANKS_A_BLOCK, EXCHANGE_BYTES)
    } else if params.tile_rows <= SMALL_TILE_ROWS {
        (Kernel::ShrinkSmall, RANK_GRANULE, 0)
    } else {
        let a_rows = match max_rank {
            0..=16 => 16,
            17..=32 => 32,
            _ => RANKS_A_BLOCK,
        };
        (
            Kernel::ShrinkMixed,
            RANKS_A_BLOCK,
            STAGES * (LARGE_TILE_ROWS + a_rows) * CHUNK_BYTES,
        )
    };
    let blocks = params.k_blocks * params.site_count * max_rank.div_ceil(ranks);
    let most_y = match kernel {
        Kernel::ShrinkSmall => MOST_GRID_Y,
        _ => (MIXED_WAVES * 2 * caps.units)
            .div_ceil(blocks.max(1))
            .max(1),
    };
    KernelLaunch {
        kernel,
        grid: [blocks, params.max_tiles.min(most_y)],
        block: SHRINK_THREADS,
        shared_bytes,
    }
}

/// An expand block of a large tile reads the tile's 64 rows of `xa` once for all its steps; more steps mean fewer blocks.
fn expand_steps(params: &DeltaParams, sites: &[DeltaSite], caps: &DeviceCaps) -> u32 {
    if params.tile_rows <= SMALL_TILE_ROWS {
        return 1;
    }
    let runs: u32 = sites
        .iter()
        .map(|site| site.n_out.div_ceil(EXPAND_BLOCK_OUTPUTS))
        .sum();
    let blocks = u64::from(runs) * u64::from(params.rows.div_ceil(LARGE_TILE_ROWS));
    (blocks / u64::from(caps.units.max(1) * MIXED_WAVES * 2)).clamp(1, 8) as u32
}

/// Bytes from one row of `xa` in shared memory to the next: what keeps the lanes of a phase on different banks.
fn xa_pitch(max_rank: u32) -> u32 {
    if max_rank <= RANK_GRANULE {
        RANK_GRANULE * 2
    } else {
        (max_rank * 2).next_multiple_of(128) + 64
    }
}

/// Plans the grouping of rows: one block.
pub fn plan_group_rows(params: &GroupParams) -> KernelLaunch {
    KernelLaunch {
        kernel: Kernel::GroupRows,
        grid: [1, 1],
        block: GROUP_THREADS,
        shared_bytes: params.slots * 4,
    }
}

const _: () = assert!(size_of::<Tile>() == 16 && BLOCK_K == 1024);
