mod finding;
mod pair;

pub use finding::Finding;
pub use pair::{AuditedPair, OutputRows, PairSource, StackedPair};

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
