use super::{ELEMENT_BYTES, REGION_ALIGNMENT, check_range, matrix_bytes, mul, narrow};
use crate::{
    AuditedPair, ExpertPoolSpec, ExpertProj, LoraTarget, WeightsError, padded_rank, router_dims,
};
use lora_config::{FfnKind, ModelSpec};

/// Rows an expert or router pair of `rank` is packed to: the rank rounded to the granule.
pub fn packed_stride(rank: u32) -> u32 {
    padded_rank(rank)
}

/// Bytes that expert and router pairs take when each is packed to [`packed_stride`] of `max_rank`, without the filler
/// of the region's equal units: `(stride x in + out x stride) x 2` a pair. Dense pairs count nothing.
///
/// # Errors
/// [`WeightsError::LayoutOverflow`] past 64 bits.
pub fn expert_router_bytes(pairs: &[AuditedPair], max_rank: u32) -> Result<u64, WeightsError> {
    pairs
        .iter()
        .filter(|pair| !matches!(pair.target, LoraTarget::Attn(_)))
        .try_fold(0u64, |sum, pair| {
            sum.checked_add(pair_bytes(pair.k_in, pair.n_out, packed_stride(max_rank))?)
                .ok_or(WeightsError::LayoutOverflow {
                    what: "expert pairs together",
                })
        })
}

/// The expert region: equal units, each with room for any one expert or router pair of the model.
///
/// A unit holds A (`[stride, in]`) and right behind it B (`[out, stride]`), BF16. Equal units make the region immune to
/// fragmentation: an adapter fits exactly when as many units are free as it has pairs, wherever they lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertLayout {
    unit_bytes: u64,
    units: u64,
    max_rank: u32,
    num_experts: usize,
    /// `(out, in)` of gate, up, down.
    projections: [(u32, u32); 3],
    router: (u32, u32),
    router_layers: Vec<usize>,
}

impl ExpertLayout {
    /// The region for `model`; `None` for a model without experts.
    ///
    /// # Errors
    /// [`WeightsError::BadPoolSpec`] for a rank of 0, [`WeightsError::LayoutOverflow`] where a size does not fit.
    pub fn new(model: &ModelSpec, spec: &ExpertPoolSpec) -> Result<Option<Self>, WeightsError> {
        let (Some(moe), Some((router_out, router_in))) = (&model.moe, router_dims(model)) else {
            return Ok(None);
        };
        check_range("experts.max_rank", spec.max_rank, padded_rank(u32::MAX))?;
        let stride = packed_stride(spec.max_rank);
        let router = (narrow(router_out)?, narrow(router_in)?);
        let mut unit_bytes = pair_bytes(router_in, router_out, stride)?;
        let mut projections = [(0, 0); 3];
        for proj in ExpertProj::ALL {
            let Some((out, k_in)) = proj.dims(model) else {
                return Ok(None);
            };
            projections[proj as usize] = (narrow(out)?, narrow(k_in)?);
            unit_bytes = unit_bytes.max(pair_bytes(k_in, out, stride)?);
        }
        let unit_bytes = unit_bytes.next_multiple_of(REGION_ALIGNMENT);
        mul(unit_bytes, spec.units, "the expert region")?;
        let is_moe = |layer: &usize| model.layers[*layer].ffn == FfnKind::Moe;
        Ok(Some(Self {
            unit_bytes,
            units: spec.units,
            max_rank: stride,
            num_experts: moe.num_experts,
            projections,
            router,
            router_layers: (0..model.layers.len()).filter(is_moe).collect(),
        }))
    }

    /// Bytes of a unit.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// Units of the region.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// Bytes of the region.
    pub(crate) fn region_bytes(&self) -> u64 {
        // Checked when the layout was made.
        self.unit_bytes * self.units
    }

    /// Padded rank of every pair in the region.
    pub fn max_rank(&self) -> u32 {
        self.max_rank
    }

    /// Experts a layer.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// Layers with a router, ascending.
    pub fn router_layers(&self) -> &[usize] {
        &self.router_layers
    }

    /// `(out, in)` of the pairs of `target`; `None` for a dense target or an expert past the last.
    pub fn dims(&self, target: LoraTarget) -> Option<(u32, u32)> {
        match target {
            LoraTarget::Attn(_) => None,
            LoraTarget::Router => Some(self.router),
            LoraTarget::Expert { n, proj } => {
                (n < self.num_experts).then(|| self.projections[proj as usize])
            }
        }
    }
}

fn pair_bytes(k_in: usize, n_out: usize, stride: u32) -> Result<u64, WeightsError> {
    matrix_bytes(k_in, stride)?
        .checked_add(matrix_bytes(n_out, stride)?)
        .ok_or(WeightsError::LayoutOverflow {
            what: "an expert pair",
        })
}

/// Bytes of a pair's A inside its unit: where its B starts.
pub(crate) fn unit_b_offset(k_in: u32, stride: u32) -> u64 {
    u64::from(k_in) * u64::from(stride) * ELEMENT_BYTES
}
