//! The second half of a delta: rank vectors times B, folded into out.
//!
//! A block of 64 rows of B is widened and transposed once for all rows of a tile, so that a vector holds sixteen neighbouring outputs and each output
//! is summed over the rank in ascending order by fused multiply-add. Stopping at the true rank gives the bits of the padded rank: the
//! sum starts at +0 and a zero product never changes it.

use super::simd::{LANES, Simd};
use super::workspace::{Columns, EXPAND_COLS};
use half::bf16;
use std::array::from_fn;

/// Sums the partials of a row over k blocks, in order, and rounds to BF16.
///
/// `blocks` are the row's partials of each k block, as long as `xa`.
#[inline(always)]
pub(super) fn rank_vector<'a, S: Simd>(
    simd: S,
    mut blocks: impl Iterator<Item = &'a [f32]>,
    xa: &mut [f32],
) {
    let Some(first) = blocks.next() else {
        return;
    };
    xa.copy_from_slice(first);
    for block in blocks {
        for (sum, partial) in xa.iter_mut().zip(block) {
            *sum += partial;
        }
    }
    let (vectors, rest) = xa.as_chunks_mut::<LANES>();
    for values in vectors {
        *values = simd.store(simd.round(simd.load(values)));
    }
    if !rest.is_empty() {
        let mut values = [0.0; LANES];
        values[..rest.len()].copy_from_slice(rest);
        let rounded = simd.store(simd.round(simd.load(&values)));
        rest.copy_from_slice(&rounded[..rest.len()]);
    }
}

/// Up to 64 neighbouring rows of an adapter's B.
#[derive(Clone, Copy)]
pub(super) struct RowsOfB<'a> {
    /// Padded ranks are multiples of sixteen, so a row is whole granules.
    granules: &'a [[bf16; LANES]],
    /// Granules a row.
    stride: usize,
    rank: usize,
}

impl<'a> RowsOfB<'a> {
    /// All rows of `values`, `stride` apart.
    #[inline(always)]
    pub(super) fn new(values: &'a [bf16], stride: usize, rank: usize) -> Self {
        Self {
            granules: values.as_chunks().0,
            stride: stride / LANES,
            rank,
        }
    }

    /// Granule `granule` of rows `16 * v..`, transposed: element `r` holds its rank `r`. Rows past the last are zeros.
    #[inline(always)]
    fn columns<S: Simd>(&self, simd: S, v: usize, granule: usize) -> [S::V; LANES] {
        let first = v * LANES * self.stride + granule;
        let last = first + (LANES - 1) * self.stride;
        if let Some(rows) = self.granules.get(first..=last) {
            return simd.transpose(rows, self.stride);
        }
        let mut rows = [[bf16::ZERO; LANES]; LANES];
        let present = self.granules.iter().skip(first).step_by(self.stride);
        rows.iter_mut()
            .zip(present)
            .for_each(|(row, granule)| *row = *granule);
        simd.transpose(&rows, 1)
    }
}

/// Widens and transposes rows of B, for several rows of a tile. `block` gets whole granules: the columns up to the padded rank too.
#[inline(always)]
pub(super) fn transpose_block<S: Simd>(simd: S, b: RowsOfB<'_>, block: &mut [Columns]) {
    let (granules, _) = block.as_chunks_mut::<LANES>();
    let granules = &mut granules[..b.rank.div_ceil(LANES)];
    for v in 0..EXPAND_COLS / LANES {
        for (granule, ranks) in granules.iter_mut().enumerate() {
            let columns = b.columns(simd, v, granule);
            for r in 0..LANES {
                ranks[r][v] = simd.store(columns[r]);
            }
        }
    }
}

/// Adds the delta of the only row of a tile to its part of out: as [`fold_rows`], but what is transposed is used once and never stored.
#[inline(always)]
pub(super) fn fold_one_row<S: Simd>(
    simd: S,
    xa: &[f32],
    b: RowsOfB<'_>,
    scale: f32,
    out: &mut [bf16],
) {
    let scale = simd.splat(scale);
    for (v, out) in out.chunks_mut(LANES).enumerate() {
        let mut sum = simd.splat(0.0);
        let (whole, tail) = xa[..b.rank].as_chunks::<LANES>();
        for (granule, xa) in whole.iter().enumerate() {
            let columns = b.columns(simd, v, granule);
            for r in 0..LANES {
                sum = simd.fma(simd.splat(xa[r]), columns[r], sum);
            }
        }
        if !tail.is_empty() {
            let columns = b.columns(simd, v, whole.len());
            for (value, column) in tail.iter().zip(columns) {
                sum = simd.fma(simd.splat(*value), column, sum);
            }
        }
        fold(simd, scale, sum, out);
    }
}

/// A block of an adapter's B and the scale it is folded with.
#[derive(Clone, Copy)]
pub(super) struct BlockOfB<'a> {
    /// `[rank]`.
    pub(super) columns: &'a [Columns],
    pub(super) scale: f32,
}

/// Adds the delta of `M` rows to their parts of out, at most 64 columns each; `xa` are their rank vectors, as long as `b.columns`.
#[inline(always)]
pub(super) fn fold_rows<S: Simd, const M: usize>(
    simd: S,
    xa: [&[f32]; M],
    b: BlockOfB<'_>,
    mut out: [&mut [bf16]; M],
) {
    if M == 1 || S::WIDE {
        fold_columns::<S, M, 4>(simd, xa, b, 0, &mut out);
    } else {
        for v in 0..EXPAND_COLS / LANES {
            fold_columns::<S, M, 1>(simd, xa, b, v, &mut out);
        }
    }
}

/// The same for `NV` vectors of columns from vector `first` on.
#[inline(always)]
fn fold_columns<S: Simd, const M: usize, const NV: usize>(
    simd: S,
    xa: [&[f32]; M],
    b: BlockOfB<'_>,
    first: usize,
    out: &mut [&mut [bf16]; M],
) {
    let xa: [&[f32]; M] = from_fn(|m| &xa[m][..b.columns.len()]);
    let mut sums = [[simd.splat(0.0); NV]; M];
    for (r, columns) in b.columns.iter().enumerate() {
        let mut of_b = [simd.splat(0.0); NV];
        for v in 0..NV {
            of_b[v] = simd.load(&columns[first + v]);
        }
        for m in 0..M {
            let value = simd.splat(xa[m][r]);
            for v in 0..NV {
                sums[m][v] = simd.fma(value, of_b[v], sums[m][v]);
            }
        }
    }
    let scale = simd.splat(b.scale);
    for m in 0..M {
        for (v, sum) in sums[m].into_iter().enumerate() {
            let start = ((first + v) * LANES).min(out[m].len());
            fold(simd, scale, sum, &mut out[m][start..]);
        }
    }
}

/// `out = bf16(out + scale * bf16(sum))` for the first sixteen elements, or as many as there are.
#[inline(always)]
fn fold<S: Simd>(simd: S, scale: S::V, sum: S::V, out: &mut [bf16]) {
    let delta = simd.round(sum);
    if let Some(whole) = out.first_chunk_mut::<LANES>() {
        let folded = simd.fma(scale, delta, simd.widen(whole));
        *whole = simd.narrow(simd.round(folded));
    } else if !out.is_empty() {
        let mut base = [bf16::ZERO; LANES];
        base[..out.len()].copy_from_slice(out);
        let folded = simd.fma(scale, delta, simd.widen(&base));
        out.copy_from_slice(&simd.narrow(simd.round(folded))[..out.len()]);
    }
}
