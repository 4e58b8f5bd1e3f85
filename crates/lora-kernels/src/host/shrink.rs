//! The first half of a delta: partial sums of x times A, one for each row, rank and k block.
//!
//! The order of summation within a block of 1024 k is fixed: sixteen lanes, lane `l` taking k = 32 j + 2 l and then 32 j + 2 l + 1 for j = 0, 1, ...
//! by fused multiply-add, then the lanes in halves. A row's sum therefore does not depend on which rows or ranks are computed beside it:
//! the register blocks below differ in what they share, not in what they add. A tail shorter than 32 is padded with zeros, which add
//! nothing.

use super::simd::{PAIRS, Simd};
use super::workspace::{BLOCK_CHUNKS, Chunk};
use half::bf16;
use std::array::from_fn;

/// Fills `chunks` with a row's k block as FP32, zeros behind it.
#[inline(always)]
pub(super) fn widen_row<S: Simd>(simd: S, row: &[bf16], chunks: &mut [Chunk]) {
    let (whole, tail) = row.as_chunks::<PAIRS>();
    for (chunk, values) in chunks.iter_mut().zip(whole) {
        let [even, odd] = simd.widen_pairs(values);
        *chunk = [simd.store(even), simd.store(odd)];
    }
    if !tail.is_empty() {
        let [even, odd] = simd.widen_pairs(&padded(tail));
        chunks[whole.len()] = [simd.store(even), simd.store(odd)];
    }
}

/// A of one adapter, and the k block to take of it.
#[derive(Clone, Copy)]
pub(super) struct BlockOfA<'a> {
    /// `[rank, k_in]`.
    pub(super) a: &'a [bf16],
    pub(super) k_in: usize,
    pub(super) rank: usize,
    /// First k of the block.
    pub(super) first: usize,
    /// k in the block, at most 1024.
    pub(super) len: usize,
}

impl<'a> BlockOfA<'a> {
    #[inline(always)]
    fn row(&self, r: usize) -> &'a [bf16] {
        &self.a[r * self.k_in + self.first..][..self.len]
    }
}

/// Partial sums of `rows` rows of x, widened in `x` at [`BLOCK_CHUNKS`] a row, into rows of `partials` that are `stride` apart.
#[inline(always)]
pub(super) fn shrink_rows<S: Simd>(
    simd: S,
    x: &[Chunk],
    rows: usize,
    a: BlockOfA<'_>,
    (partials, stride): (&mut [f32], usize),
) {
    let row_of_x = |i: usize| -> &[Chunk] { &x[i * BLOCK_CHUNKS..][..BLOCK_CHUNKS] };
    let mut i = 0;
    while i + 4 <= rows {
        let x4: [&[Chunk]; 4] = from_fn(|m| row_of_x(i + m));
        if S::WIDE {
            shrink_block::<S, 4, 4>(simd, x4, a, (&mut partials[i * stride..], stride));
        } else {
            shrink_block::<S, 4, 1>(simd, x4, a, (&mut partials[i * stride..], stride));
        }
        i += 4;
    }
    while i < rows {
        let x1 = [row_of_x(i)];
        if S::WIDE {
            shrink_block::<S, 1, 8>(simd, x1, a, (&mut partials[i * stride..], stride));
        } else {
            shrink_block::<S, 1, 4>(simd, x1, a, (&mut partials[i * stride..], stride));
        }
        i += 1;
    }
}

/// All ranks of `M` rows, `N` at a time.
#[inline(always)]
fn shrink_block<S: Simd, const M: usize, const N: usize>(
    simd: S,
    x: [&[Chunk]; M],
    a: BlockOfA<'_>,
    (partials, stride): (&mut [f32], usize),
) {
    let mut r = 0;
    while r + N <= a.rank {
        let sums = dots::<S, M, N>(simd, x, from_fn(|n| a.row(r + n)));
        for m in 0..M {
            partials[m * stride + r..][..N].copy_from_slice(&sums[m]);
        }
        r += N;
    }
    while r < a.rank {
        let sums = dots::<S, M, 1>(simd, x, [a.row(r)]);
        for m in 0..M {
            partials[m * stride + r] = sums[m][0];
        }
        r += 1;
    }
}

/// The block sums of `M` rows of x with `N` rows of A.
#[inline(always)]
fn dots<S: Simd, const M: usize, const N: usize>(
    simd: S,
    x: [&[Chunk]; M],
    a: [&[bf16]; N],
) -> [[f32; N]; M] {
    let (whole, tail) = (a[0].len() / PAIRS, a[0].len() % PAIRS);
    let a_whole: [&[[bf16; PAIRS]]; N] = from_fn(|n| &a[n].as_chunks::<PAIRS>().0[..whole]);
    let x_whole: [&[Chunk]; M] = from_fn(|m| &x[m][..whole]);
    let mut sums = [[simd.splat(0.0); N]; M];
    for c in 0..whole {
        add_chunk(
            simd,
            &mut sums,
            from_fn(|m| &x_whole[m][c]),
            from_fn(|n| &a_whole[n][c]),
        );
    }
    if tail > 0 {
        let padded: [[bf16; PAIRS]; N] = from_fn(|n| padded(&a[n][whole * PAIRS..]));
        add_chunk(
            simd,
            &mut sums,
            from_fn(|m| &x[m][whole]),
            padded.each_ref(),
        );
    }
    let mut totals = [[0.0; N]; M];
    for m in 0..M {
        for n in 0..N {
            totals[m][n] = simd.sum(sums[m][n]);
        }
    }
    totals
}

/// Adds 32 products to each of `M` x `N` sums.
#[inline(always)]
fn add_chunk<S: Simd, const M: usize, const N: usize>(
    simd: S,
    sums: &mut [[S::V; N]; M],
    x: [&Chunk; M],
    a: [&[bf16; PAIRS]; N],
) {
    let mut wide = [[simd.splat(0.0); 2]; N];
    for n in 0..N {
        wide[n] = simd.widen_pairs(a[n]);
    }
    for half in 0..2 {
        for m in 0..M {
            let values = simd.load(&x[m][half]);
            for n in 0..N {
                sums[m][n] = simd.fma(values, wide[n][half], sums[m][n]);
            }
        }
    }
}

#[inline(always)]
fn padded(tail: &[bf16]) -> [bf16; PAIRS] {
    let mut values = [bf16::ZERO; PAIRS];
    values[..tail.len()].copy_from_slice(tail);
    values
}
