//! Why an overlay was refused.

use lora_config::TokenTable;
use lora_kernels::KernelError;

/// Why an overlay cannot be staged, built, installed or applied. Nothing is left allocated by a stage or a build that was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OverlayError {
    /// A view, a buffer or a launch was refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),

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

    /// A table that is not rows of the hidden size.
    #[error("REJECT[overlay-shape]: {what} has shape {shape:?}, and [rows, {hidden}] is needed")]
    Shape {
        /// The tensor's name, or which served table.
        what: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Hidden size.
        hidden: usize,
    },

    /// Trained ids without the rows that replace theirs.
    #[error(
        "REJECT[overlay-delta-missing]: {ids} trained tokens of {}, and the file holds no trainable_tokens_delta for them; save the adapter again",
        .table.peft_name()
    )]
    DeltaMissing {
        /// The table.
        table: TokenTable,
        /// Trained ids.
        ids: usize,
    },

    /// Trained ids and rows that are not as many.
    #[error(
        "REJECT[token-count-mismatch]: {rows} trained rows of {}, and the config names {ids} ids; save the adapter again",
        .table.peft_name()
    )]
    TokenCount {
        /// The table.
        table: TokenTable,
        /// Rows of the delta tensor.
        rows: usize,
        /// Ids in the config.
        ids: usize,
    },

    /// An overlay whose numbers are not those of the set.
    #[error(
        "slot {slot}: the overlay is for {quantity} {found}, the set for {expected}: build it against the tables that the set was made for"
    )]
    Mismatch {
        /// The slot.
        slot: u32,
        /// What differs: `vocabulary`, `head vocabulary`, `hidden size`.
        quantity: &'static str,
        /// The overlay's.
        found: u32,
        /// The set's.
        expected: u32,
    },

    /// A slot past the set.
    #[error("slot {slot} of an overlay set with {slots} slots")]
    SlotOutOfRange {
        /// The slot.
        slot: u32,
        /// Slots there are.
        slots: u32,
    },
}
