/// Model families whose geometry [`ModelSpec::from_hf_config`] derives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum ModelFamily {
    Llama,
    Mistral,
    Qwen2,
    Qwen2Moe,
    Qwen3,
    Qwen3Moe,
    Qwen3Next,
    Qwen35,
    Qwen35Moe,
    Qwen3Vl,
    Mixtral,
    GptOss,
    Gemma3,
    Phi3,
    Llama4,
    /// Built by hand by the caller.
    Custom,
}

/// What a layer's token mixer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    /// Full softmax attention.
    Full,
    /// Sliding-window attention.
    Sliding,
    /// Chunked attention (Llama 4).
    Chunked,
    /// Linear attention (gated delta net): `linear_attn.*` modules.
    Linear,
}
impl AttentionKind {
    /// True for everything but linear attention: the layer has `self_attn.{q,k,v,o}_proj`.
    pub fn is_attention(self) -> bool {
        self != Self::Linear
    }
}

/// What a layer's feed-forward block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FfnKind {
    /// Dense gate/up/down of this width.
    Dense {
        /// Intermediate size.
        width: usize,
    },
    /// Mixture of experts, as [`ModelSpec::moe`] says.
    Moe,
    /// No feed-forward block.
    Absent,
}

/// One decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerSpec {
    /// Token mixer.
    pub attention: AttentionKind,
    /// Feed-forward block.
    pub ffn: FfnKind,
}

/// Axes of a stacked expert parameter `[E, d1, d2]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StackedAxes {
    /// `[E, out, in]`: Qwen, Mixtral.
    OutIn,
    /// `[E, in, out]`: GPT-OSS (`is_transposed`) and Llama 4.
    InOut,
}

/// How gate and up share the output axis of a fused `gate_up_proj`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GateUpOrder {
    /// First half gate, second half up.
    Concatenated,
    /// Even rows gate, odd rows up (GPT-OSS).
    Interleaved,
}

/// Mixture-of-experts geometry, shared by all MoE layers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MoeSpec {
    /// Experts a layer.
    pub num_experts: usize,
    /// Experts a token (0 where the config does not say).
    pub top_k: usize,
    /// Intermediate size of one expert.
    pub expert_width: usize,
    /// Intermediate size of the shared expert, if there is one.
    pub shared_expert_width: Option<usize>,
    /// Axes of stacked expert parameters.
    pub stacked_axes: StackedAxes,
    /// Order of gate and up in a stacked `gate_up_proj`.
    pub gate_up: GateUpOrder,
    /// True where Hugging Face marks the stacked experts `is_transposed` (GPT-OSS, not Llama 4): decides
    /// the PEFT layout epoch together with `peft_version`.
    pub is_transposed: bool,
    /// Module path of the block inside a layer: `mlp`, `block_sparse_moe`, `feed_forward`.
    pub block_name: &'static str,
    /// Last segment of the router's name inside the block: `gate` or `router`.
    pub router_name: &'static str,
}

/// Linear-attention geometry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LinearAttentionSpec {
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads.
    pub value_heads: usize,
    /// Size of a key head.
    pub key_head_dim: usize,
    /// Size of a value head.
    pub value_head_dim: usize,
}

/// The geometry of a model that adapters are checked against and sized by.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Family.
    pub family: ModelFamily,
    /// Hidden size.
    pub hidden_size: usize,
    /// One entry a decoder layer, by global index.
    pub layers: Vec<LayerSpec>,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Size of an attention head.
    pub head_dim: usize,
    /// q_proj is twice as wide (`[Q|gate]` interleaved per head).
    pub gated_attention: bool,
    /// q, k, v in one `qkv_proj`, gate and up in one `gate_up_proj` (Phi-3).
    pub fused_projections: bool,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// The LM head is the embedding table.
    pub tied_embeddings: bool,
    /// Present where any layer is MoE.
    pub moe: Option<MoeSpec>,
    /// Present where any layer is linear attention.
    pub linear_attention: Option<LinearAttentionSpec>,
}

impl ModelSpec {
    /// From the text of a Hugging Face `config.json`.
    pub fn from_hf_config(_json: &str) -> Result<Self, crate::ConfigError> {
        unimplemented!()
    }
}
