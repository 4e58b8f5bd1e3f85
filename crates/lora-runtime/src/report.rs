//! What a runtime holds and takes, for an engine to show.

use crate::LoraRuntime;
use lora_weights::PoolBytes;

/// What the runtime takes on the device, and who lives where.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RuntimeReport {
    /// Bytes of slots, tables and expert region.
    pub pool: PoolBytes,
    /// Free and all units of the expert region.
    pub expert_units: (u64, u64),
    /// Bytes of the expert tables.
    pub expert_tables: u64,
    /// The active slot.
    pub active: Option<u32>,
    /// Filled slots, ascending.
    pub adapters: Vec<ResidentReport>,
}

/// One resident adapter.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ResidentReport {
    /// Its slot.
    pub slot: u32,
    /// Its name.
    pub name: String,
    /// Its generation.
    pub generation: u64,
    /// Its prefix-cache key.
    pub adapter_id: u64,
    /// Tensors of its file.
    pub tensors: usize,
    /// Tensors applied.
    pub applied: usize,
    /// Names of the tensors that are not applied and need not be.
    pub ignored: Vec<String>,
    /// Warnings of its audit, one line each.
    pub warnings: Vec<String>,
    /// Modules that it adapts, over all layers.
    pub dense_pairs: usize,
    /// Router and expert projections that it adapts, over all layers.
    pub expert_pairs: usize,
    /// References that requests hold.
    pub references: u32,
    /// Never a victim of promotion.
    pub pinned: bool,
}

impl LoraRuntime {
    /// What is resident and what it takes.
    pub fn report(&self) -> RuntimeReport {
        let slots = 0..self.weights().layout().slots();
        RuntimeReport {
            pool: self.weights().layout().bytes(),
            expert_units: self.weights().expert_units(),
            expert_tables: self.expert_tables().map_or(0, |tables| tables.bytes()),
            active: self.weights().active_slot(),
            adapters: slots.filter_map(|slot| self.resident(slot)).collect(),
        }
    }

    fn resident(&self, slot: u32) -> Option<ResidentReport> {
        let adapter = self.weights().adapter(slot)?;
        let audit = adapter.report();
        let dense = audit
            .pairs
            .iter()
            .filter(|pair| pair.target.is_dense())
            .count();
        Some(ResidentReport {
            slot,
            name: adapter.name().to_owned(),
            generation: adapter.generation(),
            adapter_id: adapter.adapter_id(),
            tensors: audit.tensors,
            applied: audit.applied,
            ignored: audit.ignored.clone(),
            warnings: audit.warnings().map(ToString::to_string).collect(),
            dense_pairs: dense,
            expert_pairs: audit.pairs.len() - dense,
            references: self.weights().slot_ref_count(slot).unwrap_or(0),
            pinned: self.weights().is_pinned(slot),
        })
    }
}
