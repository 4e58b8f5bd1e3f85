//! The families, and what Hugging Face's config class of each fills in by itself. One table, so that a family is one place.

use super::{GateUpOrder, LinearInputs, StackedAxes};
use std::fmt;

/// Model families whose geometry [`ModelSpec::from_hf_config`](super::ModelSpec::from_hf_config) derives. Each `model_type` is
/// known with and without the suffix `_text`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ModelFamily {
    /// `llama`
    Llama,
    /// `mistral`
    Mistral,
    /// `qwen2`
    Qwen2,
    /// `qwen2_moe`
    Qwen2Moe,
    /// `qwen3`
    Qwen3,
    /// `qwen3_moe`
    Qwen3Moe,
    /// `qwen3_next`: linear attention with fused inputs, MoE, shared expert.
    Qwen3Next,
    /// `qwen3_5`: linear attention with split inputs.
    Qwen35,
    /// `qwen3_5_moe`: the same with MoE and shared expert in every layer.
    Qwen35Moe,
    /// `qwen3_vl`: its text model.
    Qwen3Vl,
    /// `mixtral`
    Mixtral,
    /// `gpt_oss`: experts stored `[E, in, out]`, gate and up interleaved.
    GptOss,
    /// `gemma3`
    Gemma3,
    /// `phi3`: fused `qkv_proj` and `gate_up_proj`.
    Phi3,
    /// `llama4`: `feed_forward.*` names, experts stored `[E, in, out]`.
    Llama4,
    /// Filled in by hand.
    Custom,
}

/// Value of a number whose key a config leaves out. (A null is the derived value wherever there is one.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absent {
    /// Derived from other fields: hidden / heads for a head size, heads for key/value heads.
    Derived,
    /// The config class's constant.
    Constant(usize),
    /// An error: this is a size of the one model, and published configs state it.
    Required,
}

/// Which layers slide their window where `layer_types` does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Windows {
    /// Never (`sliding_window` is not read).
    None,
    /// All layers, where `sliding_window` is a number; absent, it is as said here.
    All {
        /// The config class's default is a number.
        by_default: bool,
    },
    /// All layers, where `use_sliding_window` is true.
    AllIfUsed,
    /// Layers from `max_window_layers` on, where `use_sliding_window` is true.
    FromLayer,
    /// Every other layer up to `max_window_layers`, where `use_sliding_window` is true.
    EvenBeforeLayer,
    /// Every layer but each n-th.
    AllButEach {
        /// Where n stands, if a config may say.
        key: Option<&'static str>,
        /// n where it does not.
        default: usize,
    },
    /// Linear attention but for each n-th layer, n from `full_attention_interval`, 4.
    LinearButEach,
    /// Chunked where `no_rope_layers` is 1.
    ChunkedByRope,
}

/// Which layers are MoE, and where the experts' width stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Experts {
    /// The family has none.
    None,
    /// All layers; expert width in `intermediate_size`.
    All,
    /// All layers; expert width in `moe_intermediate_size`.
    AllOwnWidth,
    /// By `decoder_sparse_step` and `mlp_only_layers`; expert width in `moe_intermediate_size`.
    Stepped,
    /// By `moe_layers` or `interleave_moe_layer_step`; expert width in `intermediate_size`, dense in `intermediate_size_mlp`.
    Interleaved,
}

/// The shared expert of MoE layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SharedExpert {
    None,
    /// Width in `shared_expert_intermediate_size`, output gated.
    Gated,
    /// As wide as an expert, not gated.
    LikeExpert,
}

/// What a family's config class fills in.
#[derive(Debug, Clone, Copy)]
pub(super) struct FamilyRules {
    pub(super) heads: Absent,
    pub(super) kv_heads: Absent,
    pub(super) head_dim: Absent,
    pub(super) vocab_size: Absent,
    pub(super) tied_embeddings: bool,
    pub(super) gated_attention: bool,
    pub(super) fused_projections: bool,
    pub(super) activation_key: &'static str,
    pub(super) activation: &'static str,
    pub(super) windows: Windows,
    pub(super) linear_inputs: Option<LinearInputs>,
    pub(super) experts: Experts,
    pub(super) shared_expert: SharedExpert,
    pub(super) top_k: usize,
    pub(super) norm_topk_prob: NormTopK,
    pub(super) stacked_axes: StackedAxes,
    pub(super) gate_up: GateUpOrder,
    pub(super) is_transposed: bool,
    pub(super) block_name: &'static str,
    pub(super) router_name: &'static str,
}

/// Whether the chosen experts' weights are scaled to sum to 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NormTopK {
    /// The family always or never does; the key is not read.
    Fixed(bool),
    /// `norm_topk_prob`, with this default.
    Key(bool),
}

/// A dense model as most config classes describe it: what the families are described as differing from.
const DENSE: FamilyRules = FamilyRules {
    heads: Absent::Required,
    kv_heads: Absent::Required,
    head_dim: Absent::Derived,
    vocab_size: Absent::Required,
    tied_embeddings: false,
    gated_attention: false,
    fused_projections: false,
    activation_key: "hidden_act",
    activation: "silu",
    windows: Windows::None,
    linear_inputs: None,
    experts: Experts::None,
    shared_expert: SharedExpert::None,
    top_k: 0,
    norm_topk_prob: NormTopK::Fixed(true),
    stacked_axes: StackedAxes::OutIn,
    gate_up: GateUpOrder::Concatenated,
    is_transposed: false,
    block_name: "mlp",
    router_name: "gate",
};

const QWEN3_NEXT: FamilyRules = FamilyRules {
    head_dim: Absent::Constant(256),
    gated_attention: true,
    windows: Windows::LinearButEach,
    linear_inputs: Some(LinearInputs::Fused),
    experts: Experts::Stepped,
    shared_expert: SharedExpert::Gated,
    top_k: 10,
    norm_topk_prob: NormTopK::Key(true),
    ..DENSE
};

const QWEN3_5: FamilyRules = FamilyRules {
    linear_inputs: Some(LinearInputs::Split),
    experts: Experts::None,
    shared_expert: SharedExpert::None,
    ..QWEN3_NEXT
};

const LLAMA: FamilyRules = FamilyRules {
    kv_heads: Absent::Derived,
    ..DENSE
};

const MISTRAL: FamilyRules = FamilyRules {
    windows: Windows::All { by_default: true },
    ..DENSE
};

const PHI3: FamilyRules = FamilyRules {
    kv_heads: Absent::Derived,
    fused_projections: true,
    windows: Windows::All { by_default: false },
    ..DENSE
};

const QWEN2: FamilyRules = FamilyRules {
    windows: Windows::FromLayer,
    ..DENSE
};

const QWEN3: FamilyRules = FamilyRules {
    head_dim: Absent::Constant(128),
    windows: Windows::FromLayer,
    ..DENSE
};

const QWEN3_VL: FamilyRules = FamilyRules {
    head_dim: Absent::Constant(128),
    ..DENSE
};

const QWEN2_MOE: FamilyRules = FamilyRules {
    windows: Windows::EvenBeforeLayer,
    experts: Experts::Stepped,
    shared_expert: SharedExpert::Gated,
    top_k: 4,
    norm_topk_prob: NormTopK::Key(false),
    ..DENSE
};

const QWEN3_MOE: FamilyRules = FamilyRules {
    windows: Windows::AllIfUsed,
    experts: Experts::Stepped,
    top_k: 8,
    norm_topk_prob: NormTopK::Key(false),
    ..DENSE
};

const QWEN3_5_MOE: FamilyRules = FamilyRules {
    experts: Experts::AllOwnWidth,
    shared_expert: SharedExpert::Gated,
    top_k: 8,
    norm_topk_prob: NormTopK::Fixed(true),
    ..QWEN3_5
};

const MIXTRAL: FamilyRules = FamilyRules {
    windows: Windows::All { by_default: false },
    experts: Experts::All,
    top_k: 2,
    ..DENSE
};

const GPT_OSS: FamilyRules = FamilyRules {
    head_dim: Absent::Constant(64),
    windows: Windows::AllButEach {
        key: None,
        default: 2,
    },
    experts: Experts::All,
    top_k: 4,
    stacked_axes: StackedAxes::InOut,
    gate_up: GateUpOrder::Interleaved,
    is_transposed: true,
    router_name: "router",
    ..DENSE
};

const GEMMA3: FamilyRules = FamilyRules {
    heads: Absent::Constant(8),
    kv_heads: Absent::Constant(4),
    head_dim: Absent::Constant(256),
    vocab_size: Absent::Constant(262_208),
    tied_embeddings: true,
    activation_key: "hidden_activation",
    activation: "gelu_pytorch_tanh",
    windows: Windows::AllButEach {
        key: Some("sliding_window_pattern"),
        default: 6,
    },
    ..DENSE
};

const LLAMA4: FamilyRules = FamilyRules {
    head_dim: Absent::Constant(128),
    windows: Windows::ChunkedByRope,
    experts: Experts::Interleaved,
    shared_expert: SharedExpert::LikeExpert,
    top_k: 1,
    norm_topk_prob: NormTopK::Fixed(false),
    stacked_axes: StackedAxes::InOut,
    block_name: "feed_forward",
    router_name: "router",
    ..DENSE
};

impl ModelFamily {
    /// Every `model_type` that is known, without `_text`.
    pub const NAMES: [&'static str; 15] = {
        let mut names = [""; 15];
        let mut index = 0;
        while index < names.len() {
            names[index] = Self::KNOWN[index].1;
            index += 1;
        }
        names
    };

    const KNOWN: [(Self, &'static str); 15] = [
        (Self::Llama, "llama"),
        (Self::Mistral, "mistral"),
        (Self::Qwen2, "qwen2"),
        (Self::Qwen2Moe, "qwen2_moe"),
        (Self::Qwen3, "qwen3"),
        (Self::Qwen3Moe, "qwen3_moe"),
        (Self::Qwen3Next, "qwen3_next"),
        (Self::Qwen35, "qwen3_5"),
        (Self::Qwen35Moe, "qwen3_5_moe"),
        (Self::Qwen3Vl, "qwen3_vl"),
        (Self::Mixtral, "mixtral"),
        (Self::GptOss, "gpt_oss"),
        (Self::Gemma3, "gemma3"),
        (Self::Phi3, "phi3"),
        (Self::Llama4, "llama4"),
    ];

    /// The family of a `model_type`, with or without `_text`.
    pub fn from_model_type(model_type: &str) -> Option<Self> {
        let name = model_type.strip_suffix("_text").unwrap_or(model_type);
        Self::KNOWN
            .iter()
            .find_map(|(family, known)| (*known == name).then_some(*family))
    }

    /// `model_type` without `_text`; `custom` for [`Self::Custom`].
    pub fn name(self) -> &'static str {
        Self::KNOWN
            .iter()
            .find_map(|(family, name)| (*family == self).then_some(*name))
            .unwrap_or("custom")
    }

    /// What the family's config class fills in, as of transformers 5.24.
    pub(super) fn rules(self) -> FamilyRules {
        match self {
            Self::Custom => DENSE,
            Self::Llama => LLAMA,
            Self::Mistral => MISTRAL,
            Self::Phi3 => PHI3,
            Self::Qwen2 => QWEN2,
            Self::Qwen3 => QWEN3,
            Self::Qwen3Vl => QWEN3_VL,
            Self::Qwen2Moe => QWEN2_MOE,
            Self::Qwen3Moe => QWEN3_MOE,
            Self::Qwen3Next => QWEN3_NEXT,
            Self::Qwen35 => QWEN3_5,
            Self::Qwen35Moe => QWEN3_5_MOE,
            Self::Mixtral => MIXTRAL,
            Self::GptOss => GPT_OSS,
            Self::Gemma3 => GEMMA3,
            Self::Llama4 => LLAMA4,
        }
    }
}

impl fmt::Display for ModelFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
