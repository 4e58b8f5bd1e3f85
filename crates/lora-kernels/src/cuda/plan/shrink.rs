//! Shrink: which kernel, over which shares of tiles, ranks and k.

use super::{MOST_GRID_YZ, ShrinkShares, ends, is_spread, max_rank, sites, usual_tiles};
use crate::cuda::Kernel;
use crate::params::{
    BLOCK_K, CHUNK_K, DeltaParams, DeltaSite, EXCHANGE_PITCH, LARGE_TILE_ROWS, MAX_SITES,
    SHRINK_SET_RANKS, SHRINK_STAGES, SHRINK_THREADS, SMALL_TILE_ROWS, STREAM_SLOTS, SUM_THREADS,
    WARPGROUP_SHRINK_STAGES, WARPGROUP_SHRINK_THREADS, WARPGROUP_SHRINK_WIDE_STAGES,
};
use crate::{DeviceCaps, KernelPlan};
use lora_weights::RANK_GRANULE;

/// Blocks of the shrink kernels for small tiles that a multiprocessor runs at once.
const SMALL_SHRINK_BLOCKS_A_UNIT: u64 = 4;
/// Groups of 16 ranks that the shrink kernel over large tiles can take in a block.
const SET_GROUPS: [u32; 5] = [1, 2, 3, 4, SHRINK_SET_RANKS / RANK_GRANULE];
/// The exchange of chunk sums that the unaligned kernel keeps in dynamic shared memory.
pub(super) const EXCHANGE_BYTES: u32 = SHRINK_THREADS / 32 * SMALL_TILE_ROWS * EXCHANGE_PITCH * 4;
/// Waves of blocks that a grid over both kinds of tile has at most; blocks loop over the rest.
const MIXED_WAVES: u32 = 8;
/// Largest padded rank of spread rows whose tiles pass by A in registers: every 32 ranks read x again.
const MOST_STREAMED_RANK: u32 = 32;
/// The same where tiles are seldom more than half full.
const MOST_STREAMED_RANK_OF_FEW: u32 = 64;
/// Most shares of a tile: the rows that each still has are worth loading A for.
const MOST_SHARES: u32 = 8;
/// Slices of a large tile that are summed by a block each; more would have too little to do.
const MOST_SLICES_OF_A_TILE: u32 = 16;
/// Groups of 16 ranks that a warpgroup multiplies at a time.
const WARPGROUP_GROUPS: u32 = 64 / RANK_GRANULE;
/// The shrink kernels whose warpgroups multiply, by how many times those groups a block takes, one first.
const WARPGROUP_KERNELS: [Kernel; 3] = [
    Kernel::ShrinkWarpgroup64,
    Kernel::ShrinkWarpgroup128,
    Kernel::ShrinkWarpgroup192,
];
/// x of spread rows on its way.
pub(super) const STREAM_RING_BYTES: u32 = STREAM_SLOTS * SMALL_TILE_ROWS * BLOCK_K * 2;
/// Parts of the k blocks that are considered.
const MOST_PARTS: u32 = 64;

/// How a delta begins.
pub(super) struct ShrinkPlan {
    pub(super) launch: KernelPlan<Kernel>,
    pub(super) shares: ShrinkShares,
    pub(super) groups: u32,
}

/// Whether rows of x and of A are 16-byte aligned.
pub(super) fn has_aligned_x(params: &DeltaParams) -> bool {
    params.k_in.is_multiple_of(8)
        && params.x_stride.is_multiple_of(8)
        && params.x.is_multiple_of(16)
}

/// Whether entries have up to `most` rows, if all have equally many.
pub(super) fn has_few_rows_an_entry(params: &DeltaParams, most: u32) -> bool {
    u64::from(params.rows) <= u64::from(params.slots) * u64::from(most)
}

/// Groups of 16 ranks of all sites.
fn all_groups(params: &DeltaParams) -> u32 {
    let of_site = |site: &DeltaSite| site.max_rank / RANK_GRANULE;
    sites(params).iter().map(of_site).sum()
}

/// Plans the first launch of a delta.
pub(super) fn plan_shrink(params: &DeltaParams, small: bool, caps: &DeviceCaps) -> ShrinkPlan {
    let aligned = has_aligned_x(params);
    if aligned && small {
        return plan_small_shrink(params, caps);
    }
    let groups = all_groups(params);
    let most_streamed = if has_few_rows_an_entry(params, LARGE_TILE_ROWS / 2) {
        MOST_STREAMED_RANK_OF_FEW
    } else {
        MOST_STREAMED_RANK
    };
    if aligned && is_spread(params) && max_rank(params) <= most_streamed {
        return plan_streamed(params, caps);
    }
    // Fewer ranks leave its blocks waiting for x alone, which the others ask for sooner; tiles that are seldom full are better dealt out one at a time.
    if aligned && caps.warpgroup_mma && !is_spread(params) && groups >= WARPGROUP_GROUPS {
        return plan_warpgroups(params, caps);
    }
    let (sets, set_groups) = group_sets(groups);
    let stages = |stage_k| stage_bytes(set_groups * RANK_GRANULE, stage_k);
    let (kernel, shared_bytes) = if !aligned {
        (Kernel::ShrinkUnaligned, EXCHANGE_BYTES)
    } else if stage_bytes(SHRINK_SET_RANKS, CHUNK_K) <= caps.shared_bytes {
        (Kernel::ShrinkMixed, stages(CHUNK_K))
    } else {
        (Kernel::ShrinkMixedLow, stages(CHUNK_K / 2))
    };
    let parts = k_parts(params, sets, caps);
    let blocks = parts * sets;
    let most_tiles = (MIXED_WAVES * caps.units)
        .div_ceil(blocks.max(1))
        .clamp(1, MOST_GRID_YZ);
    let grid = [blocks, params.max_tiles.min(most_tiles), 1];
    ShrinkPlan {
        launch: KernelPlan {
            kernel,
            grid,
            block: SHRINK_THREADS,
            shared_bytes,
        },
        shares: ShrinkShares::KParts(parts),
        groups: set_groups,
    }
}

/// k blocks; sites and ranks; tiles. Blocks loop over the tiles that the grid has none for: blocks that find nothing to do keep the next kernel waiting.
fn plan_small_shrink(params: &DeltaParams, caps: &DeviceCaps) -> ShrinkPlan {
    let tiles = usual_tiles(params);
    let room = SMALL_SHRINK_BLOCKS_A_UNIT * u64::from(caps.units.max(1));
    let ends_of = |groups: u32| {
        ends(params, |site| {
            (site.max_rank / RANK_GRANULE).div_ceil(groups)
        })
    };
    let blocks_a_tile =
        |groups| u64::from(params.k_blocks) * u64::from(ends_of(groups)[MAX_SITES - 1]);
    // Longer blocks overlap their own latencies, and fewer are past the true rank; but nearly every place for a block is to be taken.
    let groups = [4, 2]
        .into_iter()
        .find(|&groups| blocks_a_tile(groups) * u64::from(tiles) >= room * 7 / 10)
        .filter(|_| max_rank(params) > RANK_GRANULE)
        .unwrap_or(1);
    let kernel = match groups {
        1 => Kernel::ShrinkSmall,
        _ => Kernel::ShrinkSmallRanks,
    };
    let blocks = blocks_a_tile(groups).max(1);
    let grid_tiles = if !is_spread(params) {
        tiles
    } else if blocks * u64::from(tiles) <= room {
        // How many entries the rows of a MoE block touch is not known: as many as there is room for.
        tiles.max((room / blocks) as u32)
    } else {
        (2 * room / blocks) as u32
    };
    let ends = ends_of(groups);
    let grid = [
        params.k_blocks,
        ends[MAX_SITES - 1],
        grid_tiles.min(params.max_tiles).max(1),
    ];
    ShrinkPlan {
        launch: KernelPlan {
            kernel,
            grid,
            block: SHRINK_THREADS,
            shared_bytes: 0,
        },
        shares: ShrinkShares::Sites(ends),
        groups,
    }
}

/// The shrink of spread rows: as many blocks as run at once, which take tiles one after the other, not all of them equally many: what they ask for while all of them work
/// counts for more than who ends first. Where there are fewer tiles than that, equal shares of their rows.
fn plan_streamed(params: &DeltaParams, caps: &DeviceCaps) -> ShrinkPlan {
    let groups = all_groups(params);
    let (kernel, groups_a_block, blocks_a_unit) = match groups {
        0..=1 => (Kernel::ShrinkStreamed16, 1, 3),
        _ => (Kernel::ShrinkStreamed32, 2, 2),
    };
    let sets = groups.div_ceil(groups_a_block).max(1);
    let room =
        (caps.units * blocks_a_unit / (params.k_blocks * sets).max(1)).clamp(1, MOST_GRID_YZ);
    let shares = (room / params.max_tiles.max(1)).clamp(1, MOST_SHARES);
    let items = usual_tiles(params).max(1) * shares;
    ShrinkPlan {
        launch: KernelPlan {
            kernel,
            grid: [params.k_blocks, sets, items.min(room)],
            block: SHRINK_THREADS,
            shared_bytes: STREAM_RING_BYTES,
        },
        shares: ShrinkShares::TileRows(shares),
        groups: 1,
    }
}

/// The shrink whose warpgroups multiply: a block a multiprocessor, which finds its share of tiles, sets of ranks and k blocks itself; no more blocks than end
/// soonest.
fn plan_warpgroups(params: &DeltaParams, caps: &DeviceCaps) -> ShrinkPlan {
    let groups = all_groups(params);
    let fewest_sets = groups.div_ceil(WARPGROUP_GROUPS * WARPGROUP_KERNELS.len() as u32);
    let units = groups.div_ceil(fewest_sets).div_ceil(WARPGROUP_GROUPS);
    let set_groups = units * WARPGROUP_GROUPS;
    let sets = groups.div_ceil(set_groups);
    // Blocks may take halves of a tile's k block.
    let halves =
        2 * u64::from(usual_tiles(params).max(1)) * u64::from(sets) * u64::from(params.k_blocks);
    let turns = halves.div_ceil(caps.units.max(1).into());
    ShrinkPlan {
        launch: KernelPlan {
            kernel: WARPGROUP_KERNELS[units as usize - 1],
            grid: [halves.div_ceil(turns.max(2)) as u32, 1, 1],
            block: WARPGROUP_SHRINK_THREADS,
            shared_bytes: warpgroup_stage_bytes(set_groups),
        },
        shares: ShrinkShares::RankSets(sets),
        groups: set_groups,
    }
}

/// All stages of such a block: rows of x and pieces of A, each 16 bytes further on the banks than the last.
fn warpgroup_stage_bytes(groups: u32) -> u32 {
    let stages = if groups > WARPGROUP_GROUPS {
        WARPGROUP_SHRINK_WIDE_STAGES
    } else {
        WARPGROUP_SHRINK_STAGES
    };
    let x = LARGE_TILE_ROWS * (CHUNK_K * 2 + 16);
    let a = CHUNK_K / 8 * (groups * RANK_GRANULE * 16 + 16);
    stages * (x + a)
}

/// Sets that the 16-rank groups of all sites are cut into, as few and as equal as there can be, and the groups of one.
pub(super) fn group_sets(groups: u32) -> (u32, u32) {
    let most = SET_GROUPS[SET_GROUPS.len() - 1];
    let sets = groups.div_ceil(most).max(1);
    let each = groups.div_ceil(sets);
    let room = SET_GROUPS.iter().find(|&&room| room >= each);
    (sets, *room.unwrap_or(&most))
}

/// All stages of a shrink block over large tiles: rows of x and of A, `stage_k` wide.
fn stage_bytes(ranks: u32, stage_k: u32) -> u32 {
    SHRINK_STAGES * (LARGE_TILE_ROWS + ranks) * stage_k * 2
}

/// Slices of a tile, tiles, sites. A slice has about as many rows as a block has threads for, 4 ranks each.
pub(super) fn plan_sum(params: &DeltaParams) -> KernelPlan<Kernel> {
    let slices = (LARGE_TILE_ROWS * max_rank(params) / 4).div_ceil(SUM_THREADS);
    let slices = slices.next_power_of_two().min(MOST_SLICES_OF_A_TILE);
    KernelPlan {
        kernel: Kernel::SumBlocks,
        grid: [
            slices,
            params.max_tiles.min(MOST_GRID_YZ),
            params.site_count,
        ],
        block: SUM_THREADS,
        shared_bytes: 0,
    }
}

/// In how many parts the k blocks of a large tile are taken: what ends soonest, with a block a multiprocessor at a time whose start costs about two
/// fifths of a k block.
fn k_parts(params: &DeltaParams, sets: u32, caps: &DeviceCaps) -> u32 {
    let room = u64::from(caps.units.max(1));
    let tiles = u64::from(params.rows.div_ceil(LARGE_TILE_ROWS)) * u64::from(sets);
    let cost = |parts: u32| {
        let waves = (tiles * u64::from(parts)).div_ceil(room);
        waves * (2 + 5 * u64::from(params.k_blocks.div_ceil(parts)))
    };
    (1..=params.k_blocks.clamp(1, MOST_PARTS))
        .min_by_key(|parts| cost(*parts))
        .unwrap_or(1)
}
