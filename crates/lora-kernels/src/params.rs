//! What kernels are given: `#[repr(C)]` values that the host backend and the CUDA kernels read alike. The layout is
//! asserted here and in `kernels/include/params.cuh`.

mod overlay;

pub use overlay::{GatherRowsParams, LogitsParams, OverlaySlot, ReplaceRowsParams, RowDiffParams};

use bytemuck::{Pod, Zeroable};

/// Sites that one launch can serve.
pub const MAX_SITES: usize = 4;

/// Rows of a small tile: the token side of one `m16n8k16` MMA.
pub const SMALL_TILE_ROWS: u32 = 8;

/// Most rows of a large tile.
pub const LARGE_TILE_ROWS: u32 = 128;

/// k in one chunk: eight MMA steps summed in order.
pub const CHUNK_K: u32 = 128;

/// k in one block: eight chunk sums added in order; block sums are added in order.
pub const BLOCK_K: u32 = 1024;

/// Ranks of B that a warp of an expand block holds at a time.
pub const RANKS_A_BLOCK: u32 = 64;

/// Threads of a shrink block: a warp for each chunk of a k block.
pub(crate) const SHRINK_THREADS: u32 = 256;

/// Asynchronous stages of a shrink block over large tiles: of a chunk each, or of half a chunk on a device with less shared memory.
pub(crate) const SHRINK_STAGES: u32 = 3;

/// Most ranks that such a block takes.
pub(crate) const SHRINK_SET_RANKS: u32 = 96;

/// Threads of a shrink block whose warpgroups multiply: half of them do, the others copy.
pub(crate) const WARPGROUP_SHRINK_THREADS: u32 = 512;

/// Chunks of k that such a block of up to 64 ranks has room for. With more, a multiprocessor would set more shared memory aside than for the expand kernel that
/// follows, and run dry in between.
pub(crate) const WARPGROUP_SHRINK_STAGES: u32 = 3;

/// The same, more ranks.
pub(crate) const WARPGROUP_SHRINK_WIDE_STAGES: u32 = 2;

/// Floats from one row's 16 ranks to the next where a shrink block's warps exchange chunk sums: free of bank conflicts in the MMA's
/// output layout.
pub(crate) const EXCHANGE_PITCH: u32 = 20;

/// Times 8 rows of x that a shrink block over spread rows has in flight. More would leave less of a multiprocessor's memory to A, which passes through its L1.
pub(crate) const STREAM_SLOTS: u32 = 2;

/// Blocks, each of a whole delta of a tile, that a multiprocessor runs at once.
pub(crate) const DELTA_BLOCKS: u32 = 2;

/// Blocks that share such a tile where they are a cluster.
pub(crate) const TILE_BLOCKS: u32 = 2;

/// The same of an x of 2049 to 4096 columns.
pub(crate) const WIDE_TILE_BLOCKS: u32 = 4;

/// Threads of a block that adds up k blocks.
pub(crate) const SUM_THREADS: u32 = 128;

/// Threads of an expand block.
pub(crate) const EXPAND_THREADS: u32 = 128;

/// Outputs that a warp of the expand kernel makes at a time.
pub(crate) const WARP_OUTPUTS: u32 = 64;

/// Base rows that a warp of an expand block over large tiles takes at a time.
pub(crate) const EXPAND_UNIT_ROWS: u32 = 16;

/// Times so many that it has room for, up to 16 ranks.
pub(crate) const EXPAND_AHEAD_16: u32 = 4;

/// The same, up to 64 ranks.
pub(crate) const EXPAND_AHEAD_64: u32 = 2;

/// Times 8 base rows that a thread of an expand block over spread rows has room for.
pub(crate) const SPREAD_AHEAD: u32 = 4;

/// Most threads of a block that groups rows, and most rows that one block groups.
pub(crate) const MAX_GROUP_THREADS: u32 = 1024;

/// Blocks of the cluster that groups more rows than that.
pub(crate) const GROUP_BLOCKS: u32 = 8;

/// Threads of each of them: half of a multiprocessor's registers are left to a block of the launch that waits for the grouping.
pub(crate) const GROUP_THREADS: u32 = 512;

/// Threads of a block of whole-row operations: a warp a row, or all of them.
pub(crate) const ROW_THREADS: u32 = 256;

/// Threads of a block that computes logits.
pub(crate) const HEAD_THREADS: u32 = 256;

/// Overlay rows that a block computes logits of at a time.
pub(crate) const HEAD_IDS: u32 = 128;

/// Hidden columns in one asynchronous stage of such a block.
pub(crate) const HEAD_STAGE_K: u32 = 64;

/// Hidden rows that a block takes at a time where a cluster shares the hidden size.
pub(crate) const HEAD_SPLIT_ROWS: u32 = 64;

/// Its asynchronous stages.
pub(crate) const HEAD_SPLIT_STAGES: u32 = 3;

/// The same on a device with less shared memory, and for rows that are not aligned.
pub(crate) const HEAD_LOW_STAGES: u32 = 2;

/// Overlay rows that a cluster takes at a time where there are few.
pub(crate) const HEAD_FEW_IDS: u32 = 32;

/// Times [`HEAD_STAGE_K`] hidden columns in one of its asynchronous stages.
pub(crate) const HEAD_FEW_TILES: u32 = 4;

/// Its asynchronous stages.
pub(crate) const HEAD_FEW_STAGES: u32 = 2;

/// Times [`HEAD_STAGE_K`] hidden columns in a stage where such a block has a multiprocessor to itself: a short sum waits for stages more than for its MMAs.
pub(crate) const HEAD_DEEP_TILES: u32 = 8;

/// Its asynchronous stages.
pub(crate) const HEAD_DEEP_STAGES: u32 = 2;

/// Overlay rows that a cluster of two blocks takes at a time.
pub(crate) const HEAD_PAIR_IDS: u32 = 64;

/// Times [`HEAD_STAGE_K`] hidden columns in one of its asynchronous stages.
pub(crate) const HEAD_PAIR_TILES: u32 = 4;

/// Its asynchronous stages.
pub(crate) const HEAD_PAIR_STAGES: u32 = 3;

/// Hidden rows that a block takes at a time where it has the whole hidden size.
pub(crate) const HEAD_WIDE_ROWS: u32 = 256;

/// Its asynchronous stages.
pub(crate) const HEAD_WIDE_STAGES: u32 = 2;

/// Threads of a block that keeps hidden rows while overlay rows pass: half of them copy, a quarter multiplies, a quarter stores logits.
pub(crate) const HEAD_KEPT_THREADS: u32 = 512;

/// Hidden rows that it keeps.
pub(crate) const HEAD_KEPT_ROWS: u32 = 64;

/// Times [`HEAD_STAGE_K`] columns of them that it has room for.
pub(crate) const HEAD_KEPT_ROW_TILES: u32 = 16;

/// Overlay rows that pass together.
pub(crate) const HEAD_KEPT_IDS: u32 = 32;

/// Times [`HEAD_STAGE_K`] of their columns in one of its asynchronous stages.
pub(crate) const HEAD_KEPT_TILES: u32 = 4;

/// Its asynchronous stages.
pub(crate) const HEAD_KEPT_STAGES: u32 = 4;

/// Flag of [`DeltaParams`] and [`LogitsParams`]: the launch just before this one on the stream did not write the tiles, the permutation or the x row map, so
/// that they may be read before it has finished. Backends set it themselves.
pub const FLAG_TILES_READY: u32 = 1;

/// Flag of [`DeltaParams`]: rows are spread over many entries, so that tiles are seldom full.
pub const FLAG_SPREAD: u32 = 2;

/// Flag of [`DeltaParams`] for the expand kernel: the shrink kernel has left the partial sums of large tiles to be added up. Backends set it themselves.
pub const FLAG_OPEN_SUMS: u32 = 4;

/// Flag of [`ReplaceRowsParams`]: rows are multiplied.
pub const FLAG_MULTIPLY: u32 = 1;

/// Flag of [`LogitsParams`]: logits are FP32, not BF16.
pub const FLAG_F32_LOGITS: u32 = 2;

/// Parts that the hidden size is cut into for logits; the sums of the parts are added in order.
pub const LOGIT_PARTS: u32 = 4;

/// Rows of a batch that share a table entry: positions `first..first + count` of the row permutation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Tile {
    /// Table entry (the slot for dense modules).
    pub entry: u32,
    /// First position in the permutation.
    pub first: u32,
    /// Positions, 1..=[`LARGE_TILE_ROWS`]. At most [`SMALL_TILE_ROWS`] in a small tile.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// One site of a delta launch. Routed where `a_table` is not 0, else the pair in `a`, `b`, `scale`, `rank`.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct DeltaSite {
    /// `u64[slots]` addresses of A; an entry of 0 has no delta here.
    pub a_table: u64,
    /// `u64[slots]` addresses of B.
    pub b_table: u64,
    /// `f32[slots]` scales.
    pub scale_table: u64,
    /// `u32[slots]` true ranks.
    pub rank_table: u64,
    /// Pair mode: A.
    pub a: u64,
    /// Pair mode: B.
    pub b: u64,
    /// BF16 out, `[rows, n_out]`.
    pub out: u64,
    /// Elements from one row of out to the next.
    pub out_stride: u64,
    /// Scratch of this site, [`site_scratch_bytes`] long: f32 partial sums `[k blocks][pass_rows + LARGE_TILE_ROWS][max_rank]`, then
    /// BF16 `x @ A^T` of large tiles `[pass_rows + LARGE_TILE_ROWS][max_rank]`; null where it has no room for the pass and the
    /// backend uses none.
    pub partials: u64,
    /// Pair mode: scale.
    pub scale: f32,
    /// Pair mode: true rank.
    pub rank: u32,
    /// Width of out.
    pub n_out: u32,
    /// Padded rank: rows of A, B's row stride in elements, a multiple of the granule.
    pub max_rank: u32,
}

/// A delta launch: shrink, then expand and fold, over every tile and site.
///
/// Position `p` of the permutation stands for out row `perm[p]` (`p` itself where `perm` is 0) and x row
/// `x_rows[out row]` (`out row / x_div` where `x_rows` is 0).
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct DeltaParams {
    /// BF16 x, rows of `k_in`.
    pub x: u64,
    /// Elements from one row of x to the next.
    pub x_stride: u64,
    /// [`Tile`] list; 0 = tiles of `tile_rows` consecutive rows, entry 0 (pair mode).
    pub tiles: u64,
    /// u32: tiles in the list. Not read where `tiles` is 0.
    pub tile_count: u64,
    /// u32 permutation; 0 = identity.
    pub perm: u64,
    /// u32 map from out row to x row; 0 = divide by `x_div`.
    pub x_rows: u64,
    /// Rows of out (and positions at most).
    pub rows: u32,
    /// Rows of x.
    pub x_row_count: u32,
    /// Width of x.
    pub k_in: u32,
    /// `ceil(k_in / BLOCK_K)`.
    pub k_blocks: u32,
    /// Out rows a row of x; 1 for dense modules, top-k for unsorted MoE gate and up.
    pub x_div: u32,
    /// Most rows of a tile: [`SMALL_TILE_ROWS`] (every tile is small) or [`LARGE_TILE_ROWS`] (both kinds occur). Where `tiles`
    /// is 0, every tile but the last has exactly this many.
    pub tile_rows: u32,
    /// Entries of the tables; a tile at or past it does nothing.
    pub slots: u32,
    /// Sites in use.
    pub site_count: u32,
    /// First position of this pass: tiles whose `first` is outside `pass_first..pass_first + pass_rows` do nothing.
    pub pass_first: u32,
    /// Positions of this pass.
    pub pass_rows: u32,
    /// Tiles at most (grid size); the list may hold fewer. Where `tiles` is 0, the tiles there are.
    pub max_tiles: u32,
    /// [`FLAG_TILES_READY`], [`FLAG_SPREAD`], [`FLAG_OPEN_SUMS`].
    pub flags: u32,
    /// The sites.
    pub sites: [DeltaSite; MAX_SITES],
}

/// Grouping of rows by table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct GroupParams {
    /// `i32[rows]`: entry of each row; negative, or at or past `slots`: in no tile. Not read where [`EntryParams`] say the entries.
    pub seq_slot: u64,
    /// u32 out: tiles written.
    pub tile_count: u64,
    /// [`Tile`] list out: ascending entry, then ascending position.
    pub tiles: u64,
    /// u32 permutation out: rows of entry 0 in ascending order, then of entry 1, ...
    pub perm: u64,
    /// Rows.
    pub rows: u32,
    /// Entries.
    pub slots: u32,
    /// Largest group cut into small tiles; larger ones are cut into large tiles.
    pub small_max: u32,
    /// Room in the tile list.
    pub max_tiles: u32,
}

/// Which table entry each row of a MoE block takes, beside the [`GroupParams`] of its grouping: `resident of its token's adapter slot * num_experts + its expert`.
///
/// Unsorted rows (`experts` is not 0): row i is token `i / top_k`, its expert `experts[i]`. Sorted rows: row i is token `tokens[i]`, its
/// expert the one whose bounds hold i. A token, slot, resident or expert that is negative or past its limit puts the row in no tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct EntryParams {
    /// `i32[token_count]`: adapter slot of each token.
    pub adapters: u64,
    /// `i32[slots]`: which resident adapter of the tables a slot is.
    pub resident_of_slot: u64,
    /// `i32[rows]`: expert of each row; 0 = rows are sorted by expert.
    pub experts: u64,
    /// `u32[num_experts + 1]`: first row of each expert, and one past the last; not decreasing. Not read where `experts` is not 0.
    pub offsets: u64,
    /// `u32[rows]`: token of each row. Not read where `experts` is not 0.
    pub tokens: u64,
    /// Tokens.
    pub token_count: u32,
    /// Rows a token, where they are unsorted; at least 1.
    pub top_k: u32,
    /// Experts of the block.
    pub num_experts: u32,
    /// Slots of the pool.
    pub slots: u32,
    /// Adapters that the tables have room for.
    pub residents: u32,
    /// Zero.
    pub reserved: u32,
}

/// Bytes of scratch that one site of a launch takes: a multiple of 256.
///
/// `k_in` is the width of x, `pass_rows` the positions of a pass, `max_rank` the padded rank.
pub const fn site_scratch_bytes(k_in: u64, pass_rows: u64, max_rank: u64) -> u64 {
    let room = pass_rows + LARGE_TILE_ROWS as u64;
    let bytes_a_rank = k_in.div_ceil(BLOCK_K as u64) * 4 + 2;
    (room * max_rank * bytes_a_rank).next_multiple_of(256)
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<Tile>() == 16);
    assert!(size_of::<DeltaSite>() == 88);
    assert!(offset_of!(DeltaSite, a) == 32);
    assert!(offset_of!(DeltaSite, partials) == 64);
    assert!(offset_of!(DeltaSite, scale) == 72);
    assert!(offset_of!(DeltaSite, max_rank) == 84);
    assert!(size_of::<DeltaParams>() == 96 + 88 * MAX_SITES);
    assert!(offset_of!(DeltaParams, x_rows) == 40);
    assert!(offset_of!(DeltaParams, rows) == 48);
    assert!(offset_of!(DeltaParams, pass_first) == 80);
    assert!(offset_of!(DeltaParams, sites) == 96);
    assert!(size_of::<GroupParams>() == 48);
    assert!(size_of::<EntryParams>() == 64);
    assert!(offset_of!(EntryParams, token_count) == 40);
};
