//! PEFT tensor names, audit, pool layout, packing and adapter slots.

mod audit;
pub mod device;
mod names;
mod pool;
mod store;

pub use audit::{
    AdapterBytes, AuditReport, AuditedPair, Finding, OutputRows, PairSource, StackedPair,
};
pub use lora_config::FindingLevel;
pub use names::{
    AdapterAb, ExpertProj, LoraModule, LoraTarget, NameRules, OverlayModule, OverlayTensor,
    OverlayTensorKind, OverlayTensors, Reject, RejectReason, classify_key, classify_overlay_key,
    full_attention_layers, is_gdn_key, reject_pending_overlay, router_dims,
};
pub use pool::{
    ExpertPoolSpec, LoadPolicy, ModuleSet, PoolSpec, RANK_GRANULE, StackedLayout, padded_rank,
};
pub use store::{
    AdapterStore, HeaderEntry, HeaderError, MemoryTensor, OtherDtype, StoreError, TensorDtype,
    TensorId, TensorMeta, parse_safetensors_header,
};
