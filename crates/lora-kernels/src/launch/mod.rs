//! Launchers: typed operands in, [`DeltaParams`] to the backend out.
//!
//! A launcher checks every operand before it enqueues anything, so a refused launch has written nothing. It allocates nothing, never
//! synchronizes, and is legal under graph capture.

mod options;
mod sites;
#[cfg(test)]
mod tests;

pub use options::{LaunchOptions, LoraKernels, SiteKind, Skip};
pub(crate) use sites::check_equal;
pub use sites::{PairSite, RouteSite};

use crate::{
    BLOCK_K, DeltaParams, DeltaSite, FLAG_SPREAD, KernelError, LARGE_TILE_ROWS, MAX_ROWS,
    MAX_SITES, MAX_WIDTH, MatRef, Operand, RowGroups, RowIndices, SMALL_TILE_ROWS, Scratch, Stream,
};
use bytemuck::Zeroable;
use sites::{Site, check_out};
use std::num::NonZeroU32;

const X: Operand = Operand::shared("x");

/// Where launches go: kernels, the engine's stream, and the scratch of that stream.
#[derive(Debug)]
pub struct LaunchContext<'a> {
    /// Backend and options.
    pub kernels: &'a LoraKernels,
    /// Queue that launches are enqueued on.
    pub stream: Stream,
    /// Partial sums. No other stream may use it at the same time, which the exclusive borrow keeps in mind.
    pub scratch: &'a mut Scratch,
}

/// What a launcher did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Applied {
    /// Deltas were enqueued.
    Launched {
        /// Calls of [`LoraBackend::delta`](crate::LoraBackend::delta): one for each [`MAX_SITES`] sites and each pass of rows.
        launches: u32,
    },
    /// There were no rows or no sites.
    Empty,
    /// A lever left them out.
    Skipped(Skip),
}

/// x of a routed launch, and which of its rows each row of out reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoutedX<'a> {
    x: MatRef<'a>,
    map: RowMap<'a>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RowMap<'a> {
    Same,
    Divide(NonZeroU32),
    List(RowIndices<'a>),
}

impl<'a> RoutedX<'a> {
    /// Row i of out reads row i of x: dense modules, and experts whose x is one row a slot.
    pub fn same_rows(x: MatRef<'a>) -> Self {
        let map = RowMap::Same;
        Self { x, map }
    }

    /// Row i of out reads row `i / outs_per_x` of x: unsorted MoE gate and up, `outs_per_x` = top-k.
    pub fn repeated(x: MatRef<'a>, outs_per_x: NonZeroU32) -> Self {
        let map = RowMap::Divide(outs_per_x);
        Self { x, map }
    }

    /// Row i of out reads row `rows[i]` of x: sorted MoE.
    pub fn gathered(x: MatRef<'a>, rows: RowIndices<'a>) -> Self {
        let map = RowMap::List(rows);
        Self { x, map }
    }

    /// Refuses an x that has not the rows that `rows` rows of out read.
    fn check(&self, rows: u32) -> Result<(), KernelError> {
        let (quantity, found) = match self.map {
            RowMap::Same => ("rows", self.x.rows()),
            RowMap::Divide(by) => (
                "rows times outs a row",
                self.x.rows().saturating_mul(by.get() as usize),
            ),
            RowMap::List(list) => ("row numbers", list.len()),
        };
        check_equal(X, quantity, found, (rows as usize, "the rows of out"))
    }
}

impl<'a> From<MatRef<'a>> for RoutedX<'a> {
    fn from(x: MatRef<'a>) -> Self {
        Self::same_rows(x)
    }
}

/// Adds `scale * (x @ A^T) @ B^T` of one adapter a site to every row of each site's out.
///
/// x is `[rows, k_in]` and shared by all sites (q, k and v; gate and up); out is `[rows, n_out]`, each with a row stride of its own. Up to [`MAX_SITES`]
/// sites go in one launch, more in several. Rounding is that of docs/numerics.md, and a row's bits do not depend on the other rows.
///
/// # Errors
/// [`KernelError::OutOfRange`] and [`KernelError::UnpaddedRank`] for sizes outside the limits ([`MAX_ROWS`], [`MAX_WIDTH`],
/// [`MAX_RANK`](crate::MAX_RANK)); [`KernelError::SizeMismatch`] between x, out and adapter; [`KernelError::Null`] and [`KernelError::Misaligned`]
/// for addresses; [`KernelError::Overlap`] of x and an out or of two outs; [`KernelError::ScratchTooSmall`]; what the backend gives.
pub fn apply_lora_delta(
    ctx: &mut LaunchContext<'_>,
    kind: SiteKind,
    x: MatRef<'_>,
    sites: &mut [PairSite<'_>],
) -> Result<Applied, KernelError> {
    let rows = row_count(x.rows())?;
    RoutedX::same_rows(x).check(rows)?;
    let tile_rows = if rows <= ctx.kernels.options().gemv_max_m {
        SMALL_TILE_ROWS
    } else {
        LARGE_TILE_ROWS
    };
    let common = DeltaParams {
        tile_rows,
        slots: 1,
        x_div: 1,
        max_tiles: rows.div_ceil(tile_rows),
        ..common_params(x, rows)
    };
    launch(ctx, kind, (x, common), sites)
}

/// Adds to every row of each site's out the delta of the adapter that the row's slot names.
///
/// `groups` says which rows share an adapter; it was built for tables as long as the routes', and for as many rows as out has. A row in no
/// group (negative slot, or one past the tables), and one whose slot does not adapt a site, keeps its bits there. x is a [`MatRef`] with a
/// row for each row of out, or a [`RoutedX`].
///
/// # Errors
/// As [`apply_lora_delta`], and [`KernelError::SizeMismatch`] where `groups` has other rows or other entries.
pub fn apply_lora_bgmv<'x>(
    ctx: &mut LaunchContext<'_>,
    kind: SiteKind,
    x: impl Into<RoutedX<'x>>,
    groups: &RowGroups,
    sites: &mut [RouteSite<'_>],
) -> Result<Applied, KernelError> {
    let routed = x.into();
    let rows = groups.rows();
    routed.check(rows)?;
    let entries = groups.spec().entries;
    for (index, site) in sites.iter().enumerate() {
        let operand = Operand::of_site("tables", index as u32);
        let (found, expected) = (site.route.slots as usize, entries as usize);
        check_equal(operand, "entries", found, (expected, "the row groups"))?;
    }
    let (x_rows, x_div) = match routed.map {
        RowMap::Same => (0, 1),
        RowMap::Divide(by) => (0, by.get()),
        RowMap::List(list) => (list.ptr().0, 1),
    };
    let common = DeltaParams {
        tiles: groups.tiles_ptr().0,
        tile_count: groups.tile_count_ptr().0,
        perm: groups.perm_ptr().0,
        tile_rows: groups.tile_rows(),
        slots: entries,
        x_rows,
        x_div,
        max_tiles: groups.current_max_tiles(),
        flags: if groups.spec().spread { FLAG_SPREAD } else { 0 },
        ..common_params(routed.x, rows)
    };
    launch(ctx, kind, (routed.x, common), sites)
}

fn row_count(rows: usize) -> Result<u32, KernelError> {
    KernelError::check_range(X, "rows", rows as u64, (0, MAX_ROWS.into()))?;
    Ok(rows as u32)
}

/// What pair and routed launches fill in alike.
fn common_params(x: MatRef<'_>, rows: u32) -> DeltaParams {
    let k_in = x.cols().min(u32::MAX as usize) as u32;
    DeltaParams {
        x: x.ptr().0,
        x_stride: x.row_stride() as u64,
        x_row_count: x.rows().min(u32::MAX as usize) as u32,
        rows,
        k_in,
        k_blocks: k_in.div_ceil(BLOCK_K),
        ..DeltaParams::zeroed()
    }
}

/// Checks all sites, then enqueues them, [`MAX_SITES`] and a pass of rows at a time.
fn launch<S: Site>(
    ctx: &mut LaunchContext<'_>,
    kind: SiteKind,
    (x, common): (MatRef<'_>, DeltaParams),
    sites: &mut [S],
) -> Result<Applied, KernelError> {
    if let Some(skip) = ctx.kernels.options().skips(kind) {
        return Ok(Applied::Skipped(skip));
    }
    check_sites(x, common.rows, sites)?;
    // The one place where an empty problem ends: launching no blocks is an error on a device.
    if common.rows == 0 || sites.is_empty() {
        return Ok(Applied::Empty);
    }
    for chunk in sites.chunks(MAX_SITES) {
        ctx.scratch
            .partition(common.rows, common.k_in, ranks(chunk).as_slice())?;
    }
    let mut launches = 0;
    for chunk in sites.chunks(MAX_SITES) {
        launches += launch_chunk(ctx, common, chunk)?;
    }
    Ok(Applied::Launched { launches })
}

/// Enqueues at most [`MAX_SITES`] checked sites, pass by pass, and says in how many launches.
fn launch_chunk<S: Site>(
    ctx: &mut LaunchContext<'_>,
    common: DeltaParams,
    sites: &[S],
) -> Result<u32, KernelError> {
    let partition = ctx
        .scratch
        .partition(common.rows, common.k_in, ranks(sites).as_slice())?;
    let mut params = DeltaParams {
        site_count: sites.len() as u32,
        ..common
    };
    for ((slot, site), partials) in params.sites.iter_mut().zip(sites).zip(partition.partials) {
        *slot = DeltaSite {
            partials: partials.0,
            ..site.to_params()
        };
    }
    let backend = ctx.kernels.backend();
    let mut pass_rows = partition.pass_rows;
    // A backend plans to answer, so it is asked only where the answer counts.
    if pass_rows < params.rows && !backend.uses_scratch(&params) {
        pass_rows = params.rows;
        params.sites.iter_mut().for_each(|site| site.partials = 0);
    }
    let mut launches = 0;
    for pass_first in (0..params.rows).step_by(pass_rows as usize) {
        params.pass_first = pass_first;
        params.pass_rows = pass_rows.min(params.rows - pass_first);
        backend.delta(ctx.stream, &params)?;
        launches += 1;
    }
    Ok(launches)
}

/// Padded ranks of at most [`MAX_SITES`] sites.
fn ranks<S: Site>(sites: &[S]) -> arrayvec::ArrayVec<u32, MAX_SITES> {
    sites.iter().map(|site| site.sizes().max_rank).collect()
}

fn check_sites<S: Site>(x: MatRef<'_>, rows: u32, sites: &[S]) -> Result<(), KernelError> {
    KernelError::check_range(X, "rows", x.rows() as u64, (0, MAX_ROWS.into()))?;
    KernelError::check_range(X, "columns", x.cols() as u64, (1, MAX_WIDTH.into()))?;
    for (index, site) in sites.iter().enumerate() {
        let position = index as u32;
        let sizes = site.sizes();
        site.check(position)?;
        let width = (sizes.k_in as usize, "the adapter's k_in");
        check_equal(X, "columns", x.cols(), width)?;
        check_out(site.out(), sizes, rows as usize, position)?;
        let out = Operand::of_site("out", position);
        if x.overlaps(site.out()) {
            return Err(KernelError::Overlap {
                first: X,
                second: out,
            });
        }
        for (earlier, other) in sites[..index].iter().enumerate() {
            if other.out().as_ref().overlaps(site.out()) {
                return Err(KernelError::Overlap {
                    first: Operand::of_site("out", earlier as u32),
                    second: out,
                });
            }
        }
    }
    Ok(())
}
