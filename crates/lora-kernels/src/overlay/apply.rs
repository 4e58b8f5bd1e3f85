//! Overlays applied to a batch.

use super::checked_size;
use crate::launch::check_equal;
use crate::strided::Strided;
use crate::{
    Applied, F32MatMut, FLAG_F32_LOGITS, FLAG_MULTIPLY, KernelError, LARGE_TILE_ROWS, LogitsParams,
    LoraKernels, MAX_ENTRIES, MAX_WIDTH, MatMut, MatRef, Operand, ReplaceRowsParams, RowGroups,
    RowSlots, Skip, Stream, TokenIds,
};
use bytemuck::Zeroable;
use lora_weights::device::DevicePtr;

const TABLE: Operand = Operand::shared("overlay table");
const OUT: Operand = Operand::shared("embedding rows");
const HIDDEN: Operand = Operand::shared("hidden rows");
const LOGITS: Operand = Operand::shared("logits");

/// Bytes that a record is loaded by.
const RECORD_ALIGN: u64 = 16;

/// The overlay of every slot, for one table of a model: its embedding, its LM head, or both where they are tied.
///
/// What a record points to stays allocated while a launch may read the record. Writing a record is how an overlay is swapped: launches
/// ordered after the write, replays of captured graphs among them, see the new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverlayTable {
    /// [`OverlaySlot`](crate::OverlaySlot)`[slots]`, 16-byte aligned, at an address fixed for life.
    pub entries: DevicePtr,
    /// Slots.
    pub slots: u32,
    /// Token ids that every overlay of the table was built for: the length of each slot map. Ids from here on are skipped.
    pub vocab: u32,
    /// Columns of every overlay's rows.
    pub hidden: u32,
    /// How many ids the largest overlay is expected to have while a launch, or a captured graph, is used. Chooses how logits are tiled, never
    /// their bits: a table that grows past it is served right, only slower.
    pub expected_ids: u32,
}

impl OverlayTable {
    fn check(&self) -> Result<(), KernelError> {
        let check = |quantity, value: u32, max: u32| {
            KernelError::check_range(TABLE, quantity, value.into(), (1, max.into()))
        };
        check("slots", self.slots, MAX_ENTRIES)?;
        check("vocab", self.vocab, MAX_WIDTH)?;
        check("hidden", self.hidden, MAX_WIDTH)?;
        KernelError::check_ptr(TABLE, self.entries, RECORD_ALIGN)
    }
}

/// Which slot each row of a batch has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotOfRow<'a> {
    /// Its own, by the step's row map.
    Each(RowSlots<'a>),
    /// One slot for all rows: engines that serve a single active adapter. It is part of the launch, so a captured graph keeps it.
    All(u32),
}

/// Tokens of a batch and the slots whose overlays replace their rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverlayTokens<'a> {
    /// The token of each row.
    pub ids: TokenIds<'a>,
    /// The slot of each row.
    pub slots: SlotOfRow<'a>,
}

/// Overwrites row i of `out` with the row that the overlay of row i's slot has for its token, where it has one. For after an engine's own gather.
///
/// `out` is BF16 `[rows, hidden]`. Rows are copied bit for bit; with a `multiplier`, an element becomes `bf16(f32(row) * multiplier)`, which is what an
/// embedding with a scale gives (Gemma: the square root of the hidden size, itself rounded to BF16, since that is what transformers multiplies
/// by). A row keeps its bits where its slot is negative, past the table, without an overlay or without a slot map; where its token is negative or past
/// the vocabulary, or is not overridden; and where the slot map names a row that the overlay does not have.
///
/// # Errors
/// [`KernelError::OutOfRange`] for sizes outside the limits; [`KernelError::SizeMismatch`] between table, tokens and out; [`KernelError::Null`] and
/// [`KernelError::Misaligned`] for the table; what the backend gives.
pub fn replace_rows(
    (kernels, stream): (&LoraKernels, Stream),
    table: &OverlayTable,
    tokens: OverlayTokens<'_>,
    out: MatMut<'_>,
    multiplier: Option<f32>,
) -> Result<Applied, KernelError> {
    if kernels.options().no_apply {
        return Ok(Applied::Skipped(Skip::NoApply));
    }
    table.check()?;
    let (rows, hidden) = checked_size(OUT, (out.rows(), out.cols()))?;
    let wanted = (table.hidden as usize, "the overlay table");
    check_equal(OUT, "columns", out.cols(), wanted)?;
    check_equal(OUT, "rows", out.rows(), (tokens.ids.len(), "the tokens"))?;
    let (seq_slot, slot) = match tokens.slots {
        SlotOfRow::Each(slots) => {
            check_equal(OUT, "rows", out.rows(), (slots.len(), "the row slots"))?;
            (slots.ptr().0, 0)
        }
        SlotOfRow::All(slot) => (0, slot),
    };
    if rows == 0 {
        return Ok(Applied::Empty);
    }
    kernels.backend().replace_rows(
        stream,
        &ReplaceRowsParams {
            entries: table.entries.0,
            token_ids: tokens.ids.ptr().0,
            seq_slot,
            out: out.ptr().0,
            out_stride: out.row_stride() as u64,
            rows,
            hidden,
            slots: table.slots,
            vocab: table.vocab,
            slot,
            multiplier: multiplier.unwrap_or(1.0),
            flags: multiplier.map_or(0, |_| FLAG_MULTIPLY),
            reserved: 0,
        },
    )?;
    Ok(Applied::Launched { launches: 1 })
}

/// Which rows of the head share an overlay.
#[derive(Debug, Clone, Copy)]
pub enum HeadRows<'a> {
    /// By the slots that the groups were built from; their entries are the table's slots.
    Grouped(&'a RowGroups),
    /// One slot for all rows. It is part of the launch, so a captured graph keeps it.
    All(u32),
}

/// Logits to write into: `[rows, vocab]` or wider.
#[derive(Debug, PartialEq, Eq)]
pub enum LogitsMut<'a> {
    /// BF16.
    Bf16(MatMut<'a>),
    /// FP32.
    F32(F32MatMut<'a>),
}

impl LogitsMut<'_> {
    /// (rows, columns).
    fn size(&self) -> (usize, usize) {
        match self {
            Self::Bf16(m) => (m.rows(), m.cols()),
            Self::F32(m) => (m.rows(), m.cols()),
        }
    }

    fn strided(&self) -> Strided {
        match self {
            Self::Bf16(m) => m.strided(),
            Self::F32(m) => m.strided(),
        }
    }

    /// Address, row stride in elements, flags.
    fn place(&self) -> (DevicePtr, u64, u32) {
        match self {
            Self::Bf16(m) => (m.ptr(), m.row_stride() as u64, 0),
            Self::F32(m) => (m.ptr(), m.row_stride() as u64, FLAG_F32_LOGITS),
        }
    }
}

/// Computes the logits of overridden ids anew: for each row, and each id k of its slot's overlay, `logits[row][ids[k]] = hidden[row] . rows[k]`.
///
/// `hidden` is BF16 `[rows, hidden]`. Sums are FP32 in the order that docs/numerics.md gives, so that a logit's bits depend on its hidden row
/// and its overlay row alone; BF16 logits are rounded once. One launch serves all rows and ids of a batch. A row keeps its bits where its slot is negative,
/// past the table, without an overlay or without ids; so do the logits of ids that are not overridden, and ids past the vocabulary are skipped.
///
/// # Errors
/// [`KernelError::OutOfRange`] for sizes outside the limits, logits narrower than the vocabulary among them; [`KernelError::SizeMismatch`] between
/// table, hidden, groups and logits; [`KernelError::Null`] and [`KernelError::Misaligned`] for the table; [`KernelError::Overlap`] of
/// hidden and logits; what the backend gives.
pub fn head_logits(
    (kernels, stream): (&LoraKernels, Stream),
    table: &OverlayTable,
    hidden: MatRef<'_>,
    head: HeadRows<'_>,
    logits: LogitsMut<'_>,
) -> Result<Applied, KernelError> {
    if kernels.options().no_apply {
        return Ok(Applied::Skipped(Skip::NoApply));
    }
    table.check()?;
    let (rows, k_in) = checked_size(HIDDEN, (hidden.rows(), hidden.cols()))?;
    let wanted = (table.hidden as usize, "the overlay table");
    check_equal(HIDDEN, "columns", hidden.cols(), wanted)?;
    let (logit_rows, width) = logits.size();
    check_equal(LOGITS, "rows", logit_rows, (hidden.rows(), "hidden"))?;
    let widths = (table.vocab.into(), u64::from(u32::MAX));
    KernelError::check_range(LOGITS, "columns", width as u64, widths)?;
    if hidden.strided().overlaps(&logits.strided()) {
        return Err(KernelError::Overlap {
            first: HIDDEN,
            second: LOGITS,
        });
    }
    let (address, logits_stride, flags) = logits.place();
    let params = LogitsParams {
        entries: table.entries.0,
        x: hidden.ptr().0,
        x_stride: hidden.row_stride() as u64,
        logits: address.0,
        logits_stride,
        rows,
        k_in,
        slots: table.slots,
        vocab: table.vocab,
        flags,
        expected_ids: table.expected_ids,
        ..tiles_of(table, head, rows)?
    };
    if rows == 0 {
        return Ok(Applied::Empty);
    }
    kernels.backend().head_logits(stream, &params)?;
    Ok(Applied::Launched { launches: 1 })
}

/// Tiles of the head's rows.
fn tiles_of(
    table: &OverlayTable,
    head: HeadRows<'_>,
    rows: u32,
) -> Result<LogitsParams, KernelError> {
    match head {
        HeadRows::Grouped(groups) => {
            let (found, wanted) = (groups.rows() as usize, (rows as usize, "hidden"));
            check_equal(Operand::shared("row groups"), "rows", found, wanted)?;
            let entries = (groups.spec().entries as usize, "the row groups");
            check_equal(TABLE, "slots", table.slots as usize, entries)?;
            Ok(LogitsParams {
                tiles: groups.tiles_ptr().0,
                tile_count: groups.tile_count_ptr().0,
                perm: groups.perm_ptr().0,
                tile_rows: groups.tile_rows(),
                max_tiles: groups.current_max_tiles(),
                ..LogitsParams::zeroed()
            })
        }
        HeadRows::All(slot) => Ok(LogitsParams {
            slot,
            tile_rows: LARGE_TILE_ROWS,
            max_tiles: rows.div_ceil(LARGE_TILE_ROWS),
            ..LogitsParams::zeroed()
        }),
    }
}
