//! Which kernels a launch takes, with which grid: pure functions of the problem and the device.

mod head;
mod overlay;

pub use head::{HeadClusters, plan_head_logits};
pub use overlay::{plan_gather_rows, plan_replace_rows, plan_row_diff};

use super::Kernel;
use crate::params::{
    BLOCK_K, CHUNK_K, DeltaParams, DeltaSite, EXCHANGE_PITCH, EXPAND_AHEAD_16, EXPAND_AHEAD_64,
    EXPAND_THREADS, EXPAND_UNIT_ROWS, FLAG_SPREAD, GROUP_BLOCKS, GroupParams, LARGE_TILE_ROWS,
    MAX_GROUP_THREADS, MAX_SITES, SHRINK_SET_RANKS, SHRINK_STAGES, SHRINK_THREADS, SMALL_TILE_ROWS,
    SPREAD_AHEAD, STREAM_SLOTS, SUM_THREADS, WARP_OUTPUTS,
};
use crate::{DeviceCaps, KernelPlan, LaunchPlan, Problem};
use bytemuck::Zeroable;
use lora_weights::RANK_GRANULE;

/// The launches of a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaPlan {
    /// Partial sums of `x @ A^T`.
    pub shrink: KernelPlan<Kernel>,
    /// Where the blocks of each site end in y of the shrink grid, where a block takes one site.
    pub shrink_ends: [u32; MAX_SITES],
    /// Groups of 16 ranks that a shrink block takes: of small tiles in turn, of large ones at once and maybe of several sites.
    pub shrink_groups: u32,
    /// Parts of the k blocks that blocks of the shrink grid of large tiles take.
    pub k_parts: u32,
    /// Shares of a tile's rows that blocks of the shrink grid of spread rows take.
    pub tile_shares: u32,
    /// The k blocks of large tiles added up, where there may be any and expand blocks do not do it themselves.
    pub sum: Option<KernelPlan<Kernel>>,
    /// `@ B^T` and the fold.
    pub expand: KernelPlan<Kernel>,
    /// Where the blocks of each site end in x of the expand grid.
    pub block_ends: [u32; MAX_SITES],
    /// Runs of 256 outputs that an expand block makes one after the other.
    pub expand_runs: u32,
}

/// Shared memory for the counts of a grouping: with what the kernel has beside it, a block of every target has that much.
const COUNT_BYTES: u32 = 80 * 1024;
/// Rows whose keys are sorted rather than tallied, whatever the entries: two warps sort without waiting for each other much.
const MOST_SORTED_ROWS: u32 = 64;
/// What a block of a counted grouping keeps of an entry: its rows, where the next of them goes, and a byte for those of each warp.
const ENTRY_COUNT_BYTES: u32 = 2 * 4 + MAX_GROUP_THREADS / 32;

/// Blocks of the shrink kernels for small tiles that a multiprocessor runs at once.
const SMALL_SHRINK_BLOCKS_A_UNIT: u64 = 4;
/// Blocks of [`Kernel::ExpandSmall16`] or [`Kernel::ExpandSmall32`] that a multiprocessor runs at once.
const SMALL_BLOCKS_A_UNIT: u64 = 5;
/// The same of [`Kernel::ExpandSmall64`].
const SMALL_64_BLOCKS_A_UNIT: u64 = 4;
/// Runs of outputs that a block of those makes at most.
const MOST_SMALL_RUNS: u32 = 6;
/// Blocks of [`Kernel::ExpandSpread16`] or [`Kernel::ExpandSpread32`] that a multiprocessor runs at once.
const SPREAD_BLOCKS_A_UNIT: u64 = 4;
/// Runs of outputs that a block of those makes at most.
const MOST_SPREAD_RUNS: u32 = 8;

/// Outputs that an expand block makes at a time.
const EXPAND_BLOCK_OUTPUTS: u32 = EXPAND_THREADS / 32 * WARP_OUTPUTS;

/// Groups of 16 ranks that the shrink kernel over large tiles can take in a block.
const SET_GROUPS: [u32; 5] = [1, 2, 3, 4, SHRINK_SET_RANKS / RANK_GRANULE];
/// The exchange of chunk sums that the unaligned kernel keeps in dynamic shared memory.
const EXCHANGE_BYTES: u32 = SHRINK_THREADS / 32 * SMALL_TILE_ROWS * EXCHANGE_PITCH * 4;
const MOST_GRID_YZ: u32 = 65_535;
/// Waves of blocks that a grid over both kinds of tile has at most; blocks loop over the rest.
const MIXED_WAVES: u32 = 8;
/// Largest padded rank of spread rows whose tiles pass by A in registers: every 32 ranks read x again.
const MOST_STREAMED_RANK: u32 = 32;
/// The same where there are fewer rows an entry than [`FEW_ROWS_AN_ENTRY`], so that x is little beside A.
const MOST_STREAMED_RANK_OF_FEW: u32 = 64;
/// A quarter of a large tile.
const FEW_ROWS_AN_ENTRY: u32 = LARGE_TILE_ROWS / 4;
/// Most shares of a tile: the rows that each still has are worth loading A for.
const MOST_SHARES: u32 = 8;
/// Slices of a large tile that are summed by a block each; more would have too little to do.
const MOST_SLICES_OF_A_TILE: u32 = 16;
/// Parts of the k blocks that are considered.
const MOST_PARTS: u32 = 64;

struct ShrinkPlan {
    launch: KernelPlan<Kernel>,
    ends: [u32; MAX_SITES],
    groups: u32,
    parts: u32,
    shares: u32,
}

/// The plan for `problem` on a GPU: the kernels of the first launch, which is the largest where passes of rows or groups of
/// [`MAX_SITES`] sites make several. x is taken to be as aligned as its width allows.
///
/// ```
/// use lora_kernels::{DeviceCaps, Problem, cuda};
///
/// let caps = DeviceCaps { name: "GB10".into(), units: 48, shared_bytes: 101_376, l2_bytes: 24 << 20 };
/// let plan = cuda::plan(&Problem::uniform(1, 1, 16, (4096, &[4096])), &caps);
/// assert_eq!(plan.shrink.grid, [4, 1, 1]);
/// assert!(plan.to_string().contains("lora_shrink_small <<<4x1x1, 256, 0 B>>>"));
/// ```
pub fn plan(problem: &Problem, caps: &DeviceCaps) -> LaunchPlan<Kernel> {
    let plan = plan_delta(&first_launch(problem), caps);
    LaunchPlan {
        sum: plan.sum,
        ..LaunchPlan::of(problem, plan.shrink, plan.expand)
    }
}

/// What a routed launch of `problem` says of its sizes; its only address is one that is aligned.
fn first_launch(problem: &Problem) -> DeltaParams {
    let rows = problem.rows().min(u64::from(u32::MAX)) as u32;
    let groups = problem.row_groups();
    let mut params = DeltaParams {
        x_stride: problem.k_in.into(),
        rows,
        x_row_count: rows.div_ceil(problem.outs_per_x.max(1)),
        k_in: problem.k_in,
        k_blocks: problem.k_in.div_ceil(BLOCK_K),
        x_div: problem.outs_per_x,
        tile_rows: groups.tile_rows(rows),
        slots: groups.entries,
        site_count: problem.sites.len().min(MAX_SITES) as u32,
        pass_rows: problem.pass_rows() as u32,
        max_tiles: groups.tile_bound(rows),
        ..DeltaParams::zeroed()
    };
    for (to, site) in params.sites.iter_mut().zip(&problem.sites) {
        to.n_out = site.n_out;
        to.out_stride = site.n_out.into();
        to.max_rank = site.max_rank;
    }
    params
}

/// Plans a delta launch.
pub fn plan_delta(params: &DeltaParams, caps: &DeviceCaps) -> DeltaPlan {
    let sites = &params.sites[..params.site_count as usize];
    let max_rank = sites.iter().map(|site| site.max_rank).max().unwrap_or(0);
    let small = params.tile_rows <= SMALL_TILE_ROWS && params.max_tiles <= MOST_GRID_YZ;
    let shrink = plan_shrink(params, sites, small, caps);
    let open = shrink.launch.kernel.leaves_sums_open();
    let kernel = expand_kernel(sites, max_rank, small, open);
    let expand_runs = expand_runs(params, sites, kernel, caps);
    let block_ends = ends(sites, |site| {
        site.n_out.div_ceil(expand_runs * EXPAND_BLOCK_OUTPUTS)
    });
    let expand = plan_expand(params, max_rank, kernel, block_ends);
    let sum = (params.tile_rows > SMALL_TILE_ROWS && !open).then(|| plan_sum(params, max_rank));
    DeltaPlan {
        shrink: shrink.launch,
        shrink_ends: shrink.ends,
        shrink_groups: shrink.groups,
        k_parts: shrink.parts,
        tile_shares: shrink.shares,
        sum,
        expand,
        block_ends,
        expand_runs,
    }
}

/// Where each site's share ends; unused sites end where the last one does.
fn ends(sites: &[DeltaSite], share: impl Fn(&DeltaSite) -> u32) -> [u32; MAX_SITES] {
    let mut end = 0;
    std::array::from_fn(|index| {
        end += sites.get(index).map_or(0, &share);
        end
    })
}

fn plan_shrink(
    params: &DeltaParams,
    sites: &[DeltaSite],
    small: bool,
    caps: &DeviceCaps,
) -> ShrinkPlan {
    let aligned = params.k_in.is_multiple_of(8)
        && params.x_stride.is_multiple_of(8)
        && params.x.is_multiple_of(16);
    let group_ends = ends(sites, |site| site.max_rank / RANK_GRANULE);
    let groups = group_ends[MAX_SITES - 1];
    if aligned && small {
        return plan_small_shrink(params, sites, caps);
    }
    let most_rank = sites.iter().map(|site| site.max_rank).max().unwrap_or(0);
    let few_rows = u64::from(params.rows) < u64::from(params.slots) * u64::from(FEW_ROWS_AN_ENTRY);
    let most_streamed = if few_rows {
        MOST_STREAMED_RANK_OF_FEW
    } else {
        MOST_STREAMED_RANK
    };
    if aligned && params.flags & FLAG_SPREAD != 0 && most_rank <= most_streamed {
        return plan_streamed(params, group_ends, caps);
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
        ends: group_ends,
        groups: set_groups,
        parts,
        shares: 1,
    }
}

/// k blocks; sites and ranks; tiles. Blocks loop over the tiles that the grid has none for: blocks that find nothing to do keep the next kernel waiting.
fn plan_small_shrink(params: &DeltaParams, sites: &[DeltaSite], caps: &DeviceCaps) -> ShrinkPlan {
    let tiles = usual_tiles(params);
    let room = SMALL_SHRINK_BLOCKS_A_UNIT * u64::from(caps.units.max(1));
    let ends_of = |groups: u32| {
        ends(sites, |site| {
            (site.max_rank / RANK_GRANULE).div_ceil(groups)
        })
    };
    let blocks_a_tile =
        |groups| u64::from(params.k_blocks) * u64::from(ends_of(groups)[MAX_SITES - 1]);
    // Longer blocks overlap their own latencies, and fewer are past the true rank; but nearly every place for a block is to be taken.
    let groups = [4, 2]
        .into_iter()
        .find(|&groups| blocks_a_tile(groups) * u64::from(tiles) >= room * 7 / 10)
        .filter(|_| sites.iter().any(|site| site.max_rank > RANK_GRANULE))
        .unwrap_or(1);
    let kernel = match groups {
        1 => Kernel::ShrinkSmall,
        _ => Kernel::ShrinkSmallRanks,
    };
    let blocks = blocks_a_tile(groups).max(1);
    let grid_tiles = match params.flags & FLAG_SPREAD {
        0 => tiles,
        // Rows of a MoE block are never spread evenly, but how many entries they touch is not known either.
        _ if blocks * u64::from(tiles) <= room => tiles.max((room / blocks) as u32),
        _ => (2 * room / blocks) as u32,
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
        ends,
        groups,
        parts: params.k_blocks,
        shares: 1,
    }
}

/// The shrink of spread rows: as many blocks as run at once, which take equally many tiles one after the other; where there are fewer tiles than that, equal shares of
/// their rows.
fn plan_streamed(params: &DeltaParams, ends: [u32; MAX_SITES], caps: &DeviceCaps) -> ShrinkPlan {
    let groups = ends[MAX_SITES - 1];
    let (kernel, groups_a_block, blocks_a_unit) = match groups {
        0..=1 => (Kernel::ShrinkStreamed16, 1, 3),
        _ => (Kernel::ShrinkStreamed32, 2, 2),
    };
    let sets = groups.div_ceil(groups_a_block).max(1);
    let room =
        (caps.units * blocks_a_unit / (params.k_blocks * sets).max(1)).clamp(1, MOST_GRID_YZ);
    let shares = (room / params.max_tiles.max(1)).clamp(1, MOST_SHARES);
    let items = usual_tiles(params).max(1) * shares;
    let turns = items.div_ceil(room);
    ShrinkPlan {
        launch: KernelPlan {
            kernel,
            grid: [params.k_blocks, sets, items.div_ceil(turns)],
            block: SHRINK_THREADS,
            shared_bytes: STREAM_SLOTS * SMALL_TILE_ROWS * BLOCK_K * 2,
        },
        ends,
        groups: 1,
        parts: params.k_blocks,
        shares,
    }
}

/// Sets that the 16-rank groups of all sites are cut into, as few and as equal as there can be, and the groups of one.
fn group_sets(groups: u32) -> (u32, u32) {
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
fn plan_sum(params: &DeltaParams, max_rank: u32) -> KernelPlan<Kernel> {
    let slices = (LARGE_TILE_ROWS * max_rank / 4).div_ceil(SUM_THREADS);
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

/// Tiles of rows that are spread evenly over as many entries as there can be. Only uneven batches have more.
fn usual_tiles(params: &DeltaParams) -> u32 {
    let even = params.rows.div_ceil(params.tile_rows.max(SMALL_TILE_ROWS));
    even.max(params.slots.min(params.rows))
        .min(params.max_tiles)
}

/// `open`: the sums of large tiles are still to be added up.
fn expand_kernel(sites: &[DeltaSite], max_rank: u32, small: bool, open: bool) -> Kernel {
    let whole = |site: &DeltaSite| {
        site.out.is_multiple_of(16)
            && site.out_stride.is_multiple_of(8)
            && site.n_out.is_multiple_of(8)
    };
    match (small, max_rank) {
        _ if !sites.iter().all(whole) => Kernel::ExpandAny,
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

fn plan_expand(
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
fn expand_runs(
    params: &DeltaParams,
    sites: &[DeltaSite],
    kernel: Kernel,
    caps: &DeviceCaps,
) -> u32 {
    let blocks = |runs: u32, tiles: u32| -> u64 {
        let of_site = |site: &DeltaSite| site.n_out.div_ceil(runs * EXPAND_BLOCK_OUTPUTS);
        sites.iter().map(of_site).sum::<u32>() as u64 * u64::from(tiles)
    };
    let units = u64::from(caps.units.max(1));
    // Setting up a block costs what a run does; blocks of a wave end together.
    let soonest = |room: u64, most_runs: u32| {
        let cost = |runs: u32| {
            let waves = blocks(runs, usual_tiles(params)).div_ceil(room);
            waves * u64::from(1 + runs)
        };
        (1..=most_runs).min_by_key(|&runs| cost(runs))
    };
    let runs = match kernel {
        Kernel::ExpandSmall16 | Kernel::ExpandSmall32 => {
            soonest(units * SMALL_BLOCKS_A_UNIT, MOST_SMALL_RUNS)
        }
        Kernel::ExpandSmall64 => soonest(units * SMALL_64_BLOCKS_A_UNIT, MOST_SMALL_RUNS),
        Kernel::ExpandSpread16 | Kernel::ExpandSpread32 => {
            soonest(units * SPREAD_BLOCKS_A_UNIT, MOST_SPREAD_RUNS)
        }
        _ => None,
    };
    runs.unwrap_or(1)
}

/// Bytes from one row of `xa` in shared memory to the next: what keeps the lanes of a phase on different banks.
fn xa_pitch(max_rank: u32) -> u32 {
    ((max_rank / RANK_GRANULE) | 1) * RANK_GRANULE * 2
}

/// How a grouping of rows is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupPlan {
    /// One block, a thread a row, or a cluster that counts more rows than that.
    pub launch: KernelPlan<Kernel>,
    /// Entries whose counts fit in shared memory; where rows are counted, more entries take more passes over them. 0 where the rows' keys are sorted.
    pub capacity: u32,
}

/// Where the entries of rows to group come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupSource {
    /// The rows' slots.
    Slots,
    /// Their tokens' adapters and their experts.
    Experts,
}

/// Plans a grouping of rows.
pub fn plan_group_rows(source: GroupSource, params: &GroupParams) -> GroupPlan {
    let (kernel, blocks, block, shared_bytes, capacity);
    if params.rows <= MAX_GROUP_THREADS {
        let tallies =
            u64::from(params.rows.div_ceil(32).next_power_of_two()) * u64::from(params.slots);
        let tallied = params.rows > MOST_SORTED_ROWS && tallies * 2 <= COUNT_BYTES.into();
        kernel = match source {
            GroupSource::Slots => Kernel::GroupRows,
            GroupSource::Experts => Kernel::GroupExperts,
        };
        blocks = 1;
        block = params.rows.next_power_of_two().max(32);
        capacity = if tallied { params.slots } else { 0 };
        shared_bytes = if tallied {
            (tallies as u32 * 2).next_multiple_of(4)
        } else {
            0
        };
    } else {
        kernel = match source {
            GroupSource::Slots => Kernel::GroupManyRows,
            GroupSource::Experts => Kernel::GroupManyExperts,
        };
        blocks = GROUP_BLOCKS;
        block = MAX_GROUP_THREADS;
        capacity = params.slots.clamp(1, COUNT_BYTES / ENTRY_COUNT_BYTES);
        shared_bytes = capacity * ENTRY_COUNT_BYTES;
    }
    let launch = KernelPlan {
        kernel,
        grid: [blocks, 1, 1],
        block,
        shared_bytes,
    };
    GroupPlan { launch, capacity }
}

#[cfg(test)]
mod tests;
