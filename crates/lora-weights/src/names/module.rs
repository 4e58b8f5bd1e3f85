use lora_config::{AttentionKind, FfnKind, LinearAttentionSpec, LinearInputs, ModelSpec, MoeSpec};

/// A projection that an ordinary pair of matrices adapts.
///
/// The first eight ([`ALL`](Self::ALL)) have room in every pool; the others ([`EXTENDED`](Self::EXTENDED)) only where
/// [`PoolSpec::modules`](crate::PoolSpec::modules) names them, because an engine must have a place to apply them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LoraModule {
    /// `self_attn.q_proj`; twice as wide where the model gates its attention output: the delta folds into the raw
    /// projection, whose rows are `[Q|gate]` interleaved per head.
    QProj,
    /// `self_attn.k_proj`.
    KProj,
    /// `self_attn.v_proj`.
    VProj,
    /// `self_attn.o_proj`.
    OProj,
    /// `mlp.gate_proj` of a dense layer.
    GateProj,
    /// `mlp.up_proj` of a dense layer.
    UpProj,
    /// `mlp.down_proj` of a dense layer.
    DownProj,
    /// `linear_attn.out_proj`: output of a gated delta net.
    OutProj,
    /// `mlp.shared_expert.gate_proj`.
    SharedGateProj,
    /// `mlp.shared_expert.up_proj`.
    SharedUpProj,
    /// `mlp.shared_expert.down_proj`.
    SharedDownProj,
    /// `mlp.shared_expert_gate`: one logit a token.
    SharedExpertGate,
    /// `linear_attn.in_proj_qkv` (Qwen3.5).
    InProjQkv,
    /// `linear_attn.in_proj_z` (Qwen3.5).
    InProjZ,
    /// `linear_attn.in_proj_a` (Qwen3.5).
    InProjA,
    /// `linear_attn.in_proj_b` (Qwen3.5).
    InProjB,
    /// `linear_attn.in_proj_qkvz` (Qwen3-Next).
    InProjQkvz,
    /// `linear_attn.in_proj_ba` (Qwen3-Next).
    InProjBa,
    /// `self_attn.qkv_proj` (Phi-3): q, k and v rows one after the other.
    QkvProj,
    /// `mlp.gate_up_proj` of a dense layer (Phi-3): gate rows, then up rows.
    GateUpProj,
}

impl LoraModule {
    /// The modules every pool holds by default, in layout order.
    pub const ALL: [Self; 8] = [
        Self::QProj,
        Self::KProj,
        Self::VProj,
        Self::OProj,
        Self::GateProj,
        Self::UpProj,
        Self::DownProj,
        Self::OutProj,
    ];
    /// The modules a pool holds only where its spec enables them, in layout order after [`Self::ALL`].
    pub const EXTENDED: [Self; 12] = [
        Self::SharedGateProj,
        Self::SharedUpProj,
        Self::SharedDownProj,
        Self::SharedExpertGate,
        Self::InProjQkv,
        Self::InProjZ,
        Self::InProjA,
        Self::InProjB,
        Self::InProjQkvz,
        Self::InProjBa,
        Self::QkvProj,
        Self::GateUpProj,
    ];

    /// Every module, [`ALL`](Self::ALL) then [`EXTENDED`](Self::EXTENDED).
    pub fn every() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().chain(Self::EXTENDED)
    }

    /// PEFT's path inside a layer, as in `self_attn.q_proj`. Llama 4 writes `feed_forward` for `mlp`.
    pub fn peft_name(self) -> &'static str {
        match self {
            Self::QProj => "self_attn.q_proj",
            Self::KProj => "self_attn.k_proj",
            Self::VProj => "self_attn.v_proj",
            Self::OProj => "self_attn.o_proj",
            Self::GateProj => "mlp.gate_proj",
            Self::UpProj => "mlp.up_proj",
            Self::DownProj => "mlp.down_proj",
            Self::OutProj => "linear_attn.out_proj",
            Self::SharedGateProj => "mlp.shared_expert.gate_proj",
            Self::SharedUpProj => "mlp.shared_expert.up_proj",
            Self::SharedDownProj => "mlp.shared_expert.down_proj",
            Self::SharedExpertGate => "mlp.shared_expert_gate",
            Self::InProjQkv => "linear_attn.in_proj_qkv",
            Self::InProjZ => "linear_attn.in_proj_z",
            Self::InProjA => "linear_attn.in_proj_a",
            Self::InProjB => "linear_attn.in_proj_b",
            Self::InProjQkvz => "linear_attn.in_proj_qkvz",
            Self::InProjBa => "linear_attn.in_proj_ba",
            Self::QkvProj => "self_attn.qkv_proj",
            Self::GateUpProj => "mlp.gate_up_proj",
        }
    }

    /// The path inside a layer as this model spells it: [`peft_name`](Self::peft_name) with `feed_forward` for `mlp`
    /// on Llama 4.
    pub(crate) fn name_in(self, spec: &ModelSpec) -> String {
        match self.peft_name().strip_prefix("mlp.") {
            Some(rest) => format!("{}.{rest}", spec.ffn_block()),
            None => self.peft_name().to_owned(),
        }
    }

    /// The module that PEFT calls `name`, whatever the model.
    pub(crate) fn from_peft_name(name: &str) -> Option<Self> {
        Self::every().find(|module| module.peft_name() == name)
    }

    /// True for the inputs of a gated delta net (`linear_attn.in_proj_*`).
    pub fn is_gdn_input(self) -> bool {
        self.peft_name().starts_with("linear_attn.") && self != Self::OutProj
    }

    /// `(out, in)`: rows of B and columns of A, which are the rows and columns of the base weight.
    ///
    /// Widths can differ from layer to layer, and a model has not every module on every layer: `None` where `layer` is past
    /// the model or does not have this module.
    pub fn dims(self, spec: &ModelSpec, layer: usize) -> Option<(usize, usize)> {
        let kinds = spec.layers.get(layer)?;
        match self {
            Self::QProj | Self::KProj | Self::VProj | Self::OProj | Self::QkvProj => kinds
                .attention
                .is_attention()
                .then(|| self.attention_dims(spec))?,
            Self::GateProj | Self::UpProj | Self::DownProj | Self::GateUpProj => match kinds.ffn {
                FfnKind::Dense { width } => self.dense_ffn_dims(spec, width),
                FfnKind::Moe | FfnKind::Absent => None,
            },
            Self::SharedGateProj
            | Self::SharedUpProj
            | Self::SharedDownProj
            | Self::SharedExpertGate => {
                let moe = spec.moe.as_ref().filter(|_| kinds.ffn == FfnKind::Moe)?;
                self.shared_expert_dims(spec, moe)
            }
            Self::OutProj
            | Self::InProjQkv
            | Self::InProjZ
            | Self::InProjA
            | Self::InProjB
            | Self::InProjQkvz
            | Self::InProjBa => {
                let is_linear = kinds.attention == AttentionKind::Linear;
                let linear = spec.linear_attention.as_ref().filter(|_| is_linear)?;
                self.gdn_dims(spec.hidden_size, linear)
            }
        }
    }

    /// Whether `layer` of the model has this module: q, k, v, o on attention layers (full, sliding, chunked), `out_proj` and the
    /// other `linear_attn` modules on linear-attention layers, the dense FFN on layers whose FFN is dense, the shared
    /// expert on MoE layers.
    pub fn applies_to_layer(self, spec: &ModelSpec, layer: usize) -> bool {
        self.dims(spec, layer).is_some()
    }

    fn attention_dims(self, spec: &ModelSpec) -> Option<(usize, usize)> {
        let (hidden, q, kv) = (spec.hidden_size, spec.q_width(), spec.kv_width());
        match (self, spec.fused_projections) {
            (Self::QProj, false) => Some((q, hidden)),
            (Self::KProj | Self::VProj, false) => Some((kv, hidden)),
            (Self::OProj, _) => Some((hidden, spec.attention_width())),
            (Self::QkvProj, true) => Some((q.saturating_add(kv).saturating_add(kv), hidden)),
            _ => None,
        }
    }

    fn dense_ffn_dims(self, spec: &ModelSpec, width: usize) -> Option<(usize, usize)> {
        let hidden = spec.hidden_size;
        match (self, spec.fused_projections) {
            (Self::GateProj | Self::UpProj, false) => Some((width, hidden)),
            (Self::DownProj, _) => Some((hidden, width)),
            (Self::GateUpProj, true) => Some((width.saturating_mul(2), hidden)),
            _ => None,
        }
    }

    fn shared_expert_dims(self, spec: &ModelSpec, moe: &MoeSpec) -> Option<(usize, usize)> {
        let (hidden, width) = (spec.hidden_size, moe.shared_expert_width?);
        match self {
            Self::SharedGateProj | Self::SharedUpProj => Some((width, hidden)),
            Self::SharedDownProj => Some((hidden, width)),
            Self::SharedExpertGate => moe.shared_expert_gate.then_some((1, hidden)),
            _ => None,
        }
    }

    fn gdn_dims(self, hidden: usize, linear: &LinearAttentionSpec) -> Option<(usize, usize)> {
        let (key, value) = (linear.key_width(), linear.value_width());
        let qkv = key.saturating_mul(2).saturating_add(value);
        match (self, linear.inputs) {
            (Self::OutProj, _) => Some((hidden, value)),
            (Self::InProjQkv, LinearInputs::Split) => Some((qkv, hidden)),
            (Self::InProjZ, LinearInputs::Split) => Some((value, hidden)),
            (Self::InProjA | Self::InProjB, LinearInputs::Split) => {
                Some((linear.value_heads, hidden))
            }
            (Self::InProjQkvz, LinearInputs::Fused) => Some((qkv.saturating_add(value), hidden)),
            (Self::InProjBa, LinearInputs::Fused) => {
                Some((linear.value_heads.saturating_mul(2), hidden))
            }
            _ => None,
        }
    }
}

/// A projection of one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExpertProj {
    /// `gate_proj`, Mixtral's `w1`.
    Gate,
    /// `up_proj`, Mixtral's `w3`.
    Up,
    /// `down_proj`, Mixtral's `w2`.
    Down,
}

impl ExpertProj {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// PEFT's name: `gate_proj`, `up_proj`, `down_proj`.
    pub fn peft_name(self) -> &'static str {
        match self {
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }

    /// The name inside Mixtral's `block_sparse_moe.experts.N`: `w1`, `w3`, `w2`.
    pub(crate) fn mixtral_name(self) -> &'static str {
        match self {
            Self::Gate => "w1",
            Self::Up => "w3",
            Self::Down => "w2",
        }
    }

    /// `(out, in)` widths of one expert; `None` on a dense model.
    pub fn dims(self, spec: &ModelSpec) -> Option<(usize, usize)> {
        let moe = spec.moe.as_ref()?;
        Some(match self {
            Self::Gate | Self::Up => (moe.expert_width, spec.hidden_size),
            Self::Down => (spec.hidden_size, moe.expert_width),
        })
    }
}

/// `(out, in)` of the router: one logit an expert; `None` on a dense model.
pub fn router_dims(spec: &ModelSpec) -> Option<(usize, usize)> {
    let moe = spec.moe.as_ref()?;
    Some((moe.num_experts, spec.hidden_size))
}

/// Global indices of the layers that have q, k, v and o: all that are not linear attention.
pub fn full_attention_layers(spec: &ModelSpec) -> Vec<usize> {
    let attention = |(index, layer): (usize, &lora_config::LayerSpec)| {
        layer.attention.is_attention().then_some(index)
    };
    spec.layers
        .iter()
        .enumerate()
        .filter_map(attention)
        .collect()
}

/// What a pair of matrices applies to inside a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LoraTarget {
    /// A module of which a layer has one (attention, FFN, gated delta net, shared expert).
    Attn(LoraModule),
    /// The MoE router.
    Router,
    /// One expert's projection.
    Expert {
        /// Expert index.
        n: usize,
        /// Projection.
        proj: ExpertProj,
    },
}

impl LoraTarget {
    /// `(out, in)` of the base weight on `layer`; `None` where the layer has no such target.
    pub fn dims(self, spec: &ModelSpec, layer: usize) -> Option<(usize, usize)> {
        let is_moe = || {
            spec.layers
                .get(layer)
                .is_some_and(|l| l.ffn == FfnKind::Moe)
        };
        match self {
            Self::Attn(module) => module.dims(spec, layer),
            Self::Router => is_moe().then(|| router_dims(spec))?,
            Self::Expert { n, proj } => {
                let moe = spec.moe.as_ref().filter(|_| is_moe())?;
                (n < moe.num_experts).then(|| proj.dims(spec))?
            }
        }
    }

    /// PEFT's path inside a layer, the expert's number left out: `self_attn.q_proj`, `mlp.gate`, `mlp.experts.up_proj`.
    pub fn module_name(self) -> &'static str {
        match self {
            Self::Attn(module) => module.peft_name(),
            Self::Router => "mlp.gate",
            Self::Expert { proj, .. } => match proj {
                ExpertProj::Gate => "mlp.experts.gate_proj",
                ExpertProj::Up => "mlp.experts.up_proj",
                ExpertProj::Down => "mlp.experts.down_proj",
            },
        }
    }

    /// True for everything but routers and experts: a module that has its room in a slot of the pool.
    pub fn is_dense(self) -> bool {
        matches!(self, Self::Attn(_))
    }

    /// The expert's number, for an expert.
    pub fn expert(self) -> Option<usize> {
        match self {
            Self::Expert { n, .. } => Some(n),
            Self::Attn(_) | Self::Router => None,
        }
    }
}

/// Which of the two matrices of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AdapterAb {
    /// `lora_A`, `[r, in]`.
    A,
    /// `lora_B`, `[out, r]`.
    B,
}
