//! Model geometry: what an adapter's shapes are checked against, and what pools are sized by.

mod family;
mod layers;
mod reader;
mod validate;

pub use family::ModelFamily;

use crate::ConfigError;

/// Most decoder layers a model may have.
pub const MAX_LAYERS: usize = 4096;
/// Largest width (hidden size, FFN width, all heads of a projection together) a model may have.
pub const MAX_WIDTH: usize = 1 << 24;
/// Most experts a layer may have.
pub const MAX_EXPERTS: usize = 1 << 16;
/// Largest vocabulary: token ids are i32 on the device.
pub const MAX_VOCAB: usize = i32::MAX as usize;

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
    /// Dense gate, up and down.
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
    /// `[E, in, out]`: GPT-OSS and Llama 4.
    InOut,
}

/// How gate and up share the output axis of a fused `gate_up_proj`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GateUpOrder {
    /// First half gate, second half up.
    Concatenated,
    /// Even outputs gate, odd outputs up (GPT-OSS).
    Interleaved,
}

/// Mixture-of-experts geometry, shared by all MoE layers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MoeSpec {
    /// Experts a layer.
    pub num_experts: usize,
    /// Experts a token is sent to; 0 where a spec filled in by hand does not say.
    pub top_k: usize,
    /// The weights of the chosen experts are scaled to sum to 1.
    pub norm_topk_prob: bool,
    /// Intermediate size of one expert.
    pub expert_width: usize,
    /// Intermediate size of the shared expert, if there is one.
    pub shared_expert_width: Option<usize>,
    /// The shared expert's output is gated by a `shared_expert_gate` (Qwen; not Llama 4).
    pub shared_expert_gate: bool,
    /// Axes of stacked expert parameters.
    pub stacked_axes: StackedAxes,
    /// Order of gate and up in a stacked `gate_up_proj`.
    pub gate_up: GateUpOrder,
    /// True where Hugging Face marks the stacked experts `is_transposed` (GPT-OSS, not Llama 4): decides the layout of a stacked
    /// adapter together with `peft_version`.
    pub is_transposed: bool,
    /// Module path of the feed-forward block inside a layer, dense layers included: `mlp`, or `feed_forward` (Llama 4).
    /// Mixtral's older `block_sparse_moe` is a spelling of adapter files, not of the model.
    pub block_name: &'static str,
    /// Last segment of the router's name inside the block: `gate` or `router`.
    pub router_name: &'static str,
}

/// How a linear-attention layer's input projections are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinearInputs {
    /// `in_proj_qkvz` and `in_proj_ba` (Qwen3-Next).
    Fused,
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` (Qwen3.5).
    Split,
}

/// Linear-attention geometry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LinearAttentionSpec {
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads, a multiple of the key heads.
    pub value_heads: usize,
    /// Size of a key head.
    pub key_head_dim: usize,
    /// Size of a value head.
    pub value_head_dim: usize,
    /// Which input projections there are.
    pub inputs: LinearInputs,
}

impl LinearAttentionSpec {
    /// Width of all keys, and of all queries: `key_heads * key_head_dim`.
    pub fn key_width(&self) -> usize {
        self.key_heads.saturating_mul(self.key_head_dim)
    }

    /// Width of all values, the input of `out_proj`: `value_heads * value_head_dim`.
    pub fn value_width(&self) -> usize {
        self.value_heads.saturating_mul(self.value_head_dim)
    }
}

/// The geometry of a model that adapters are checked against and sized by.
///
/// [`Self::from_hf_config`] derives it for the families it knows. Every field is public: override a number that a config
/// gets wrong, or fill the whole in for a family it does not know, then call [`Self::validate`].
///
/// ```
/// use lora_config::{AttentionKind, FfnKind, LayerSpec, ModelFamily, ModelSpec};
///
/// let layer = LayerSpec { attention: AttentionKind::Full, ffn: FfnKind::Dense { width: 11008 } };
/// let spec = ModelSpec {
///     family: ModelFamily::Custom,
///     hidden_size: 4096,
///     layers: vec![layer; 32],
///     heads: 32,
///     kv_heads: 8,
///     head_dim: 128,
///     gated_attention: false,
///     fused_projections: false,
///     vocab_size: 32000,
///     tied_embeddings: false,
///     hidden_act: "silu".to_owned(),
///     moe: None,
///     linear_attention: None,
/// };
/// spec.validate()?;
/// assert_eq!(spec.q_width(), 4096);
/// # Ok::<(), lora_config::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelSpec {
    /// Family.
    pub family: ModelFamily,
    /// Hidden size: width of the residual stream.
    pub hidden_size: usize,
    /// One entry a decoder layer, by global index.
    pub layers: Vec<LayerSpec>,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Size of an attention head.
    pub head_dim: usize,
    /// q_proj is twice as wide (`[Q|gate]`, interleaved per head).
    pub gated_attention: bool,
    /// q, k, v in one `qkv_proj`, gate and up in one `gate_up_proj` (Phi-3).
    pub fused_projections: bool,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// The LM head is the embedding table.
    pub tied_embeddings: bool,
    /// Activation of the FFN, by Hugging Face's name (`silu`, `gelu_pytorch_tanh`). GPT-OSS' experts clamp theirs, which its
    /// config does not say here.
    pub hidden_act: String,
    /// Present where any layer is MoE.
    pub moe: Option<MoeSpec>,
    /// Present where any layer is linear attention.
    pub linear_attention: Option<LinearAttentionSpec>,
}

impl ModelSpec {
    /// Derives the geometry from the text of a Hugging Face `config.json`. Of a multimodal model it is the text model's
    /// (`text_config`).
    ///
    /// A field may be absent where Hugging Face's own config class fills it in from others or has one value for the
    /// whole family (`head_dim`, `num_key_value_heads`, layer types, how MoE layers alternate); sizes are never assumed, except those that
    /// published Gemma 3 configs leave out.
    ///
    /// # Errors
    /// [`ConfigError::ModelJson`] for a text that is no JSON object or repeats a key, [`ConfigError::UnknownFamily`] and
    /// [`ConfigError::ModelField`], which names the field, for what is missing, contradictory or out of bounds.
    pub fn from_hf_config(json: &str) -> Result<Self, ConfigError> {
        reader::from_hf_config(json)
    }

    /// What the model multiplies embedding rows by, before it is rounded to the dtype of the table: the square root of the hidden size for Gemma.
    pub fn embed_scale(&self) -> Option<f32> {
        (self.family == ModelFamily::Gemma3).then(|| (self.hidden_size as f32).sqrt())
    }

    /// Outputs of q_proj: `heads * head_dim`, twice that where attention is gated.
    pub fn q_width(&self) -> usize {
        let gate = 1 + usize::from(self.gated_attention);
        self.attention_width().saturating_mul(gate)
    }

    /// Inputs of o_proj: `heads * head_dim`.
    pub fn attention_width(&self) -> usize {
        self.heads.saturating_mul(self.head_dim)
    }

    /// Outputs of k_proj, and of v_proj: `kv_heads * head_dim`.
    pub fn kv_width(&self) -> usize {
        self.kv_heads.saturating_mul(self.head_dim)
    }

    /// Module path of the feed-forward block inside a layer: `mlp`, or `feed_forward` for Llama 4.
    pub fn ffn_block(&self) -> &'static str {
        match (&self.moe, self.family) {
            (Some(moe), _) => moe.block_name,
            (None, ModelFamily::Llama4) => "feed_forward",
            (None, _) => "mlp",
        }
    }
}
