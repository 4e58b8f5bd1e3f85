//! A checked delta as tasks: (rows, k block) pairs to shrink, then column ranges to expand.
//!
//! Tasks of the first half write disjoint partials. A task of the second half owns its columns of out for **all** rows, so that no two
//! threads write one element whatever the permutation says.

use super::expand::{BlockOfB, RowsOfB, fold_one_row, fold_rows, rank_vector, transpose_block};
use super::memory::Span;
use super::pool::Job;
use super::shrink::{BlockOfA, shrink_rows, widen_row};
use super::simd::Simd;
use super::workspace::{BLOCK_CHUNKS, EXPAND_COLS, SHRINK_ROWS, Workspace};
use crate::{BLOCK_K, LARGE_TILE_ROWS};
use half::bf16;
use std::array::from_fn;
use std::ops::Range;

/// Column ranges a thread: enough that threads end together, few enough that a range is worth its start.
const RANGES_A_THREAD: usize = 4;

/// A position of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) out_row: usize,
    pub(super) x_row: usize,
}

impl Position {
    /// Where these columns of its row of out are.
    #[inline(always)]
    fn columns(&self, site: &SiteJob, columns: &Range<usize>) -> Range<usize> {
        let start = self.out_row * site.out_stride;
        start + columns.start..start + columns.end
    }
}

/// Consecutive positions that share an adapter.
#[derive(Debug, Clone)]
pub(super) struct TileJob {
    /// First position, counted from the pass's first.
    pub(super) first: usize,
    /// Its positions in [`Delta::positions`].
    pub(super) positions: Range<usize>,
}

/// An adapter at one site.
#[derive(Debug, Clone, Copy)]
pub(super) struct Adapter {
    /// `[rank, k_in]` and maybe more.
    pub(super) a: Span<bf16>,
    /// `[n_out, b_stride]`.
    pub(super) b: Span<bf16>,
    pub(super) b_stride: usize,
    pub(super) rank: usize,
    pub(super) scale: f32,
}

/// One site.
#[derive(Debug)]
pub(super) struct SiteJob {
    pub(super) out: Span<bf16>,
    pub(super) out_stride: usize,
    pub(super) n_out: usize,
    pub(super) max_rank: usize,
    /// `[k_blocks][positions][max_rank]`.
    pub(super) partials: Span<f32>,
    /// One for each tile.
    pub(super) adapters: Vec<Option<Adapter>>,
}

/// A delta whose every address has been checked, and whose writes have been checked to meet nothing that is read at the same time.
#[derive(Debug)]
pub(super) struct Delta {
    pub(super) x: Span<bf16>,
    pub(super) x_stride: usize,
    pub(super) k_in: usize,
    pub(super) k_blocks: usize,
    /// Positions that each k block of the partials has room for.
    pub(super) room: usize,
    pub(super) positions: Vec<Position>,
    pub(super) tiles: Vec<TileJob>,
    pub(super) sites: Vec<SiteJob>,
}

/// Tasks of a checked delta, in the instructions of `S`.
pub(super) struct DeltaJob<S> {
    simd: S,
    delta: Delta,
    /// (tile, rows of the tile) of each shrink task.
    parts: Vec<(usize, Range<usize>)>,
    /// (site, columns) of each expand task.
    ranges: Vec<(usize, Range<usize>)>,
}

impl<S: Simd> DeltaJob<S> {
    pub(super) fn new(simd: S, delta: Delta, threads: usize) -> Self {
        let adapted = |tile: usize| delta.sites.iter().any(|site| site.adapters[tile].is_some());
        let tiles = delta
            .tiles
            .iter()
            .enumerate()
            .filter(|&(tile, _)| adapted(tile));
        let parts = tiles.flat_map(|(tile, job)| {
            let rows = job.positions.len();
            let starts = (0..rows).step_by(SHRINK_ROWS);
            starts.map(move |at| (tile, at..rows.min(at + SHRINK_ROWS)))
        });
        let widths: Vec<u32> = delta.sites.iter().map(|site| site.n_out as u32).collect();
        let step = range_columns(&widths, threads);
        let ranges = delta.sites.iter().enumerate().flat_map(|(index, site)| {
            let starts = (0..site.n_out).step_by(step);
            starts.map(move |at| (index, at..site.n_out.min(at + step)))
        });
        Self {
            simd,
            parts: parts.collect(),
            ranges: ranges.collect(),
            delta,
        }
    }
}

/// Columns of an expand task.
fn range_columns(widths: &[u32], threads: usize) -> usize {
    let columns: usize = widths.iter().map(|&width| width as usize).sum();
    columns
        .div_ceil(threads * RANGES_A_THREAD)
        .next_multiple_of(EXPAND_COLS)
        .max(EXPAND_COLS)
}

/// Shrink tasks of each k block for groups of these many rows.
pub(crate) fn shrink_tasks(groups: &[u32]) -> u64 {
    let parts = |&rows: &u32| u64::from(rows.div_ceil(SHRINK_ROWS as u32));
    groups.iter().map(parts).sum()
}

/// Expand tasks of a pass over sites of these widths.
pub(crate) fn expand_tasks(widths: &[u32], threads: usize) -> usize {
    let step = range_columns(widths, threads.max(1));
    widths
        .iter()
        .map(|&width| (width as usize).div_ceil(step))
        .sum()
}

impl<S: Simd> Job for DeltaJob<S> {
    fn tasks(&self) -> [usize; 2] {
        [self.parts.len() * self.delta.k_blocks, self.ranges.len()]
    }

    fn run(&self, phase: usize, task: usize, workspace: &mut Workspace) {
        let k_blocks = self.delta.k_blocks;
        self.simd.vectorize(
            #[inline(always)]
            || match phase {
                0 => {
                    let (tile, rows) = &self.parts[task / k_blocks];
                    self.delta
                        .shrink(self.simd, *tile, rows.clone(), task % k_blocks, workspace);
                }
                _ => {
                    let (site, columns) = &self.ranges[task];
                    self.delta
                        .expand(self.simd, *site, columns.clone(), workspace);
                }
            },
        );
    }
}

impl Delta {
    /// Multiplications of both halves.
    pub(super) fn products(&self) -> u64 {
        let of_site = |site: &SiteJob| -> u64 {
            let adapters = self.tiles.iter().zip(&site.adapters);
            let ranks = adapters.filter_map(|(tile, adapter)| {
                let adapter = adapter.as_ref()?;
                Some((tile.positions.len() * adapter.rank) as u64)
            });
            ranks.sum::<u64>() * (self.k_in + site.n_out) as u64
        };
        self.sites.iter().map(of_site).sum()
    }

    /// Partials of k block `block` at position `first` of the pass, for `count` positions.
    fn partial_range(
        &self,
        site: &SiteJob,
        block: usize,
        first: usize,
        count: usize,
    ) -> Range<usize> {
        let start = (block * self.room + first) * site.max_rank;
        start..start + count * site.max_rank
    }

    #[inline(always)]
    fn shrink<S: Simd>(
        &self,
        simd: S,
        tile: usize,
        rows: Range<usize>,
        block: usize,
        workspace: &mut Workspace,
    ) {
        let first = block * BLOCK_K as usize;
        let len = (self.k_in - first).min(BLOCK_K as usize);
        let job = &self.tiles[tile];
        let positions = &self.positions[job.positions.clone()][rows.clone()];
        for (position, chunks) in positions.iter().zip(workspace.x.chunks_mut(BLOCK_CHUNKS)) {
            let start = position.x_row * self.x_stride + first;
            // SAFETY: the launch holds the arena until all tasks are done; no task of this half writes x (`Delta`).
            let row = unsafe { self.x.read(start..start + len) };
            widen_row(simd, row, chunks);
        }
        for site in &self.sites {
            let Some(adapter) = site.adapters[tile] else {
                continue;
            };
            let at = self.partial_range(site, block, job.first + rows.start, rows.len());
            // SAFETY: the arena is held; positions of tiles are disjoint, so no other task has these partials, and nothing reads them in this half.
            let partials = unsafe { site.partials.write(at) };
            let block = BlockOfA {
                // SAFETY: the arena is held; no task of this half writes A.
                a: unsafe { adapter.a.read(0..adapter.rank * self.k_in) },
                k_in: self.k_in,
                rank: adapter.rank,
                first,
                len,
            };
            shrink_rows(
                simd,
                &workspace.x,
                rows.len(),
                block,
                (partials, site.max_rank),
            );
        }
    }

    #[inline(always)]
    fn expand<S: Simd>(
        &self,
        simd: S,
        site: usize,
        columns: Range<usize>,
        workspace: &mut Workspace,
    ) {
        let site = &self.sites[site];
        for (tile, adapter) in self.tiles.iter().zip(&site.adapters) {
            let Some(adapter) = adapter else {
                continue;
            };
            self.rank_vectors(simd, site, tile, adapter.rank, &mut workspace.xa);
            for start in columns.clone().step_by(EXPAND_COLS) {
                let width = EXPAND_COLS.min(columns.end - start);
                let from = start * adapter.b_stride;
                // SAFETY: the arena is held; no task of this half writes B.
                let rows_of_b = unsafe { adapter.b.read(from..from + width * adapter.b_stride) };
                let rows_of_b = RowsOfB::new(rows_of_b, adapter.b_stride, adapter.rank);
                let columns = start..start + width;
                if let [position] = self.positions[tile.positions.clone()] {
                    let at = position.columns(site, &columns);
                    // SAFETY: the arena is held; these columns are this task's alone.
                    let out = unsafe { site.out.write(at) };
                    fold_one_row(simd, &workspace.xa, rows_of_b, adapter.scale, out);
                    continue;
                }
                transpose_block(simd, rows_of_b, &mut workspace.b);
                let block = BlockOfB {
                    columns: &workspace.b[..adapter.rank],
                    scale: adapter.scale,
                };
                self.fold_tile(simd, (site, tile), &workspace.xa, block, columns);
            }
        }
    }

    /// The rank vectors of a tile's rows, `rank` apart, from the sums of all k blocks.
    #[inline(always)]
    fn rank_vectors<S: Simd>(
        &self,
        simd: S,
        site: &SiteJob,
        tile: &TileJob,
        rank: usize,
        xa: &mut [f32],
    ) {
        for (row, xa) in xa.chunks_mut(rank).take(tile.positions.len()).enumerate() {
            let blocks = (0..self.k_blocks).map(|block| {
                let start = self.partial_range(site, block, tile.first + row, 1).start;
                // SAFETY: the arena is held; partials were written in the first half, which is over, and nothing writes them in this one.
                unsafe { site.partials.read(start..start + rank) }
            });
            rank_vector(simd, blocks, xa);
        }
    }

    #[inline(always)]
    fn fold_tile<S: Simd>(
        &self,
        simd: S,
        (site, tile): (&SiteJob, &TileJob),
        xa: &[f32],
        block: BlockOfB<'_>,
        columns: Range<usize>,
    ) {
        const ROWS: usize = 4;
        let rank = block.columns.len();
        let positions = &self.positions[tile.positions.clone()];
        let xa_of = |row: usize| -> &[f32] { &xa[row * rank..][..rank] };
        let out_of = |row: usize| positions[row].columns(site, &columns);
        let mut row = 0;
        while row + ROWS <= positions.len() {
            let at: [Range<usize>; ROWS] = from_fn(|m| out_of(row + m));
            // SAFETY: the arena is held; these columns are this task's alone, and rows of one tile are distinct (`check`).
            let out: [&mut [bf16]; ROWS] = from_fn(|m| unsafe { site.out.write(at[m].clone()) });
            fold_rows::<S, ROWS>(simd, from_fn(|m| xa_of(row + m)), block, out);
            row += ROWS;
        }
        while row < positions.len() {
            // SAFETY: the arena is held; these columns of this row are this task's alone.
            let out = unsafe { site.out.write(out_of(row)) };
            fold_rows::<S, 1>(simd, [xa_of(row)], block, [out]);
            row += 1;
        }
    }
}

const _: () = assert!((LARGE_TILE_ROWS as usize).is_multiple_of(SHRINK_ROWS));
