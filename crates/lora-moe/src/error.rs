use lora_kernels::KernelError;
use lora_weights::ExpertProj;

/// Why a table, a row map or a fold was refused. A refused fold has written nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MoeError {
    /// A view, a buffer or a launch was refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),

    /// In single-active mode, a row that follows another adapter than the installed one.
    #[error(
        "row {row} follows slot {slot}, but the experts of {} are installed: serve it by expert tables, or after a rotation",
        active_name(*active)
    )]
    RouteRefused {
        /// Row of the batch.
        row: usize,
        /// The slot it names.
        slot: i32,
        /// The slot whose experts are installed.
        active: Option<u32>,
    },

    /// Fewer padded rows than rows.
    #[error("{rows} rows do not fit {padded} padded ones")]
    PaddingTooSmall {
        /// Rows given.
        rows: usize,
        /// Rows there is room for.
        padded: usize,
    },

    /// A slot past the pool.
    #[error("slot {slot} of a pool with {slots} slots")]
    SlotOutOfRange {
        /// The slot.
        slot: u32,
        /// Slots there are.
        slots: u32,
    },

    /// No room for the experts of one more adapter.
    #[error(
        "the expert tables hold {residents} adapters, all taken: make them with more, or unload one"
    )]
    TablesFull {
        /// Adapters there is room for.
        residents: u32,
    },

    /// Gate and up columns that alternate, which no launch writes: rows of out have a stride, columns have none.
    #[error(
        "gate and up alternate in the {width} columns of out, and a fold writes adjacent columns: store the base's gate and up rows one after \
         the other when its weights are loaded, or give each an out of its own"
    )]
    InterleavedOut {
        /// Columns of out.
        width: usize,
    },

    /// A layer without expert tables.
    #[error(
        "layer {layer} has no expert tables: it is not a MoE layer of the model they were made for"
    )]
    NotMoe {
        /// Global layer index.
        layer: usize,
    },

    /// A pair that does not have the sizes its table was made for.
    #[error(
        "layer {layer}, expert {expert}, {proj:?}: the pair is {found:?} (in, out, padded rank), the tables are for {expected:?}"
    )]
    PairMismatch {
        /// Global layer index.
        layer: usize,
        /// Expert.
        expert: usize,
        /// Projection.
        proj: ExpertProj,
        /// The pair's `(k_in, n_out, max_rank)`.
        found: (u32, u32, u32),
        /// The table's.
        expected: (u32, u32, u32),
    },

    /// An expert past the model's.
    #[error("layer {layer}: expert {expert} of {num_experts}")]
    ExpertOutOfRange {
        /// Global layer index.
        layer: usize,
        /// Expert.
        expert: usize,
        /// Experts there are.
        num_experts: u32,
    },

    /// Sizes of expert tables that cannot be.
    #[error("expert tables: {quantity} is {value}, supported is 1..={max}")]
    BadTables {
        /// Which size.
        quantity: &'static str,
        /// Its value.
        value: u64,
        /// Largest supported.
        max: u64,
    },
}

impl From<lora_weights::device::MemoryError> for MoeError {
    fn from(error: lora_weights::device::MemoryError) -> Self {
        Self::Kernel(error.into())
    }
}

fn active_name(active: Option<u32>) -> String {
    active.map_or_else(|| "no slot".to_owned(), |slot| format!("slot {slot}"))
}
