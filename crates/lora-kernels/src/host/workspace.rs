//! What a thread works in, kept from task to task.

use super::simd::LANES;
use crate::{BLOCK_K, LARGE_TILE_ROWS, MAX_RANK};

/// Rows that one shrink task takes: enough to read A from cache for several rows, few enough that their x stays there.
pub(super) const SHRINK_ROWS: usize = 8;

/// Columns of out that the expand half does at a time: as many B rows are transposed at once.
pub(super) const EXPAND_COLS: usize = 4 * LANES;

/// 32 values of x as FP32: those with even numbers, then those with odd ones, as [`widen_pairs`](super::simd::Simd::widen_pairs) gives them.
pub(super) type Chunk = [[f32; LANES]; 2];

/// Chunks of a k block.
pub(super) const BLOCK_CHUNKS: usize = BLOCK_K as usize / (2 * LANES);

/// 64 columns of one rank: a row of the transposed B block.
pub(super) type Columns = [[f32; LANES]; EXPAND_COLS / LANES];

/// A thread's working memory. Its contents mean nothing between tasks.
pub(super) struct Workspace {
    /// `[SHRINK_ROWS][BLOCK_CHUNKS]`: a k block of x.
    pub(super) x: Vec<Chunk>,
    /// `[LARGE_TILE_ROWS][MAX_RANK]`: rank vectors of a tile, BF16 values.
    pub(super) xa: Vec<f32>,
    /// `[MAX_RANK]`: a block of B, transposed.
    pub(super) b: Vec<Columns>,
}

impl Default for Workspace {
    fn default() -> Self {
        Self {
            x: vec![Chunk::default(); SHRINK_ROWS * BLOCK_CHUNKS],
            xa: vec![0.0; LARGE_TILE_ROWS as usize * MAX_RANK as usize],
            b: vec![Columns::default(); MAX_RANK as usize],
        }
    }
}

/// Bytes of a [`Workspace`] that a launch of padded rank `max_rank` uses.
pub(crate) fn workspace_bytes(max_rank: u32) -> usize {
    let x = SHRINK_ROWS * BLOCK_CHUNKS * size_of::<Chunk>();
    let rank = max_rank as usize;
    let xa = LARGE_TILE_ROWS as usize * rank * size_of::<f32>();
    x + xa + rank * size_of::<Columns>()
}
