//! From a PEFT adapter folder to pairs that kernels read: tensor names, audit, pool layout, packing, and the slots that
//! adapters live in while an engine serves.
//!
//! | step | here | touches |
//! |---|---|---|
//! | open the files | [`AdapterStore`] | the folder, mapped |
//! | from a peer or an object store | `source` (feature `source`) | the network |
//! | know a file before its data | [`WeightManifest`], [`audit_manifest`], [`build_land_targets`] | nothing |
//! | place every tensor, check every value | [`audit_adapter`], [`audit_dir`] | nothing |
//! | lay a pool out | [`PoolLayout`] | nothing |
//! | pack a slot image | [`pack_adapter`] | staging memory |
//! | bring it into a slot, at once or in three steps | [`LoraWeights`], [`StagedAdapter`], [`SlotTransaction`] | one slot |
//! | hold an adapter for a request | [`SlotLease`] | a counter |
//! | say which adapter each row follows | [`build_seq_slot_host`], [`uniform_seq_slots`] | nothing |
//!
//! Device memory is reached through [`device::DeviceMemory`] alone, which `lora-kernels` implements for the host and for
//! CUDA; nothing here knows a kernel. Rules of names, scales and tensor layouts are PEFT's; ranks are padded to the rows of
//! one MMA ([`RANK_GRANULE`]); the slot rules stand at [`LoraWeights`].
//!
//! An adapter that a training loop holds in memory, audited and packed:
//!
//! ```
//! use lora_config::{ModelSpec, ParseOptions, parse_peft_adapter_config};
//! use lora_weights::{
//!     AdapterStore, LoraModule, MemoryTensor, PackSource, PoolLayout, PoolSpec, audit_adapter, image_bytes, pack_adapter,
//! };
//!
//! let model = ModelSpec::from_hf_config(
//!     r#"{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
//!         "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 48}"#,
//! )?;
//! let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": false, "target_modules": ["v_proj"]}"#;
//! let path = "base_model.model.model.layers.0.self_attn.v_proj";
//! let store = AdapterStore::from_tensors(config, [
//!     MemoryTensor::from_f32(format!("{path}.lora_A.weight"), [2, 32], &[0.25; 64]),
//!     MemoryTensor::from_f32(format!("{path}.lora_B.weight"), [16, 2], &[0.5; 32]),
//! ])?;
//!
//! let pool = PoolSpec::new(4, 8);
//! let config = parse_peft_adapter_config(store.config_json(), &ParseOptions::default())?;
//! let report = audit_adapter(&store, &config, &model, &pool);
//! assert!(report.ok(), "{:?}", report.findings);
//! assert_eq!((report.applied, report.pairs[0].scale), (2, 2.0));
//!
//! let layout = PoolLayout::new(&model, &pool)?;
//! let mut image = vec![0u16; image_bytes(&layout, &report.pairs)? / 2];
//! let source = PackSource { store: &store, pairs: &report.pairs };
//! pack_adapter(source, &layout, bytemuck::cast_slice_mut(&mut image))?;
//! let (_, region) = layout.region(0, LoraModule::VProj).unwrap();
//! assert_eq!(region.max_rank, 16); // 8 rounded to the granule: B's rows are 16 apart, the last 14 of each zero
//! assert_eq!(image[region.b_offset as usize / 2..][..3], [0x3f00, 0x3f00, 0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(unsafe_code)]

mod audit;
pub mod device;
mod error;
mod identity;
mod landing;
mod layout;
mod names;
mod pack;
mod pairs;
mod pool;
mod routing;
mod slots;
#[cfg(feature = "source")]
pub mod source;
mod store;

pub use audit::{
    AdapterBytes, AuditReason, AuditReport, AuditedPair, Finding, OutputRows, OverlayRows,
    OverlayTableRows, PairSource, StackedPair, audit_adapter, audit_dir, audit_manifest,
};
pub use error::{UploadStage, WeightsError};
pub use identity::{BASE_ADAPTER_ID, adapter_id_hash};
pub use landing::{
    AdapterManifest, LandPlace, LandRequest, LandTarget, build_land_targets, rebuild_slot_layers,
};
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
pub use pack::{PackSource, SlotPairs, image_bytes, pack_adapter};
pub use pairs::{ExpertLoraLayer, LoraLayerWeights};
pub use pool::{
    ExpertPoolSpec, LoadPolicy, ModuleSet, PoolSpec, RANK_GRANULE, StackedLayout, padded_rank,
};
pub use routing::{
    BASE_SLOT, LoraSites, NO_DELTA, Resolved, SlotSpace, build_seq_slot_host, fill_seq_slot_host,
    routed_prefill_slot_of, uniform_seq_slots,
};
pub use slots::{
    AdapterSlot, BeginError, FreedSlot, LandingInput, LoraAdapterInput, LoraWeights, Metrics,
    Occupancy, Released, SlotExtension, SlotLease, SlotTarget, SlotTransaction, SlotView,
    StageTimes, StagedAdapter, Unloaded, VictimError, load_lora_adapters_generic,
    load_lora_adapters_multi, select_victim_slot,
};
pub use store::{
    AdapterStore, HeaderEntry, HeaderError, MemoryTensor, OtherDtype, StoreError, TensorDtype,
    TensorId, TensorMeta, WeightManifest, parse_safetensors_header,
};
