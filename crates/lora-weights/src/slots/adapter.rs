//! What a filled slot holds.

use super::extensions::Extensions;
use super::units::UnitRuns;
use crate::device::LoraPair;
use crate::{AuditReport, ExpertLoraLayer, LoraLayerWeights, LoraModule, adapter_id_hash};
use lora_config::AdapterConfig;
use std::sync::Arc;

/// One adapter in one slot: immutable from the commit that made it visible until the slot is written again.
#[derive(Debug, Clone)]
pub struct AdapterSlot {
    pub(super) name: String,
    pub(super) slot: u32,
    pub(super) generation: u64,
    pub(super) config: AdapterConfig,
    pub(super) layers: Arc<[LoraLayerWeights]>,
    pub(super) experts: Arc<[ExpertLoraLayer]>,
    pub(super) report: Arc<AuditReport>,
}

impl AdapterSlot {
    /// The name it was loaded under; may be empty.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The slot it lies in.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Rises with every commit into the slot, and is never one that an earlier adapter of this name had.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The prefix-cache key, [`adapter_id_hash`] of name and generation.
    pub fn adapter_id(&self) -> u64 {
        adapter_id_hash(&self.name, self.generation)
    }

    /// The adapter's parsed config.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// Dense pairs: one entry a model layer, by global index.
    pub fn layers(&self) -> &[LoraLayerWeights] {
        &self.layers
    }

    /// Router and expert pairs: one entry a model layer, by global index.
    pub fn experts(&self) -> &[ExpertLoraLayer] {
        &self.experts
    }

    /// What the audit saw: tensors applied and ignored, warnings, rank and scale of each module.
    pub fn report(&self) -> &AuditReport {
        &self.report
    }

    /// True where the adapter adapts a router or an expert.
    pub fn has_experts(&self) -> bool {
        self.experts.iter().any(|layer| !layer.is_empty())
    }

    /// The pair of `module` in `layer`; `None` where the layer does not exist, holds no pairs, or the module is not
    /// adapted.
    pub fn pair(&self, layer: usize, module: LoraModule) -> Option<LoraPair> {
        self.layers.get(layer)?.module_pair(module)
    }
}

/// All that a slot owns while it is filled.
#[derive(Clone)]
pub(super) struct Contents {
    pub(super) adapter: Arc<AdapterSlot>,
    pub(super) units: UnitRuns,
    pub(super) extensions: Extensions,
}

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Contents")
            .field("adapter", &self.adapter.name)
            .field("units", &self.units)
            .finish_non_exhaustive()
    }
}
