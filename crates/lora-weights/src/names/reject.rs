use std::fmt;

/// Why a tensor's name cannot be placed. [`as_str`](Self::as_str) is stable: reports, tests and scripts rely on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum RejectReason {
    /// The name does not start with `base_model.model.`.
    NotPeftKey,
    /// Neither a `lora_A` nor a `lora_B` weight, nor anything else that is known.
    UnrecognizedTensor,
    /// Not in a decoder layer of the text model: vision, audio, multi-token prediction, head.
    NonLayerModule,
    /// A decoder layer's path that breaks off.
    MalformedKey,
    /// The layer's number is not a canonical decimal (`01`, `-1`, `x`).
    MalformedLayerIndex,
    /// The model has no such layer.
    LayerOutOfRange,
    /// An input of a gated delta net, which feeds the recurrence, where the pool has no room for it.
    GdnTarget,
    /// `linear_attn.out_proj` on a layer with softmax attention.
    GdnOutOnAttentionLayer,
    /// `self_attn.*` on a linear-attention layer.
    NonFullAttentionLayer,
    /// A module that the layer does not have, or that the pool has no room for.
    UnsupportedModule,
    /// Router or expert tensors for a layer whose feed-forward block is dense.
    ExpertLoraOnDenseModel,
    /// Tensors of all experts in one, and nothing that says how they are stacked.
    FusedExpertLora,
    /// The expert's number is not a canonical decimal.
    MalformedExpertIndex,
    /// The model has no such expert.
    ExpertOutOfRange,
    /// An expert's module that is not its gate, up or down projection.
    UnsupportedExpertProj,
    /// Low-rank LoRA of the embedding.
    LoraEmbeddingUnimplemented,
}

impl RejectReason {
    /// Every reason.
    pub const ALL: [Self; 16] = [
        Self::NotPeftKey,
        Self::UnrecognizedTensor,
        Self::NonLayerModule,
        Self::MalformedKey,
        Self::MalformedLayerIndex,
        Self::LayerOutOfRange,
        Self::GdnTarget,
        Self::GdnOutOnAttentionLayer,
        Self::NonFullAttentionLayer,
        Self::UnsupportedModule,
        Self::ExpertLoraOnDenseModel,
        Self::FusedExpertLora,
        Self::MalformedExpertIndex,
        Self::ExpertOutOfRange,
        Self::UnsupportedExpertProj,
        Self::LoraEmbeddingUnimplemented,
    ];

    /// The stable word: `layer-out-of-range`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotPeftKey => "not-peft-key",
            Self::UnrecognizedTensor => "unrecognized-tensor",
            Self::NonLayerModule => "non-layer-module",
            Self::MalformedKey => "malformed-key",
            Self::MalformedLayerIndex => "malformed-layer-index",
            Self::LayerOutOfRange => "layer-out-of-range",
            Self::GdnTarget => "gdn-target",
            Self::GdnOutOnAttentionLayer => "gdn-out-on-attention-layer",
            Self::NonFullAttentionLayer => "non-full-attention-layer",
            Self::UnsupportedModule => "unsupported-module",
            Self::ExpertLoraOnDenseModel => "expert-lora-on-dense-model",
            Self::FusedExpertLora => "fused-expert-lora",
            Self::MalformedExpertIndex => "malformed-expert-index",
            Self::ExpertOutOfRange => "expert-out-of-range",
            Self::UnsupportedExpertProj => "unsupported-expert-proj",
            Self::LoraEmbeddingUnimplemented => "lora-embedding-unimplemented",
        }
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A name that cannot be placed, shown as `REJECT[reason]: name: detail`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("REJECT[{reason}]: {key}: {detail}")]
#[non_exhaustive]
pub struct Reject {
    /// The stable reason.
    pub reason: RejectReason,
    /// The tensor's name as it stands in the file.
    pub key: String,
    /// What is wrong with it, both numbers where there are two, and the way out where there is one.
    pub detail: String,
}

impl Reject {
    pub(super) fn new(reason: RejectReason, key: &str, detail: impl Into<String>) -> Self {
        Self {
            reason,
            key: key.to_owned(),
            detail: detail.into(),
        }
    }
}
