use crate::{LoraTarget, TensorId};
use lora_config::FindingLevel;

/// One refusal or warning.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// Error or warning.
    pub level: FindingLevel,
    /// Stable reason: `shape-mismatch`, `config-use_dora`, ...
    pub reason: String,
    /// The tensor it is about, where it is about one.
    pub tensor: Option<String>,
    /// What is wrong, with both numbers, and the way out.
    pub message: String,
}

/// Where a pair's values come from in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PairSource {
    /// A is all of tensor `a`, B all of tensor `b`.
    Whole {
        /// `[r, in]`.
        a: TensorId,
        /// `[out, r]`.
        b: TensorId,
    },
}

/// A pair that passed the audit: what packing needs.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditedPair {
    /// Global layer index.
    pub layer: usize,
    /// Target inside the layer.
    pub target: LoraTarget,
    /// Module path without PEFT's prefix, as scaling sees it.
    pub path: String,
    /// True rank.
    pub rank: u32,
    /// Width of x.
    pub k_in: usize,
    /// Width of out.
    pub n_out: usize,
    /// FP32 scale.
    pub scale: f32,
    /// Where the values are.
    pub source: PairSource,
}

/// Bytes an adapter takes on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AdapterBytes {
    /// Its slot of the pool.
    pub slot: u64,
    /// Its units of the expert region.
    pub expert: u64,
    /// Its overlay, before the row diff.
    pub overlay: u64,
}

/// Everything the audit saw.
#[derive(Debug, Clone, Default)]
pub struct AuditReport {
    /// Findings, errors first.
    pub findings: Vec<Finding>,
    /// Tensors in the file.
    pub tensors: usize,
    /// Tensors applied.
    pub applied: usize,
    /// Tensors ignored, by name.
    pub ignored: Vec<String>,
    /// Pairs to pack, in (layer, target) order.
    pub pairs: Vec<AuditedPair>,
    /// Bytes.
    pub bytes: AdapterBytes,
}
