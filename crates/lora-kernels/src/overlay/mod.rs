//! Whole rows of a vocabulary table: which differ, copies of some, and rows of an overlay in place of a model's own.
//!
//! An overlay replaces rows of the embedding and of the LM head: a set of token ids, each with a BF16 row. [`row_diff`] and [`gather_rows`]
//! are what it is built with; [`replace_rows`] and [`head_logits`] apply it, each row of a batch taking the overlay of its own slot.
//!
//! Which overlay a slot has is read on the device, from the [`OverlaySlot`](crate::OverlaySlot) records of an [`OverlayTable`] at a fixed
//! address, so a captured graph follows swaps. Launchers only enqueue, allocate nothing, and are legal under graph capture.
//!
//! ```
//! use half::bf16;
//! use lora_kernels::host::HostBackend;
//! use lora_kernels::overlay::*;
//! use lora_kernels::*;
//! use std::sync::Arc;
//!
//! let backend = Arc::new(HostBackend::new());
//! let kernels = LoraKernels::new(backend.clone(), LaunchOptions::default());
//! let rows = |values: &[f32]| {
//!     let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
//!     DeviceBuffer::from_slice(backend.clone(), &values)
//! };
//!
//! // Slot 1 of two replaces the row of token 2, of a vocabulary of three.
//! let (row, ids) = (rows(&[5.0, 6.0])?, DeviceBuffer::from_slice(backend.clone(), &[2_u32])?);
//! let slot_map = DeviceBuffer::from_slice(backend.clone(), &[-1, -1, 0])?;
//! let overlay = OverlaySlot {
//!     rows: row.ptr().0,
//!     ids: ids.ptr().0,
//!     slot_map: slot_map.ptr().0,
//!     n_override: 1,
//!     reserved: 0,
//! };
//! let entries = DeviceBuffer::from_slice(backend.clone(), &[OverlaySlot::NONE, overlay])?;
//! let table = OverlayTable { entries: entries.ptr(), slots: 2, vocab: 3, hidden: 2, expected_ids: 1 };
//!
//! // Two rows of token 2: the first has no adapter, the second has slot 1's.
//! let mut out = rows(&[1.0, 1.0, 1.0, 1.0])?;
//! let (tokens, slots) = (
//!     DeviceBuffer::from_slice(backend.clone(), &[2, 2])?,
//!     DeviceBuffer::from_slice(backend.clone(), &[-1, 1])?,
//! );
//! let tokens = OverlayTokens {
//!     ids: tokens.token_ids(2)?,
//!     slots: SlotOfRow::Each(slots.row_slots(2)?),
//! };
//! let applied = replace_rows((&kernels, Stream::OWN), &table, tokens, out.mat_mut(2, 2, 2)?, None)?;
//! assert_eq!(applied, Applied::Launched { launches: 1 });
//! let out: Vec<f32> = out.download::<bf16>(0, 4)?.iter().map(|v| v.to_f32()).collect();
//! assert_eq!(out, [1.0, 1.0, 5.0, 6.0]);
//! # Ok::<(), KernelError>(())
//! ```

mod apply;
mod build;
#[cfg(test)]
mod tests;

pub use apply::{
    HeadRows, LogitsMut, OverlayTable, OverlayTokens, SlotOfRow, head_logits, replace_rows,
};
pub use build::{GatherSources, gather_rows, row_diff};

use crate::{KernelError, MAX_ROWS, MAX_WIDTH, Operand};

/// Rows and columns of a matrix that a launch takes, as kernels count them.
fn checked_size(operand: Operand, (rows, cols): (usize, usize)) -> Result<(u32, u32), KernelError> {
    KernelError::check_range(operand, "rows", rows as u64, (0, MAX_ROWS.into()))?;
    KernelError::check_range(operand, "columns", cols as u64, (1, MAX_WIDTH.into()))?;
    Ok((rows as u32, cols as u32))
}
