//! Which kernels a launch takes, with which grid: pure functions of the problem and the device.

mod expand;
mod group;
mod head;
mod overlay;
mod shrink;
mod spread;

pub use group::{GroupPlan, GroupSource, plan_group_rows};
pub use head::{HeadClusters, plan_head_logits};
pub use overlay::{plan_gather_rows, plan_replace_rows, plan_row_diff};
pub use spread::{SpreadPlan, plan_delta_spread};

use super::Kernel;
use crate::params::{
    BLOCK_K, DeltaParams, DeltaSite, EXPAND_THREADS, FLAG_SPREAD, MAX_SITES, SMALL_TILE_ROWS,
    WARP_OUTPUTS,
};
use crate::{DeviceCaps, KernelPlan, LaunchPlan, Problem};
use bytemuck::Zeroable;
use expand::{expand_kernel, expand_runs, has_whole_outs, plan_expand};
use shrink::{has_aligned_x, plan_shrink, plan_sum};
use std::ffi::c_void;

/// The launches of a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaPlan {
    /// Partial sums of `x @ A^T`.
    pub shrink: KernelPlan<Kernel>,
    /// What blocks of the shrink grid share out among them.
    pub shrink_shares: ShrinkShares,
    /// Groups of 16 ranks that a shrink block takes: of small tiles in turn, of large ones at once and maybe of several sites.
    pub shrink_groups: u32,
    /// The k blocks of large tiles added up, where there may be any and expand blocks do not do it themselves.
    pub sum: Option<KernelPlan<Kernel>>,
    /// `@ B^T` and the fold.
    pub expand: KernelPlan<Kernel>,
    /// Where the blocks of each site end in x of the expand grid.
    pub block_ends: [u32; MAX_SITES],
    /// Runs of 256 outputs that an expand block makes one after the other.
    pub expand_runs: u32,
}

/// How the blocks of a shrink launch share its work: the second argument of its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShrinkShares {
    /// Small tiles, of which a block takes one site: where the blocks of each end in y of the grid.
    Sites([u32; MAX_SITES]),
    /// Large tiles: parts that the k blocks are cut into.
    KParts(u32),
    /// Large tiles whose blocks find their k blocks themselves: sets that the ranks of all sites are cut into.
    RankSets(u32),
    /// Spread rows: equal shares of a tile's rows.
    TileRows(u32),
}

impl ShrinkShares {
    /// The argument as a launch takes it.
    pub(super) fn as_argument(&mut self) -> *mut c_void {
        match self {
            Self::Sites(ends) => (&raw mut *ends).cast(),
            Self::KParts(count) | Self::RankSets(count) | Self::TileRows(count) => {
                (&raw mut *count).cast()
            }
        }
    }
}

/// Outputs that an expand block makes at a time.
const EXPAND_BLOCK_OUTPUTS: u32 = EXPAND_THREADS / 32 * WARP_OUTPUTS;

const MOST_GRID_YZ: u32 = 65_535;

/// The plan for `problem` on a GPU: the kernels of the first launch, which is the largest where passes of rows or groups of
/// [`MAX_SITES`] sites make several. x is taken to be as aligned as its width allows.
///
/// ```
/// use lora_kernels::{DeviceCaps, Problem, cuda};
///
/// let caps = DeviceCaps { name: "GB10".into(), units: 48, shared_bytes: 101_376, l2_bytes: 24 << 20, warpgroup_mma: false };
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
    let small = params.tile_rows <= SMALL_TILE_ROWS && params.max_tiles <= MOST_GRID_YZ;
    let shrink = plan_shrink(params, small, caps);
    let open = shrink.launch.kernel.leaves_sums_open();
    let kernel = expand_kernel(params, caps, small, open);
    let expand_runs = expand_runs(params, kernel, caps);
    let block_ends = ends(params, |site| {
        site.n_out.div_ceil(expand_runs * EXPAND_BLOCK_OUTPUTS)
    });
    let expand = plan_expand(params, kernel, block_ends);
    let sum = (params.tile_rows > SMALL_TILE_ROWS && !open).then(|| plan_sum(params));
    DeltaPlan {
        shrink: shrink.launch,
        shrink_shares: shrink.shares,
        shrink_groups: shrink.groups,
        sum,
        expand,
        block_ends,
        expand_runs,
    }
}

/// The sites that a launch has.
fn sites(params: &DeltaParams) -> &[DeltaSite] {
    &params.sites[..params.site_count as usize]
}

/// The largest padded rank of any of them.
fn max_rank(params: &DeltaParams) -> u32 {
    let ranks = sites(params).iter().map(|site| site.max_rank);
    ranks.max().unwrap_or(0)
}

/// Whether a router spreads the rows over the entries.
fn is_spread(params: &DeltaParams) -> bool {
    params.flags & FLAG_SPREAD != 0
}

/// Where each site's share ends; unused sites end where the last one does.
fn ends(params: &DeltaParams, share: impl Fn(&DeltaSite) -> u32) -> [u32; MAX_SITES] {
    let mut end = 0;
    std::array::from_fn(|index| {
        end += sites(params).get(index).map_or(0, &share);
        end
    })
}

/// Tiles of rows that are spread evenly over as many entries as there can be, or at random where a router spreads them. Only uneven batches have more.
fn usual_tiles(params: &DeltaParams) -> u32 {
    let full = params.rows.div_ceil(params.tile_rows.max(SMALL_TILE_ROWS));
    let tiles = if is_spread(params) {
        let entries = entries_hit(params.slots, params.rows);
        // An entry's last tile is half full.
        entries.max(full.saturating_add(entries / 2))
    } else {
        full.max(params.slots.min(params.rows))
    };
    tiles.min(params.max_tiles)
}

/// How many of `entries` are expected to be chosen by at least one of `rows` rows that choose at random.
fn entries_hit(entries: u32, rows: u32) -> u32 {
    let entries = f64::from(entries.max(1));
    let missed = (1.0 - 1.0 / entries).powf(rows.into());
    (entries * (1.0 - missed)).ceil() as u32
}

#[cfg(test)]
mod tests;
