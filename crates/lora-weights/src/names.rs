use lora_config::{ModelSpec, TokenTable};

/// A projection that dense adapters apply to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum LoraModule {
    QProj,
    KProj,
    VProj,
    OProj,
    GateProj,
    UpProj,
    DownProj,
    /// GDN (`linear_attn`) output projection.
    OutProj,
    SharedGateProj,
    SharedUpProj,
    SharedDownProj,
    SharedExpertGate,
    InProjQkv,
    InProjZ,
    InProjA,
    InProjB,
    InProjQkvz,
    InProjBa,
    QkvProj,
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
    /// PEFT's path inside a layer: `self_attn.q_proj`.
    pub fn peft_name(self) -> &'static str {
        unimplemented!()
    }
    /// `(out, in)` widths; `None` where the model has no such module.
    pub fn dims(self, _spec: &ModelSpec, _layer: usize) -> Option<(usize, usize)> {
        unimplemented!()
    }
    /// Whether `layer` of the model has this module.
    pub fn applies_to_layer(self, _spec: &ModelSpec, _layer: usize) -> bool {
        unimplemented!()
    }
}

/// A projection of one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum ExpertProj {
    Gate,
    Up,
    Down,
}

impl ExpertProj {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];
    /// `(out, in)` widths; `None` on a dense model.
    pub fn dims(self, _spec: &ModelSpec) -> Option<(usize, usize)> {
        unimplemented!()
    }
}

/// What a pair of tensors applies to inside a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LoraTarget {
    /// A dense module (attention, FFN, GDN, extended).
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

/// Which of the two matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum AdapterAb {
    A,
    B,
}

/// A vocabulary table.
pub type OverlayModule = TokenTable;

/// What an overlay tensor holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum OverlayTensorKind {
    Base,
    Delta,
    FullTable,
    EmbeddingA,
    EmbeddingB,
}
