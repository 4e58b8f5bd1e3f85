//! What the kernels of token overlays are given.

use bytemuck::{Pod, Zeroable};

/// The overlay of one slot, as an [`OverlayTable`](crate::overlay::OverlayTable) has it: one record a slot, so that a swap is one small write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OverlaySlot {
    /// BF16 rows `[n_override, hidden]`, contiguous, 16-byte aligned; 0 = the slot has no overlay.
    pub rows: u64,
    /// `u32[n_override]`: the token id of each row, ascending and unique; 0 = the overlay does not serve the LM head.
    pub ids: u64,
    /// `i32[vocab]`: the row of each token id, -1 = not overridden; 0 = the overlay does not serve the embedding.
    pub slot_map: u64,
    /// Rows; 0 = the slot has no overlay.
    pub n_override: u32,
    /// Zero.
    pub reserved: u32,
}

impl OverlaySlot {
    /// The record of a slot without an overlay.
    pub const NONE: Self = Self {
        rows: 0,
        ids: 0,
        slot_map: 0,
        n_override: 0,
        reserved: 0,
    };
}

/// Row by row distance of two BF16 tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RowDiffParams {
    /// BF16 rows of `cols`.
    pub a: u64,
    /// BF16 rows of `cols`.
    pub b: u64,
    /// Elements from one row of `a` to the next.
    pub a_stride: u64,
    /// Elements from one row of `b` to the next.
    pub b_stride: u64,
    /// `f32[rows]` out: largest absolute difference of the row's elements. Elements of equal bits do not differ; otherwise a NaN on either
    /// side makes the row's distance infinite.
    pub distances: u64,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
}

/// Rows of two tables copied into one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct GatherRowsParams {
    /// BF16 table whose rows are numbered from 0.
    pub base: u64,
    /// Elements from one row of `base` to the next.
    pub base_stride: u64,
    /// BF16 table whose rows are numbered from `base_rows` on.
    pub delta: u64,
    /// Elements from one row of `delta` to the next.
    pub delta_stride: u64,
    /// `u32[rows]`: the row that each row of `out` is a copy of; one past both tables leaves its row as it is.
    pub index: u64,
    /// BF16 out.
    pub out: u64,
    /// Elements from one row of `out` to the next.
    pub out_stride: u64,
    /// Rows of `base`.
    pub base_rows: u32,
    /// Rows of `delta`.
    pub delta_rows: u32,
    /// Rows of `out`.
    pub rows: u32,
    /// Columns of all three.
    pub cols: u32,
}

/// Embedding rows replaced by those of each row's overlay.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ReplaceRowsParams {
    /// [`OverlaySlot`]`[slots]`.
    pub entries: u64,
    /// `i32[rows]`: token of each row; negative, or at or past `vocab`: the row stays.
    pub token_ids: u64,
    /// `i32[rows]`: slot of each row; negative, or at or past `slots`: the row stays. 0 = every row has `slot`.
    pub seq_slot: u64,
    /// BF16 out, `[rows, hidden]`.
    pub out: u64,
    /// Elements from one row of out to the next.
    pub out_stride: u64,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub hidden: u32,
    /// Slots of the table.
    pub slots: u32,
    /// Token ids that overlays were built for.
    pub vocab: u32,
    /// The slot of every row where `seq_slot` is 0.
    pub slot: u32,
    /// What rows are multiplied by under [`FLAG_MULTIPLY`](crate::FLAG_MULTIPLY).
    pub multiplier: f32,
    /// [`FLAG_MULTIPLY`](crate::FLAG_MULTIPLY) or 0.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// LM-head logits of overridden ids computed anew: `logits[row][ids[k]] = hidden[row] . rows[k]` for the overlay of the row's slot.
///
/// The hidden size is cut into [`LOGIT_PARTS`](crate::LOGIT_PARTS) parts; docs/numerics.md has the order of summation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct LogitsParams {
    /// [`OverlaySlot`]`[slots]`.
    pub entries: u64,
    /// [`Tile`](crate::Tile) list; 0 = tiles of `tile_rows` consecutive rows, all of slot `slot`.
    pub tiles: u64,
    /// u32: tiles in the list. Not read where `tiles` is 0.
    pub tile_count: u64,
    /// u32 permutation; 0 = identity.
    pub perm: u64,
    /// BF16 hidden rows, `[rows, k_in]`.
    pub x: u64,
    /// Elements from one row of x to the next.
    pub x_stride: u64,
    /// Logits, `[rows, vocab]` or wider, BF16 or FP32 by `flags`.
    pub logits: u64,
    /// Elements from one row of logits to the next.
    pub logits_stride: u64,
    /// Rows of x and of logits.
    pub rows: u32,
    /// Hidden size.
    pub k_in: u32,
    /// Slots of the table.
    pub slots: u32,
    /// Token ids that overlays were built for; ids at or past it are skipped.
    pub vocab: u32,
    /// The slot of every row where `tiles` is 0.
    pub slot: u32,
    /// Most rows of a tile, as in [`DeltaParams::tile_rows`](crate::DeltaParams::tile_rows).
    pub tile_rows: u32,
    /// Tiles at most; the list may hold fewer. Where `tiles` is 0, the tiles there are.
    pub max_tiles: u32,
    /// [`FLAG_TILES_READY`](crate::FLAG_TILES_READY), [`FLAG_F32_LOGITS`](crate::FLAG_F32_LOGITS), both or 0.
    pub flags: u32,
    /// How many ids an overlay is expected to have: chooses a kernel, not a result.
    pub expected_ids: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<OverlaySlot>() == 32);
    assert!(offset_of!(OverlaySlot, slot_map) == 16);
    assert!(offset_of!(OverlaySlot, n_override) == 24);
    assert!(size_of::<RowDiffParams>() == 48);
    assert!(offset_of!(RowDiffParams, distances) == 32);
    assert!(offset_of!(RowDiffParams, rows) == 40);
    assert!(size_of::<GatherRowsParams>() == 72);
    assert!(offset_of!(GatherRowsParams, index) == 32);
    assert!(offset_of!(GatherRowsParams, base_rows) == 56);
    assert!(size_of::<ReplaceRowsParams>() == 72);
    assert!(offset_of!(ReplaceRowsParams, out) == 24);
    assert!(offset_of!(ReplaceRowsParams, rows) == 40);
    assert!(offset_of!(ReplaceRowsParams, multiplier) == 60);
    assert!(size_of::<LogitsParams>() == 104);
    assert!(offset_of!(LogitsParams, x) == 32);
    assert!(offset_of!(LogitsParams, rows) == 64);
    assert!(offset_of!(LogitsParams, flags) == 92);
};
