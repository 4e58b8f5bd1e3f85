//! Token overlays: which rows of the embedding and of the LM head an adapter replaces, and where each comes from.
//!
//! PEFT adapters can train whole rows of a vocabulary table (`trainable_tokens`) or save a whole table (`modules_to_save`, a resized
//! vocabulary). Served, both are the same thing: a set of token ids, ascending and unique, each with a row that replaces the base
//! model's. This crate decides that set:
//!
//! - [`clamp_trainable_to_vocab`] pairs the k-th trained id with the k-th row, whatever their order, and keeps apart ids that only the
//!   adapter's own, longer table has;
//! - [`row_diff`] finds the rows of a saved table that differ from the served one;
//! - [`build_override_set`] is their union, [`override_source`] where a member's row lies, [`slot_map`] the way back from a token id.
//!
//! It plans on the host. Applying overlays is not part of this version: the audit refuses adapters that need one by name
//! (`overlay-unimplemented`), unless the caller's policy says that it applies them itself.
//!
//! ```
//! use lora_overlay::*;
//!
//! // Ids as a config lists them: row 0 belongs to id 7, row 1 to id 2, row 2 to an id that the served vocabulary of 8 does not have.
//! let trained = clamp_trainable_to_vocab(&[7, 2, 9], 8, 10)?;
//! assert_eq!(trained.served, [TrainedRow { id: 7, row: 0 }, TrainedRow { id: 2, row: 1 }]);
//! assert_eq!(trained.extension, [TrainedRow { id: 9, row: 2 }]);
//!
//! // Row 5 of the adapter's table differs from the served one too.
//! let ids = build_override_set(&[5], &trained.served);
//! assert_eq!(ids, [2, 5, 7]);
//! assert_eq!(override_source(2, &trained.served), OverrideSource::Delta { row: 1 });
//! assert_eq!(override_source(5, &trained.served), OverrideSource::Base { row: 5 });
//! assert_eq!(slot_map(&ids, 8), [-1, -1, 0, -1, -1, 1, -1, 2]);
//! # Ok::<(), OverlayError>(())
//! ```

#![forbid(unsafe_code)]

mod diff;
mod plan;

pub use diff::{ROWDIFF_THRESH, row_diff};
pub use plan::{
    OverrideSource, TrainedRow, TrainedTokens, build_override_set, clamp_trainable_to_vocab,
    override_source, slot_map,
};

/// Why an overlay cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OverlayError {
    /// A trained id that neither the served vocabulary nor the adapter's own table has.
    #[error(
        "REJECT[token-beyond-vocab]: trained token {id} is past the served vocabulary of {vocab} rows and past the {base_rows} rows of \
         the adapter's own table; serve the model that the adapter was trained on"
    )]
    TokenBeyondVocab {
        /// The id.
        id: u32,
        /// Rows of the served table.
        vocab: u32,
        /// Rows of the table in the adapter's file, 0 where it holds none.
        base_rows: u32,
    },
    /// Two tables whose rows cannot be compared.
    #[error(
        "REJECT[overlay-shape]: a table of {elements} elements is not rows of the hidden size {hidden}"
    )]
    Shape {
        /// Elements of the table.
        elements: usize,
        /// Hidden size.
        hidden: usize,
    },
}
