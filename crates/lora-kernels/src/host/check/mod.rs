//! Everything a launch names is checked here, once, before any of it runs: what comes out can be executed by safe arithmetic over checked spans.

mod adapters;
mod rows;
#[cfg(test)]
mod tests;

use super::job::Delta;
use super::memory::Arena;
use crate::strided::Strided;
use crate::{
    BLOCK_K, DeltaParams, KernelError, LARGE_TILE_ROWS, MAX_RANK, MAX_SITES, MAX_WIDTH, Operand,
    SMALL_TILE_ROWS,
};
use adapters::check_site;
use half::bf16;
use lora_weights::RANK_GRANULE;
pub(super) use rows::route;

/// Bytes of a BF16 element.
const BF16: u64 = size_of::<bf16>() as u64;

/// Checks `params` against the arena. `None` where there is nothing to do.
pub(super) fn check_delta(
    arena: &Arena,
    params: &DeltaParams,
) -> Result<Option<Delta>, KernelError> {
    check_sizes(params)?;
    if params.rows == 0 || params.site_count == 0 || params.pass_rows == 0 {
        return Ok(None);
    }
    let (routed, positions) = route(arena, params)?;
    let x_operand = Operand::shared("x");
    let x_elements = strided_elements(params.x_row_count, params.x_stride, params.k_in);
    let room = params.pass_rows as usize + LARGE_TILE_ROWS as usize;
    let sites = &params.sites[..params.site_count as usize];
    let delta = Delta {
        x: arena.span(x_operand, params.x, x_elements)?,
        x_stride: params.x_stride as usize,
        k_in: params.k_in as usize,
        k_blocks: params.k_blocks as usize,
        room,
        sites: sites
            .iter()
            .zip(0..)
            .map(|(site, index)| check_site(arena, params, (site, index), &routed))
            .collect::<Result<_, _>>()?,
        tiles: routed.into_iter().map(|tile| tile.job).collect(),
        positions,
    };
    check_overlaps(params, &delta)?;
    Ok(Some(delta))
}

/// Elements from the first to one past the last of a strided matrix; saturating, so that no allocation holds what does not fit.
pub(super) fn strided_elements(rows: u32, stride: u64, cols: u32) -> u64 {
    match rows {
        0 => 0,
        rows => u64::from(rows - 1)
            .saturating_mul(stride)
            .saturating_add(cols.into()),
    }
}

fn check_sizes(params: &DeltaParams) -> Result<(), KernelError> {
    let shared = Operand::shared;
    let range = KernelError::check_range;
    let width = (1, u64::from(MAX_WIDTH));
    range(
        shared("launch"),
        "sites",
        params.site_count.into(),
        (0, MAX_SITES as u64),
    )?;
    range(shared("x"), "k_in", params.k_in.into(), width)?;
    let blocks = u64::from(params.k_in.div_ceil(BLOCK_K));
    range(
        shared("x"),
        "k blocks",
        params.k_blocks.into(),
        (blocks, blocks),
    )?;
    check_stride(
        shared("x"),
        params.x_stride,
        params.k_in,
        params.x_row_count,
    )?;
    if params.x_rows == 0 {
        range(
            shared("x"),
            "outs a row",
            params.x_div.into(),
            (1, u32::MAX.into()),
        )?;
    }
    let tile_rows = (SMALL_TILE_ROWS.into(), LARGE_TILE_ROWS.into());
    range(shared("tiles"), "rows", params.tile_rows.into(), tile_rows)?;
    for (site, index) in params.sites.iter().zip(0..params.site_count) {
        let of = |name| Operand::of_site(name, index);
        range(of("out"), "n_out", site.n_out.into(), width)?;
        range(
            of("A"),
            "padded rank",
            site.max_rank.into(),
            (1, MAX_RANK.into()),
        )?;
        if !site.max_rank.is_multiple_of(RANK_GRANULE) {
            return Err(KernelError::UnpaddedRank {
                operand: of("A"),
                max_rank: site.max_rank,
                granule: RANK_GRANULE,
            });
        }
        check_stride(of("out"), site.out_stride, site.n_out, params.rows)?;
    }
    Ok(())
}

fn check_stride(operand: Operand, stride: u64, cols: u32, rows: u32) -> Result<(), KernelError> {
    if rows > 1 && stride < u64::from(cols) {
        return Err(KernelError::StrideTooSmall {
            operand,
            stride,
            cols: cols.into(),
        });
    }
    Ok(())
}

/// Refuses a launch that would write what it reads: outs and partials must meet neither each other nor x, A or B.
fn check_overlaps(params: &DeltaParams, delta: &Delta) -> Result<(), KernelError> {
    let x = Strided {
        base: params.x,
        rows: params.x_row_count.into(),
        width: u64::from(params.k_in) * BF16,
        stride: params.x_stride.saturating_mul(BF16),
    };
    let mut written: Vec<(Operand, Strided)> = Vec::with_capacity(2 * MAX_SITES);
    for ((site, job), index) in params.sites.iter().zip(&delta.sites).zip(0..) {
        let out = Strided {
            base: site.out,
            rows: params.rows.into(),
            width: u64::from(site.n_out) * BF16,
            stride: site.out_stride.saturating_mul(BF16),
        };
        let partials = Strided::contiguous(site.partials, job.partials.bytes());
        for new in [
            (Operand::of_site("out", index), out),
            (Operand::of_site("partials", index), partials),
        ] {
            refuse_overlap(&written, new)?;
            written.push(new);
        }
    }
    refuse_overlap(&written, (Operand::shared("x"), x))?;
    for (job, index) in delta.sites.iter().zip(0..) {
        for adapter in job.adapters.iter().flatten() {
            for (name, span) in [("A", adapter.a), ("B", adapter.b)] {
                let read = Strided::contiguous(span.address(), span.bytes());
                refuse_overlap(&written, (Operand::of_site(name, index), read))?;
            }
        }
    }
    Ok(())
}

pub(super) fn refuse_overlap(
    written: &[(Operand, Strided)],
    (operand, view): (Operand, Strided),
) -> Result<(), KernelError> {
    match written.iter().find(|(_, other)| other.overlaps(&view)) {
        Some(&(first, _)) => Err(KernelError::Overlap {
            first,
            second: operand,
        }),
        None => Ok(()),
    }
}

pub(super) fn bad_index(operand: Operand, index: u64, value: u64, limit: u64) -> KernelError {
    KernelError::BadIndex {
        operand,
        index,
        value,
        limit,
    }
}
