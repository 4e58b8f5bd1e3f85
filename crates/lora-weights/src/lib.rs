//! PEFT tensor names, audit, pool layout, packing and adapter slots.

mod audit;
pub mod device;
mod names;
mod pool;
mod store;

pub use audit::{AdapterBytes, AuditReport, AuditedPair, Finding, PairSource};
pub use lora_config::FindingLevel;
pub use names::{AdapterAb, ExpertProj, LoraModule, LoraTarget, OverlayModule, OverlayTensorKind};
pub use pool::{
    ExpertPoolSpec, LoadPolicy, ModuleSet, PoolSpec, RANK_GRANULE, StackedLayout, padded_rank,
};
pub use store::{AdapterStore, TensorDtype, TensorId, TensorMeta};
