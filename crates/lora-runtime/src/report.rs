//! What a runtime holds and takes, for an engine to show.

use crate::LoraRuntime;
use lora_weights::{Metrics, PoolBytes};
use serde::Serialize;

/// What the runtime takes on the device, and who lives where.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RuntimeReport {
    /// Bytes of slots, tables and expert region.
    pub pool: PoolBytes,
    /// Bytes of token overlays: the tables of all slots, and what every resident adapter has.
    pub overlays: u64,
    /// Free and all units of the expert region.
    pub expert_units: (u64, u64),
    /// Bytes of the expert tables.
    pub expert_tables: u64,
    /// The active slot.
    pub active: Option<u32>,
    /// Filled slots, ascending.
    pub adapters: Vec<ResidentReport>,
}

/// What a resident adapter overrides in the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct OverlayReport {
    /// Rows of the embedding that it replaces.
    pub embed_rows: u32,
    /// Rows of the LM head that it replaces.
    pub head_rows: u32,
    /// Rows past the served vocabulary that it offers: embedding and head.
    pub extension_rows: (u32, u32),
    /// Rows of saved tables that differ from the served ones by no more than the threshold, and are not replaced.
    pub rows_under_threshold: u32,
    /// Device bytes.
    pub bytes: u64,
}

/// One resident adapter.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    /// Its token overlay, where it has one.
    pub overlay: Option<OverlayReport>,
    /// References that requests hold.
    pub references: u32,
    /// Never a victim of promotion.
    pub pinned: bool,
}

/// Everything a runtime tells of itself at one moment, to export: counters that only rise, and what is resident. Serializes as
/// one object, its fields by these names.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RuntimeSnapshot {
    /// Loads, evictions, refusals by reason, bytes, times of each stage.
    pub metrics: Metrics,
    /// Bytes on the device, and who lives where.
    pub report: RuntimeReport,
}

impl LoraRuntime {
    /// Counters so far: loads, evictions, refusals by reason, bytes, and how long audits, packs, uploads and commits took.
    pub fn metrics(&self) -> Metrics {
        self.weights().metrics()
    }

    /// Counters and residents together, to export.
    pub fn snapshot(&self) -> RuntimeSnapshot {
        RuntimeSnapshot {
            metrics: self.metrics(),
            report: self.report(),
        }
    }

    /// What is resident and what it takes.
    pub fn report(&self) -> RuntimeReport {
        let slots = 0..self.weights().layout().slots();
        RuntimeReport {
            pool: self.weights().layout().bytes(),
            overlays: self.overlays().map_or(0, |set| set.device_bytes()),
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
            overlay: self.overlay_report(slot),
            references: self.weights().slot_ref_count(slot).unwrap_or(0),
            pinned: self.weights().is_pinned(slot),
        })
    }

    fn overlay_report(&self, slot: u32) -> Option<OverlayReport> {
        let overlay = self.overlays()?.overlay(slot)?;
        Some(OverlayReport {
            embed_rows: overlay.n_override,
            head_rows: overlay.n_override_head(),
            extension_rows: overlay.extension_counts(),
            rows_under_threshold: overlay.rows_under_threshold(),
            bytes: overlay.device_bytes(),
        })
    }
}
