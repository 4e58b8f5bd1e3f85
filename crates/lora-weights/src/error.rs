//! Why weights could not be placed, loaded or moved.

use crate::device::MemoryError;
use crate::{AuditReport, VictimError};

/// Where in a slot's transaction an upload failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum UploadStage {
    /// Zeroing the table entries of the slot's former adapter.
    ClearTables,
    /// The slot image and its expert units.
    Image,
    /// The table entries of the new adapter.
    Tables,
}

impl std::fmt::Display for UploadStage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ClearTables => "clearing its tables",
            Self::Image => "uploading its image",
            Self::Tables => "writing its tables",
        })
    }
}

/// Why this crate refused or failed. Refusals that the audit also knows show its notation, `REJECT[reason]: ...`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The audit found errors. Nothing was written.
    #[error("adapter `{adapter}`: {}", errors_of(.report))]
    Refused {
        /// Name the adapter was to be loaded under.
        adapter: String,
        /// Every finding, errors first.
        report: Box<AuditReport>,
    },

    /// More startup adapters than slots.
    #[error(
        "REJECT[too-many-adapters]: {given} adapters for {slots} slots: raise max_loras or load fewer"
    )]
    TooManyAdapters {
        /// Adapters given.
        given: usize,
        /// Slots of the pool.
        slots: u32,
    },

    /// A load without any adapter.
    #[error("REJECT[no-adapters]: load needs at least one adapter")]
    NoAdapters,

    /// A name that another slot has, or that is given twice.
    #[error(
        "REJECT[duplicate-name]: adapter `{name}` is already in slot {slot}: swap that slot, or unload it first"
    )]
    DuplicateName {
        /// The name.
        name: String,
        /// The slot that has it.
        slot: u32,
    },

    /// Startup load into a pool where a slot is not free.
    #[error(
        "slot {slot} already holds an adapter: load at startup only, later use promote or swap"
    )]
    AlreadyLoaded {
        /// First slot that is not free.
        slot: u32,
    },

    /// A pool spec with a number outside what a pool can be.
    #[error("pool: {field} is {value}, must be {minimum} to {maximum}")]
    BadPoolSpec {
        /// Field of `PoolSpec`.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Least legal value.
        minimum: u64,
        /// Largest legal value.
        maximum: u64,
    },

    /// A size that 64 bits (or the 32 bits a kernel takes) do not hold.
    #[error("pool layout: {what} does not fit its integer: lower max_rank or max_loras")]
    LayoutOverflow {
        /// What overflowed.
        what: &'static str,
    },

    /// Pool and tables would leave less free memory than they take themselves.
    #[error(
        "pool needs {required} bytes (slots {slots_bytes}, tables {table_bytes}, experts {expert_bytes}) and must leave as much \
         free, but {free} bytes are free: lower max_loras, max_rank or the expert units"
    )]
    InsufficientMemory {
        /// Bytes that slots, tables and expert region take together.
        required: u64,
        /// Bytes of all slots.
        slots_bytes: u64,
        /// Bytes of the tables.
        table_bytes: u64,
        /// Bytes of the expert region.
        expert_bytes: u64,
        /// Bytes free on the device.
        free: u64,
    },

    /// Device memory refused outside a slot's transaction: nothing was changed.
    #[error(transparent)]
    Memory(#[from] MemoryError),

    /// An upload into a slot failed. The slot is a placeholder now; nothing else was touched.
    #[error("slot {slot}: {stage} failed, the slot is now a placeholder: {source}")]
    Upload {
        /// The slot.
        slot: u32,
        /// What was being uploaded.
        stage: UploadStage,
        /// The memory's own error.
        source: MemoryError,
    },

    /// A slot extension could not install itself. The slot is a placeholder now.
    #[error("slot {slot}: extension failed to install, the slot is now a placeholder: {source}")]
    Extension {
        /// The slot.
        slot: u32,
        /// The extension's own error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// An adapter with vocabulary rows, and nothing that applies them.
    #[error(
        "REJECT[overlay-unapplied]: adapter `{adapter}` holds {tensors} tensors of vocabulary rows and came without the slot \
         extension that applies them"
    )]
    OverlayWithoutExtension {
        /// The adapter.
        adapter: String,
        /// Its tensors of vocabulary rows.
        tensors: usize,
    },

    /// A slot number past the pool.
    #[error("slot {slot} is out of range, the pool has {slots} slots")]
    SlotOutOfRange {
        /// Number asked for.
        slot: i64,
        /// Slots of the pool.
        slots: u32,
    },

    /// A slot whose adapter requests still hold.
    #[error("slot {slot} is busy: {refs} requests hold its adapter, retry when they have ended")]
    SlotBusy {
        /// The slot.
        slot: u32,
        /// References held.
        refs: u32,
    },

    /// A slot that a transaction is writing.
    #[error("slot {slot} is being written by another transaction")]
    SlotBeingWritten {
        /// The slot.
        slot: u32,
    },

    /// A slot without an adapter.
    #[error("slot {slot} holds no adapter")]
    SlotEmpty {
        /// The slot.
        slot: u32,
    },

    /// A slot whose contents are no longer those the caller saw.
    #[error("slot {slot} is at generation {found}, not {expected}")]
    GenerationChanged {
        /// The slot.
        slot: u32,
        /// Generation the caller named.
        expected: u64,
        /// Generation of the slot now.
        found: u64,
    },

    /// Rotation, or new contents for a startup slot or the active one, without permission.
    #[error(
        "{verb} of slot {slot} needs permission: it is the active slot or was filled at startup (levers ROTATE or PEER, or \
         LoadPolicy::allow_rotation)"
    )]
    RotationNotPermitted {
        /// What was asked for.
        verb: &'static str,
        /// The slot.
        slot: u32,
    },

    /// No slot to promote into.
    #[error(transparent)]
    Victim(#[from] VictimError),

    /// The expert region has too few free units.
    #[error(
        "expert region: {needed} units needed, {free} of {total} free: unload an adapter with experts or reserve more units"
    )]
    ExpertRegionFull {
        /// Units the adapter needs.
        needed: u64,
        /// Units free, those of the slot's former adapter included.
        free: u64,
        /// Units of the region.
        total: u64,
    },

    /// A pair that has no place in the layout, or not with these sizes.
    #[error("{path}: {what} is {found}, the pool's layout has {expected}")]
    PairMismatch {
        /// Module path.
        path: String,
        /// What differs: `rank`, `k_in`, `n_out`, `layer`, `module`, `pairs`.
        what: &'static str,
        /// The pair's number.
        found: u64,
        /// The layout's number (for `rank` the largest that fits).
        expected: u64,
    },

    /// Bytes that were to land in staging memory did not. No slot was touched.
    #[error("adapter `{adapter}` did not land, and no slot was touched: {source}")]
    Landing {
        /// The adapter.
        adapter: String,
        /// The transport's own error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// Land targets that do not make the pairs of the config they are rebuilt by.
    #[error(
        "REJECT[landing-geometry]: {path}: {what} is {found}, not {expected}: plan the landing again from the adapter's own config"
    )]
    LandingGeometry {
        /// Module path.
        path: String,
        /// What differs: `rank`, `layer`, `matrices`.
        what: &'static str,
        /// The targets' number.
        found: u64,
        /// The number that config or model asks for (for `layer` the number of layers).
        expected: u64,
    },

    /// A staging buffer that cannot hold a slot image.
    #[error(
        "staging buffer of {bytes} bytes, {alignment}-byte aligned, cannot hold an image of {needed} bytes of BF16, which needs 2-byte \
         alignment"
    )]
    BadStaging {
        /// Its bytes.
        bytes: u64,
        /// The largest power of two (up to 16) that its address is a multiple of.
        alignment: usize,
        /// Bytes of the image.
        needed: u64,
    },

    /// A row map that does not cover its rows.
    #[error("row map: {rows} rows do not fit {padded} padded rows")]
    PaddingTooSmall {
        /// Rows with a request.
        rows: usize,
        /// Rows of the map.
        padded: usize,
    },

    /// A row that names a slot past the pool.
    #[error("row {row} names slot {slot}, the pool has {slots} slots")]
    RowSlotOutOfRange {
        /// The row.
        row: usize,
        /// The slot it names.
        slot: i32,
        /// Slots of the pool.
        slots: u32,
    },
}

impl WeightsError {
    /// A stable word for the kind of refusal, as counters and logs name it. The reasons that an audit knows too are spelled as
    /// there.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "audit",
            Self::TooManyAdapters { .. } => "too-many-adapters",
            Self::NoAdapters => "no-adapters",
            Self::DuplicateName { .. } => "duplicate-name",
            Self::AlreadyLoaded { .. } => "already-loaded",
            Self::BadPoolSpec { .. } => "bad-pool-spec",
            Self::LayoutOverflow { .. } => "layout-overflow",
            Self::InsufficientMemory { .. } => "insufficient-memory",
            Self::Memory(_) => "memory",
            Self::Upload { .. } => "upload-failed",
            Self::Extension { .. } => "extension-failed",
            Self::OverlayWithoutExtension { .. } => "overlay-unapplied",
            Self::SlotOutOfRange { .. } => "slot-out-of-range",
            Self::SlotBusy { .. } => "slot-busy",
            Self::SlotBeingWritten { .. } => "slot-being-written",
            Self::SlotEmpty { .. } => "slot-empty",
            Self::GenerationChanged { .. } => "generation-changed",
            Self::RotationNotPermitted { .. } => "rotation-not-permitted",
            Self::Victim(VictimError::PoolFull { .. }) => "pool-full",
            Self::Victim(VictimError::NoCacheSlots) => "no-cache-slots",
            Self::ExpertRegionFull { .. } => "expert-region-full",
            Self::PairMismatch { .. } => "pair-mismatch",
            Self::BadStaging { .. } => "bad-staging",
            Self::PaddingTooSmall { .. } => "padding-too-small",
            Self::RowSlotOutOfRange { .. } => "row-slot-out-of-range",
            Self::LandingGeometry { .. } => "landing-geometry",
            Self::Landing { .. } => "landing-failed",
        }
    }
}

fn errors_of(report: &AuditReport) -> String {
    let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
    errors.join("; ")
}
