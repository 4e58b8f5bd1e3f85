//! Why the runtime refused or failed. Errors of the crates below are kept whole.

use lora_config::{ConfigError, FfnKind};
use lora_kernels::KernelError;
use lora_moe::MoeError;
use lora_overlay::OverlayError;
use lora_weights::{HeaderError, LoraModule, StoreError, VictimError, WeightsError};

/// Why the runtime refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// Settings that cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An adapter's files could not be opened.
    #[error("adapter `{adapter}`: {source}")]
    Store {
        /// Name that the adapter was to be loaded under.
        adapter: String,
        /// What is wrong, with the file's name.
        source: Box<StoreError>,
    },
    /// Tensors in memory that are no adapter's.
    #[error("adapter `{adapter}`: {source}")]
    Tensors {
        /// Name that the adapter was to be loaded under.
        adapter: String,
        /// What is wrong, with the tensor's name.
        source: HeaderError,
    },
    /// An adapter could not be read from a store or a peer. No slot was touched.
    #[cfg(feature = "source")]
    #[error("adapter `{adapter}`: {source}")]
    Source {
        /// Name that the adapter was to be loaded under.
        adapter: String,
        /// What is wrong, with the file's URL.
        source: Box<lora_weights::source::SourceError>,
    },
    /// An adapter's config is refused.
    #[error("adapter `{adapter}`: {source}")]
    AdapterConfig {
        /// Name that the adapter was to be loaded under.
        adapter: String,
        /// Every refused field.
        source: ConfigError,
    },
    /// Slots, pool or audit refused.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A launch was refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Expert tables or an expert fold were refused.
    #[error(transparent)]
    Moe(#[from] MoeError),
    /// Experts were to be folded without expert tables.
    #[error(
        "the pool has no room for experts: give it some by `PoolSpec::experts` (`experts = true` of `lora.toml`'s levers)"
    )]
    NoExpertTables,
    /// A token overlay was refused.
    #[error(transparent)]
    Overlay(#[from] OverlayError),
    /// The engine's vocabulary tables were registered before.
    #[error(
        "the served vocabulary tables are registered already: slots hold overlays that were built against them"
    )]
    TablesRegistered,
    /// Vocabulary tables that are not the model's.
    #[error("served tables: {what}")]
    ServedTable {
        /// What does not fit, both sides named.
        what: String,
    },
    /// A batch whose row map the runtime does not hold.
    #[error(
        "the batch was routed from the device, so its row map is the engine's: give that map to TokenOverlaySet::apply_embeddings (LoraRuntime::overlays)"
    )]
    RowMapElsewhere,
    /// Deltas were to be installed on a layer that has no place for them.
    #[error(transparent)]
    Install(#[from] InstallError),
    /// The layer does not have the module.
    #[error("layer {layer} has no {}: the model has {layers} layers, and each has the modules of its kind", module.peft_name())]
    NoSuchSite {
        /// Global layer index.
        layer: usize,
        /// The module asked for.
        module: LoraModule,
        /// Layers of the model.
        layers: usize,
    },
    /// More sites than one launch takes.
    #[error("{sites} sites in one launch, {most} at most: split them")]
    TooManySites {
        /// Sites asked for.
        sites: usize,
        /// Most sites of a launch.
        most: usize,
    },
}

impl RuntimeError {
    /// Whether only room is missing that running requests hold: the same call may succeed once one of them has ended.
    pub fn is_busy(&self) -> bool {
        match self {
            Self::Weights(WeightsError::Victim(reason)) => {
                matches!(reason, VictimError::PoolFull { .. })
            }
            Self::Weights(WeightsError::SlotBusy { .. }) => true,
            Self::Weights(WeightsError::ExpertRegionFull { needed, total, .. }) => needed <= total,
            _ => false,
        }
    }
}

/// Deltas and layer do not fit each other. Nothing was installed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// Dense FFN deltas for a block that is not dense.
    #[error(
        "dense FFN deltas cannot be installed on layer {layer}, whose feed-forward block is {found}"
    )]
    DenseFfn {
        /// Global layer index.
        layer: usize,
        /// What the block is.
        found: FfnBlock,
    },
    /// Expert or router deltas for a block that is not MoE.
    #[error(
        "router and expert deltas cannot be installed on layer {layer}, whose feed-forward block is {found}"
    )]
    MoeFfn {
        /// Global layer index.
        layer: usize,
        /// What the block is.
        found: FfnBlock,
    },
    /// GDN output deltas for a layer with softmax attention.
    #[error(
        "linear-attention output deltas cannot be installed on layer {layer}, which has softmax attention"
    )]
    OutProj {
        /// Global layer index.
        layer: usize,
    },
    /// Deltas of another layer.
    #[error("deltas of layer {found} cannot be installed on layer {layer}")]
    WrongLayer {
        /// The layer installed on.
        layer: usize,
        /// The layer that the deltas are for.
        found: usize,
    },
}

/// A feed-forward block, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FfnBlock {
    /// gate, up and down.
    Dense,
    /// Mixture of experts.
    Moe,
    /// There is none.
    Absent,
}

impl From<FfnKind> for FfnBlock {
    fn from(kind: FfnKind) -> Self {
        match kind {
            FfnKind::Dense { .. } => Self::Dense,
            FfnKind::Moe => Self::Moe,
            FfnKind::Absent => Self::Absent,
        }
    }
}

impl std::fmt::Display for FfnBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Dense => "dense",
            Self::Moe => "a mixture of experts",
            Self::Absent => "absent",
        })
    }
}
