//! A launch as a plain, printable, comparable value, and the bytes it moves: what benches print and tests compare with no device.

use crate::params::site_scratch_bytes;
use crate::{
    BLOCK_K, DeviceCaps, LARGE_TILE_ROWS, MAX_SITES, RowGroupsSpec, SMALL_TILE_ROWS, ScratchSpec,
    Tile, host,
};
use std::fmt;
use std::iter::Sum;
use std::ops::Add;

/// Bytes of a BF16 element.
const BF16: u64 = 2;

/// Bytes of an FP32 partial sum.
const F32: u64 = 4;

/// A delta as far as its cost goes: who is in the batch and how large its sites are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Width of x.
    pub k_in: u32,
    /// Rows of out that read one row of x: 1 for dense modules, top-k for unsorted MoE gate and up.
    pub outs_per_x: u32,
    /// Rows of each adapter in the batch. Base rows are in no group.
    pub groups: Vec<u32>,
    /// Largest group cut into small tiles; see [`RowGroupsSpec::small_max`].
    pub small_max: u32,
    /// The sites that read x.
    pub sites: Vec<ProblemSite>,
}

/// One site of a [`Problem`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProblemSite {
    /// Width of out.
    pub n_out: u32,
    /// Padded rank.
    pub max_rank: u32,
    /// True rank of each group here; 0 where the group's adapter does not adapt the site.
    pub ranks: Vec<u32>,
}

impl Problem {
    /// `rows` rows shared evenly by `adapters` adapters of one rank, through sites of the given widths.
    pub fn uniform(rows: u32, adapters: u32, rank: u32, (k_in, n_outs): (u32, &[u32])) -> Self {
        let adapters = adapters.min(rows).max(1);
        let groups: Vec<u32> = (0..adapters)
            .map(|i| rows / adapters + u32::from(i < rows % adapters))
            .collect();
        let site = |&n_out: &u32| ProblemSite {
            n_out,
            max_rank: lora_weights::padded_rank(rank),
            ranks: vec![rank; groups.len()],
        };
        Self {
            k_in,
            outs_per_x: 1,
            small_max: crate::LaunchOptions::default().gemv_max_m,
            sites: n_outs.iter().map(site).collect(),
            groups,
        }
    }

    /// Rows that are in a group.
    pub(crate) fn rows(&self) -> u64 {
        self.groups.iter().map(|&rows| u64::from(rows)).sum()
    }

    /// Rows of each pass but the last.
    pub(crate) fn pass_rows(&self) -> u64 {
        self.rows().min(ScratchSpec::PASS_ROWS.into())
    }

    /// Tiles of the whole batch.
    fn tiles(&self) -> u64 {
        let small_max = self.small_max_of_batch();
        let tile_rows = |rows: u32| {
            if rows <= small_max {
                SMALL_TILE_ROWS
            } else {
                LARGE_TILE_ROWS
            }
        };
        self.groups
            .iter()
            .map(|&rows| u64::from(rows.div_ceil(tile_rows(rows))))
            .sum()
    }

    /// Largest group that is cut into small tiles in this batch.
    fn small_max_of_batch(&self) -> u32 {
        self.row_groups().small_max_of(clamp(self.rows()))
    }

    /// Its rows as a [`RowGroups`](crate::RowGroups) holds them.
    pub(crate) fn row_groups(&self) -> RowGroupsSpec {
        RowGroupsSpec::new(clamp(self.rows()), self.groups.len() as u32, self.small_max)
    }

    /// (rows, rank) of every group that adapts `site`.
    fn adapted<'a>(&'a self, site: &'a ProblemSite) -> impl Iterator<Item = (u64, u64)> + 'a {
        let ranks = site.ranks.iter().map(|&rank| u64::from(rank));
        let rows = self.groups.iter().map(|&rows| u64::from(rows));
        rows.zip(ranks).filter(|&(rows, rank)| rows > 0 && rank > 0)
    }
}

/// Bytes between memory and kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BytesMoved {
    /// True-rank A and B of each adapter in the batch. Tiles of one adapter that run together find them in cache.
    pub adapters: u64,
    /// x.
    pub x: u64,
    /// out, read and written.
    pub out: u64,
    /// Partial sums and, of groups cut large, their totals, written and read. What fits in the L2 need not reach memory.
    pub partials: u64,
    /// Tiles, permutation and table entries.
    pub routing: u64,
}

impl BytesMoved {
    /// What no implementation can go below: adapters, x and out, once.
    pub fn floor(&self) -> u64 {
        self.adapters + self.x + self.out
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.floor() + self.partials + self.routing
    }
}

impl Add for BytesMoved {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            adapters: self.adapters + other.adapters,
            x: self.x + other.x,
            out: self.out + other.out,
            partials: self.partials + other.partials,
            routing: self.routing + other.routing,
        }
    }
}

impl Sum for BytesMoved {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), Add::add)
    }
}

/// What a delta moves when each adapter's true-rank A and B and x are read once, and out is read and written once.
///
/// ```
/// use lora_kernels::{Problem, bytes_moved};
///
/// let bytes = bytes_moved(&Problem::uniform(1, 1, 16, (4096, &[4096])));
/// assert_eq!(bytes.adapters, 2 * 16 * 4096 * 2);
/// assert_eq!(bytes.floor(), 2 * 16 * 4096 * 2 + 4096 * 2 + 4096 * 4);
/// ```
pub fn bytes_moved(problem: &Problem) -> BytesMoved {
    let k_in = u64::from(problem.k_in);
    let k_blocks = k_in.div_ceil(BLOCK_K.into());
    let small_max = u64::from(problem.small_max_of_batch());
    let mut bytes = BytesMoved::default();
    for site in &problem.sites {
        let n_out = u64::from(site.n_out);
        for (rows, rank) in problem.adapted(site) {
            bytes.adapters += rank * (k_in + n_out) * BF16;
            bytes.out += rows * n_out * 2 * BF16;
            let total = if rows > small_max { BF16 } else { 0 };
            bytes.partials += rows * rank * 2 * (k_blocks * F32 + total);
        }
    }
    let reads_x = |group: usize| {
        problem
            .sites
            .iter()
            .any(|site| site.ranks.get(group).is_some_and(|&r| r > 0))
    };
    let rows = problem.groups.iter().enumerate();
    let out_rows: u64 = rows
        .filter(|&(group, _)| reads_x(group))
        .map(|(_, &rows)| u64::from(rows))
        .sum();
    bytes.x = out_rows.div_ceil(problem.outs_per_x.max(1).into()) * k_in * BF16;
    // Two addresses, a scale and a rank for each tile and site; each position's row number.
    let entry = 2 * 8 + 4 + 4;
    bytes.routing = problem.tiles()
        * (size_of::<Tile>() as u64 + problem.sites.len() as u64 * entry)
        + problem.rows() * size_of::<u32>() as u64;
    bytes
}

/// One kernel launch, as a plain value. `K` names the kernels of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelPlan<K> {
    /// Kernel.
    pub kernel: K,
    /// Blocks in each dimension; on the host, tasks.
    pub grid: [u32; 3],
    /// Threads a block; 1 on the host.
    pub block: u32,
    /// Dynamic shared memory a block, bytes; on the host, a thread's working memory.
    pub shared_bytes: u32,
}

/// A delta launch before it is one: the same value for every backend, whose kernels `K` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchPlan<K> {
    /// x times A, in k blocks.
    pub shrink: KernelPlan<K>,
    /// The k blocks of large tiles added up, where that is a kernel of its own.
    pub sum: Option<KernelPlan<K>>,
    /// The rank vectors times B, folded into out.
    pub expand: KernelPlan<K>,
    /// Scratch of all sites for a pass, bytes; see [`site_scratch_bytes`].
    pub scratch_bytes: u64,
    /// Launches: passes of rows times groups of [`MAX_SITES`] sites.
    pub launches: u32,
    /// What it moves.
    pub bytes: BytesMoved,
}

impl<K> LaunchPlan<K> {
    /// The plan of `problem` with a shrink and an expand kernel: scratch, launches and bytes follow from the problem alone.
    pub(crate) fn of(problem: &Problem, shrink: KernelPlan<K>, expand: KernelPlan<K>) -> Self {
        let pass_rows = problem.pass_rows();
        let passes = problem.rows().div_ceil(pass_rows.max(1));
        let site_groups = problem.sites.len().div_ceil(MAX_SITES) as u64;
        let site_bytes = |site: &ProblemSite| {
            site_scratch_bytes(problem.k_in.into(), pass_rows, site.max_rank.into())
        };
        Self {
            shrink,
            sum: None,
            expand,
            scratch_bytes: problem.sites.iter().map(site_bytes).sum(),
            launches: clamp(passes * site_groups),
            bytes: bytes_moved(problem),
        }
    }
}

fn clamp(value: u64) -> u32 {
    value.min(u32::MAX.into()) as u32
}

/// The host backend's plan for `problem` on a machine of `caps.units` threads. [`cuda::plan`](crate::cuda::plan) gives a GPU's.
pub fn plan(problem: &Problem, caps: &DeviceCaps) -> LaunchPlan<HostKernel> {
    let k_blocks = u64::from(problem.k_in.div_ceil(BLOCK_K));
    let max_rank = problem.sites.iter().map(|site| site.max_rank).max();
    let widths: Vec<u32> = problem.sites.iter().map(|site| site.n_out).collect();
    let kernel = |kernel, tasks: u64| KernelPlan {
        kernel,
        grid: [clamp(tasks), 1, 1],
        block: 1,
        shared_bytes: clamp(host::workspace_bytes(max_rank.unwrap_or(0)) as u64),
    };
    let shrink = host::shrink_tasks(&problem.groups) * k_blocks;
    let expand = host::expand_tasks(&widths, caps.units as usize) as u64;
    LaunchPlan::of(
        problem,
        kernel(HostKernel::Shrink, shrink),
        kernel(HostKernel::Expand, expand),
    )
}

/// The two halves of a delta, as the host backend runs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HostKernel {
    /// x times A.
    Shrink,
    /// The rank vectors times B, folded into out.
    Expand,
}

impl fmt::Display for HostKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shrink => "shrink",
            Self::Expand => "expand",
        })
    }
}

impl<K: fmt::Display> fmt::Display for KernelPlan<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.grid;
        write!(
            f,
            "{} <<<{x}x{y}x{z}, {}, {} B>>>",
            self.kernel, self.block, self.shared_bytes
        )
    }
}

impl<K: fmt::Display> fmt::Display for LaunchPlan<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (total, floor) = (self.bytes.total(), self.bytes.floor());
        write!(f, "{} x ({}, ", self.launches, self.shrink)?;
        if let Some(sum) = &self.sum {
            write!(f, "{sum}, ")?;
        }
        write!(
            f,
            "{}), scratch {} B, moves {total} B, {:.3} of the floor",
            self.expand,
            self.scratch_bytes,
            total as f64 / floor.max(1) as f64
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caps() -> DeviceCaps {
        DeviceCaps {
            name: "two threads".into(),
            units: 2,
            shared_bytes: 0,
            l2_bytes: 0,
            warpgroup_mma: false,
        }
    }

    #[test]
    fn a_site_that_a_group_does_not_adapt_costs_it_nothing() {
        let mut problem = Problem::uniform(4, 2, 16, (1024, &[512, 512]));
        let both = bytes_moved(&problem);
        problem.sites[1].ranks = vec![16, 0];
        let one = bytes_moved(&problem);
        assert_eq!(both.adapters - one.adapters, 16 * (1024 + 512) * 2);
        assert_eq!(both.out - one.out, 2 * 512 * 4);
        assert_eq!(both.x, one.x);
        problem.sites[0].ranks = vec![16, 0];
        assert_eq!(bytes_moved(&problem).x, one.x / 2);
    }

    #[test]
    fn true_rank_counts_and_padding_does_not() {
        let padded = bytes_moved(&Problem::uniform(8, 1, 12, (4096, &[4096])));
        assert_eq!(padded.adapters, 12 * 8192 * 2);
    }

    #[test]
    fn repeated_x_rows_are_read_once() {
        let mut problem = Problem::uniform(64, 1, 16, (2048, &[768]));
        problem.outs_per_x = 8;
        assert_eq!(bytes_moved(&problem).x, 8 * 2048 * 2);
    }

    #[test]
    fn plans_compare_and_print() {
        let problem = Problem::uniform(64, 1, 16, (4096, &[4096]));
        let small = plan(&problem, &caps());
        assert_eq!(small, plan(&problem, &caps()));
        assert_eq!(small.launches, 1);
        assert_eq!(small.shrink.grid, [8 * 4, 1, 1]);
        assert!(
            small.to_string().starts_with("1 x (shrink <<<32x1x1, 1, "),
            "{small}"
        );
        let many = plan(&Problem::uniform(9000, 3, 16, (4096, &[64; 5])), &caps());
        assert_eq!(many.launches, 2 * 2);
    }

    #[test]
    fn an_empty_problem_has_a_plan_of_nothing() {
        let empty = plan(&Problem::uniform(0, 0, 16, (4096, &[])), &caps());
        assert_eq!((empty.launches, empty.bytes.floor()), (0, 0));
    }
}
