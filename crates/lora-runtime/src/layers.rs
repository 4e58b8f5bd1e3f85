//! What an engine installs on its layers: pairs and routes by copy, one type a layer kind.
//!
//! Pairs are those of the active adapter, for steps in which every row follows it; routes are addresses fixed for life,
//! for steps in which each row follows its own. After a load, swap or rotation of the active slot the pairs are
//! installed again ([`LoraRuntime::layer`](crate::LoraRuntime::layer)); routes stay what they are.
//!
//! Outputs of row-parallel projections (attention's o, down, the GDN output projection) take an [`AllReduced`] output:
//! a delta added before the all-reduce would be added once per rank.

use crate::InstallError;
use lora_config::FfnKind;
use lora_kernels::{
    Applied, GateUpOut, KernelError, LaunchContext, LoraAttnWeights, LoraFfnWeights, LoraRows,
    LoraSite, MatMut, MatRef, QkvOut, SiteKind,
};
use lora_moe::ExpertFold;
use lora_weights::{ExpertLoraLayer, LoraModule};

/// The output of a row-parallel projection after the tensor-parallel all-reduce, which is when its delta is added.
#[derive(Debug)]
pub struct AllReduced<'a>(MatMut<'a>);

impl<'a> AllReduced<'a> {
    /// Output that was summed over all ranks. With one rank every output is.
    pub fn new(out: MatMut<'a>) -> Self {
        Self(out)
    }
}

/// A decoder layer.
#[expect(
    clippy::large_enum_variant,
    reason = "one a layer, made at start and borrowed from then on"
)]
#[derive(Debug, Clone, PartialEq)]
pub enum LayerLora {
    /// Softmax attention: full, sliding or chunked.
    Attention(AttentionLayer),
    /// Linear attention (gated delta net).
    LinearAttention(LinearAttentionLayer),
}

impl LayerLora {
    /// The feed-forward block, to install on.
    pub fn ffn_mut(&mut self) -> &mut FfnLora {
        match self {
            Self::Attention(layer) => &mut layer.ffn,
            Self::LinearAttention(layer) => &mut layer.ffn,
        }
    }

    /// The feed-forward block.
    pub fn ffn(&self) -> &FfnLora {
        match self {
            Self::Attention(layer) => &layer.ffn,
            Self::LinearAttention(layer) => &layer.ffn,
        }
    }

    /// Global layer index.
    pub fn index(&self) -> usize {
        self.ffn().layer
    }

    /// Installs dense FFN deltas; see [`FfnLora::set_ffn_lora_weights`].
    ///
    /// # Errors
    /// [`InstallError::DenseFfn`], [`InstallError::WrongLayer`].
    pub fn set_ffn_lora_weights(&mut self, weights: LoraFfnWeights) -> Result<(), InstallError> {
        self.ffn_mut().set_ffn_lora_weights(weights)
    }

    /// Installs router, shared-expert and expert deltas; see [`FfnLora::set_moe_lora_weights`].
    ///
    /// # Errors
    /// [`InstallError::MoeFfn`], [`InstallError::WrongLayer`].
    pub fn set_moe_lora_weights(&mut self, weights: LoraMoeWeights) -> Result<(), InstallError> {
        self.ffn_mut().set_moe_lora_weights(weights)
    }

    /// Installs the deltas of a linear-attention output projection.
    ///
    /// # Errors
    /// [`InstallError::OutProj`] on a layer with softmax attention.
    pub fn set_out_proj_lora(&mut self, site: LoraSite) -> Result<(), InstallError> {
        match self {
            Self::LinearAttention(layer) => {
                layer.out_proj = site;
                Ok(())
            }
            Self::Attention(layer) => Err(InstallError::OutProj {
                layer: layer.ffn.layer,
            }),
        }
    }
}

/// Deltas of a layer with softmax attention.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionLayer {
    /// q, k, v and o.
    pub attention: LoraAttnWeights,
    /// Fused q, k and v (Phi-3), where the pool has room for it.
    pub qkv: LoraSite,
    /// The feed-forward block.
    pub ffn: FfnLora,
}

impl AttentionLayer {
    /// Deltas of q, k and v in one launch, into the raw projections: where the model gates attention, before q is split
    /// from its gate. x is `[rows, hidden]`.
    ///
    /// # Errors
    /// As [`LoraAttnWeights::apply_qkv`].
    pub fn apply_qkv(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: LoraRows<'_>,
        x: MatRef<'_>,
        out: QkvOut<'_>,
    ) -> Result<Applied, KernelError> {
        self.attention.apply_qkv(ctx, rows, x, out)
    }

    /// Delta of the output projection, after the all-reduce. x is `[rows, heads * head size]`.
    ///
    /// # Errors
    /// As [`LoraAttnWeights::apply_o`].
    pub fn apply_o(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: LoraRows<'_>,
        x: MatRef<'_>,
        out: AllReduced<'_>,
    ) -> Result<Applied, KernelError> {
        self.attention.apply_o(ctx, rows, x, out.0)
    }
}

/// Deltas of a layer with linear attention.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearAttentionLayer {
    /// Output projection.
    pub out_proj: LoraSite,
    /// Input projections that the pool has room for, in layout order.
    pub inputs: Vec<(LoraModule, LoraSite)>,
    /// The feed-forward block.
    pub ffn: FfnLora,
}

impl LinearAttentionLayer {
    /// Delta of the output projection, after the all-reduce. x is `[rows, value heads * value head size]`. Returns without a
    /// launch where nothing is installed.
    ///
    /// # Errors
    /// As [`LoraSite::apply`].
    pub fn apply_lora_out_proj(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: LoraRows<'_>,
        x: MatRef<'_>,
        out: AllReduced<'_>,
    ) -> Result<Applied, KernelError> {
        self.out_proj.apply(ctx, SiteKind::GdnOut, rows, x, out.0)
    }
}

/// What is installed on a feed-forward block.
#[derive(Debug, Clone, PartialEq)]
pub struct FfnLora {
    /// Global layer index.
    layer: usize,
    kind: FfnKind,
    installed: FfnInstalled,
}

/// The deltas of a feed-forward block, by its kind.
#[expect(
    clippy::large_enum_variant,
    reason = "one a layer, made at start and borrowed from then on"
)]
#[derive(Debug, Clone, PartialEq, Default)]
pub enum FfnInstalled {
    /// gate, up and down of a dense block.
    Dense(LoraFfnWeights),
    /// Router, shared expert and experts.
    Moe(LoraMoeWeights),
    /// Nothing.
    #[default]
    None,
}

impl FfnLora {
    /// A block of `kind` with nothing installed.
    pub fn empty(layer: usize, kind: FfnKind) -> Self {
        Self {
            layer,
            kind,
            installed: FfnInstalled::None,
        }
    }

    /// What is installed.
    pub fn installed(&self) -> &FfnInstalled {
        &self.installed
    }

    /// Installs dense deltas, in place of those that were.
    ///
    /// # Errors
    /// [`InstallError::DenseFfn`] where the block is MoE or absent, [`InstallError::WrongLayer`].
    pub fn set_ffn_lora_weights(&mut self, weights: LoraFfnWeights) -> Result<(), InstallError> {
        self.check_layer(weights.layer)?;
        if !matches!(self.kind, FfnKind::Dense { .. }) {
            return Err(InstallError::DenseFfn {
                layer: self.layer,
                found: self.kind.into(),
            });
        }
        self.installed = FfnInstalled::Dense(weights);
        Ok(())
    }

    /// Installs router, shared-expert and expert deltas, in place of those that were.
    ///
    /// # Errors
    /// [`InstallError::MoeFfn`] where the block is dense or absent, [`InstallError::WrongLayer`].
    pub fn set_moe_lora_weights(&mut self, weights: LoraMoeWeights) -> Result<(), InstallError> {
        self.check_layer(weights.layer)?;
        if self.kind != FfnKind::Moe {
            return Err(InstallError::MoeFfn {
                layer: self.layer,
                found: self.kind.into(),
            });
        }
        self.installed = FfnInstalled::Moe(weights);
        Ok(())
    }

    /// Deltas of gate and up of a dense block in one launch. x is `[rows, hidden]`. Returns without a launch where nothing
    /// dense is installed.
    ///
    /// # Errors
    /// As [`LoraFfnWeights::apply_gate_up`].
    pub fn apply_gate_up(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: LoraRows<'_>,
        x: MatRef<'_>,
        out: GateUpOut<'_>,
    ) -> Result<Applied, KernelError> {
        match &self.installed {
            FfnInstalled::Dense(weights) => weights.apply_gate_up(ctx, rows, x, out),
            FfnInstalled::Moe(_) | FfnInstalled::None => Ok(Applied::Empty),
        }
    }

    /// Delta of a dense block's down projection, after the all-reduce. x is `[rows, FFN width]`. Returns without a launch
    /// where nothing dense is installed.
    ///
    /// # Errors
    /// As [`LoraFfnWeights::apply_down`].
    pub fn apply_down(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: LoraRows<'_>,
        x: MatRef<'_>,
        out: AllReduced<'_>,
    ) -> Result<Applied, KernelError> {
        match &self.installed {
            FfnInstalled::Dense(weights) => weights.apply_down(ctx, rows, x, out.0),
            FfnInstalled::Moe(_) | FfnInstalled::None => Ok(Applied::Empty),
        }
    }

    fn check_layer(&self, found: usize) -> Result<(), InstallError> {
        if found == self.layer {
            Ok(())
        } else {
            Err(InstallError::WrongLayer {
                layer: self.layer,
                found,
            })
        }
    }
}

/// Deltas of a MoE block.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LoraMoeWeights {
    /// Global layer index.
    pub layer: usize,
    /// Router logits, before top-k.
    pub router: LoraSite,
    /// Shared expert, where the pool has room for it.
    pub shared: LoraFfnWeights,
    /// Gate of the shared expert, where the pool has room for it.
    pub shared_gate: LoraSite,
    /// The active adapter's expert pairs.
    pub experts: ExpertLoraLayer,
    /// Expert tables of all resident adapters, where the pool has room for experts.
    pub fold: Option<ExpertFold>,
}
