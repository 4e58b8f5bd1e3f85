//! Token overlays: whole rows of the embedding and of the LM head replaced, each row of a batch by its own adapter's.
//!
//! PEFT adapters can train whole rows of a vocabulary table (`trainable_tokens`) or save a whole table (`modules_to_save`, a resized
//! vocabulary). Served, both are the same thing: a set of token ids, ascending and unique, each with a row that replaces the base
//! model's.
//!
//! 1. [`stage_overlay_raw`] uploads what an adapter's file holds.
//! 2. [`build_overlay`] compares it with the tables that the engine serves ([`ServedTables`]) and keeps the rows that are overridden, compact, on the
//!    device: an [`EmbedOverlay`]. The set is decided by [`clamp_trainable_to_vocab`], [`build_override_set`] and [`override_source`].
//! 3. A [`TokenOverlaySet`] holds the overlays of a pool's slots; [`OverlaySlotRows`] binds one to the life of its slot.
//! 4. [`TokenOverlaySet::apply_embeddings`] after the engine's gather, [`TokenOverlaySet::apply_logits`] after its LM head.
//!
//! ```
//! use half::bf16;
//! use lora_config::{ParseOptions, parse_peft_adapter_config};
//! use lora_kernels::overlay::{OverlayTokens, SlotOfRow};
//! use lora_kernels::{DeviceBuffer, LaunchOptions, LoraBackend, LoraKernels, Stream, host::HostBackend};
//! use lora_overlay::*;
//! use lora_weights::{AdapterStore, MemoryTensor, OverlayTensor, OverlayTensorKind, OverlayTensors, TensorId};
//! use std::sync::Arc;
//!
//! let backend: Arc<dyn LoraBackend> = Arc::new(HostBackend::new());
//! let memory = backend.clone() as Arc<_>;
//! let table = |values: &[f32]| values.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>();
//!
//! // An adapter that trained tokens 2 and 0 of a model with a vocabulary of three, in this order. An audit finds its tensors.
//! let name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta";
//! let config = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": false, "trainable_token_indices": [2, 0]}"#;
//! let rows = MemoryTensor::from_f32(name, [2, 2], &[5.0, 6.0, 7.0, 8.0]);
//! let store = AdapterStore::from_tensors(config, [rows])?;
//! let config = parse_peft_adapter_config(store.config_json(), &ParseOptions::default())?;
//! let mut overlays = OverlayTensors::default();
//! let (module, kind) = (lora_config::TokenTable::Embed, OverlayTensorKind::Delta);
//! let _ = overlays.insert(OverlayTensor { module, kind, id: TensorId(0), name: name.into(), shape: vec![2, 2] });
//!
//! // Built against the engine's table, which is its head too, and installed in slot 1 of two.
//! let embedding = DeviceBuffer::from_slice(backend.clone(), &table(&[0.0, 0.5, 1.0, 1.5, 2.0, 2.5]))?;
//! let served = ServedTables::tied(ServedTable::view(embedding.mat(3, 2, 2)?));
//! let raw = stage_overlay_raw(&memory, &store, &config, &overlays, 2)?.expect("it has rows");
//! let builder = OverlayBuilder { backend: &backend, stream: Stream::OWN, threshold: ROWDIFF_THRESH };
//! let overlay = build_overlay(builder, raw, &served)?.expect("it overrides two");
//! let set = TokenOverlaySet::from_slots(memory, served.shape(2)?, [None, Some(Arc::new(overlay))])?;
//!
//! // A step of two rows of token 2: the first follows slot 0, the second slot 1.
//! let kernels = LoraKernels::new(backend.clone(), LaunchOptions::default());
//! let mut out = DeviceBuffer::from_slice(backend.clone(), &table(&[2.0, 2.5, 2.0, 2.5]))?;
//! let (ids, slots) = (DeviceBuffer::from_slice(backend.clone(), &[2, 2])?, DeviceBuffer::from_slice(backend.clone(), &[0, 1])?);
//! let tokens = OverlayTokens { ids: ids.token_ids(2)?, slots: SlotOfRow::Each(slots.row_slots(2)?) };
//! let _ = set.apply_embeddings((&kernels, Stream::OWN), tokens, out.mat_mut(2, 2, 2)?)?;
//! backend.synchronize(Stream::OWN)?;
//! assert_eq!(out.download::<bf16>(0, 4)?, table(&[2.0, 2.5, 5.0, 6.0]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod build;
mod error;
mod extension;
mod overlay;
mod plan;
mod served;
mod set;
mod stage;

pub use build::{OverlayBuilder, ROWDIFF_THRESH, build_overlay};
pub use error::OverlayError;
pub use extension::OverlaySlotRows;
pub use overlay::{EmbedOverlay, ExtensionRows, HeadOverlay, LmHeadOverlay, RowDifference};
pub use plan::{
    OverrideSource, TrainedRow, TrainedTokens, build_override_set, clamp_trainable_to_vocab,
    fill_slot_map, override_source,
};
pub use served::{ServedTable, ServedTables, VocabShape};
pub use set::TokenOverlaySet;
pub use stage::{OverlayRaw, OverlayRawSlot, stage_overlay_raw};
