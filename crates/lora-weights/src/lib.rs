//! PEFT tensor names, audit, pool layout, packing and adapter slots.

mod audit;
pub mod device;
mod error;
mod identity;
mod layout;
mod names;
mod pack;
mod pairs;
mod pool;
mod routing;
mod slots;
mod store;

pub use audit::{
    AdapterBytes, AuditReason, AuditReport, AuditedPair, Finding, OutputRows, PairSource,
    StackedPair, audit_adapter, audit_dir,
};
pub use error::{UploadStage, WeightsError};
pub use identity::{BASE_ADAPTER_ID, adapter_id_hash};
pub use layout::{
    ExpertLayout, ModuleRegion, PoolBytes, PoolLayout, REGION_ALIGNMENT, TableLayout,
    expert_router_bytes, module_slot_offsets, packed_stride, pool_slot_bytes, slot_base_offset,
};
pub use lora_config::FindingLevel;
pub use names::{
    AdapterAb, ExpertProj, LoraModule, LoraTarget, NameRules, OverlayModule, OverlayTensor,
    OverlayTensorKind, OverlayTensors, Reject, RejectReason, classify_key, classify_overlay_key,
    full_attention_layers, is_gdn_key, reject_pending_overlay, router_dims,
};
pub use pack::{PackSource, image_bytes, pack_adapter};
pub use pairs::{ExpertLoraLayer, LoraLayerWeights};
pub use pool::{
    ExpertPoolSpec, LoadPolicy, ModuleSet, PoolSpec, RANK_GRANULE, StackedLayout, padded_rank,
};
pub use routing::{
    BASE_SLOT, LoraSites, NO_DELTA, Resolved, SlotSpace, build_seq_slot_host, fill_seq_slot_host,
    routed_prefill_slot_of, uniform_seq_slots,
};
pub use slots::{
    AdapterSlot, BeginError, FreedSlot, LoraAdapterInput, LoraWeights, Occupancy, Released,
    SlotExtension, SlotLease, SlotTarget, SlotTransaction, SlotView, StagedAdapter, Unloaded,
    VictimError, load_lora_adapters_generic, load_lora_adapters_multi, select_victim_slot,
};
pub use store::{
    AdapterStore, HeaderEntry, HeaderError, MemoryTensor, OtherDtype, StoreError, TensorDtype,
    TensorId, TensorMeta, parse_safetensors_header,
};
