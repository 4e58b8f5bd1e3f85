//! LoRA on mixture-of-experts blocks: router logits and expert projections, every token with its own adapter.
//!
//! | path | rows | here |
//! |---|---|---|
//! | device-driven | unsorted decode or sorted prefill, many adapters, legal under graph capture | [`ExpertTables`], [`ExpertRows`], [`ExpertFold`] |
//! | host-driven | sorted by expert, one adapter; the reference | [`apply_expert_lora_sorted`], [`apply_router_lora`] |
//! | single active | an engine with one adapter's experts installed | [`resolve_moe_lora_route`], [`ensure_decode_route_servable`] |
//!
//! All of them are launches of `lora-kernels`, so a row's bits are the same by each. An expert table is a
//! [`LoraRoute`](lora_weights::device::LoraRoute) over `residents x num_experts` entries: it has room for the adapters that can be resident at once rather than for
//! every slot of the pool. [`ExpertRows::build`] finds each row's entry on the device, from what the router chose and from the tokens' slots;
//! that costs one small kernel a layer. The gate and up fold comes before the activation, the down fold before the weighted sum over a
//! token's experts, the router's before top-k.
//!
//! Two tokens, top-2 of three experts; the adapter in slot 1 adapts up of expert 2:
//!
//! ```
//! use half::bf16;
//! use lora_kernels::host::HostBackend;
//! use lora_kernels::*;
//! use lora_moe::{ExpertFold, ExpertRows, ExpertTables, ExpertTablesSpec};
//! use lora_weights::device::LoraPair;
//! use lora_weights::{ExpertLoraLayer, ExpertProj};
//! use std::num::NonZeroU32;
//! use std::sync::Arc;
//!
//! let backend = Arc::new(HostBackend::new());
//! let upload = |values: &[f32]| {
//!     let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
//!     DeviceBuffer::from_slice(backend.clone(), &values)
//! };
//! // Hidden 2, expert width 1: rank 1, padded to 16.
//! let mut a = [0.0; 16 * 2];
//! a[..2].copy_from_slice(&[1.0, 1.0]);
//! let mut b = [0.0; 16];
//! b[0] = 10.0;
//! let (a, b) = (upload(&a)?, upload(&b)?);
//! let pair = LoraPair { a: a.ptr(), b: b.ptr(), rank: 1, k_in: 2, n_out: 1, scale: 1.0, max_rank: 16 };
//! let layer = ExpertLoraLayer::from_pairs(None, [(2, ExpertProj::Up, pair)]);
//!
//! let spec = ExpertTablesSpec {
//!     layers: vec![0],
//!     num_experts: 3,
//!     slots: 4,
//!     residents: 1,
//!     projections: [(2, 1), (2, 1), (1, 2)],
//!     max_rank: 16,
//! };
//! let tables = ExpertTables::new(backend.clone(), spec)?;
//! tables.install(1, &[layer])?;
//!
//! // A step: the slot of each token, and what the router chose.
//! let slots = DeviceBuffer::from_slice(backend.clone(), &[1, -1])?;
//! let experts = DeviceBuffer::from_slice(backend.clone(), &[0, 2, 2, 1])?;
//! let x = upload(&[3.0, 1.0, 5.0, 5.0])?;
//! let (mut gate, mut up) = (upload(&[0.0; 4])?, upload(&[0.0; 4])?);
//!
//! let routing = ExpertRouting::Unsorted { experts: experts.expert_ids(4)?, top_k: NonZeroU32::new(2).unwrap() };
//! let mut rows = ExpertRows::new(backend.clone(), &tables, 4, 48)?;
//! rows.build((&*backend, Stream::OWN), &tables, routing, slots.token_adapters(2)?)?;
//!
//! let kernels = LoraKernels::new(backend.clone(), LaunchOptions::default());
//! let spec = ScratchSpec { max_rows: 4, max_rank: 16, max_sites: 2, max_k_in: 2 };
//! let mut scratch = Scratch::new(backend.clone(), spec)?;
//! let mut ctx = LaunchContext { kernels: &kernels, stream: Stream::OWN, scratch: &mut scratch };
//! let out = GateUpOut { gate: gate.mat_mut(4, 1, 1)?, up: up.mat_mut(4, 1, 1)? };
//! let applied = ExpertFold::new(&tables, 0)?.apply_gate_up(&mut ctx, &rows, routing, x.mat(2, 2, 2)?, out)?;
//! assert_eq!(applied, Applied::Launched { launches: 1 });
//!
//! backend.synchronize(Stream::OWN)?;
//! // Only the first token follows slot 1, and its second expert is expert 2.
//! let rows: Vec<f32> = up.download::<bf16>(0, 4)?.iter().map(|v| v.to_f32()).collect();
//! assert_eq!(rows, [0.0, 40.0, 0.0, 0.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Features
//! `testing` adds the module `testing`: test bodies that run on any backend.

#![forbid(unsafe_code)]

mod error;
mod fold;
mod host_driven;
mod route;
mod tables;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::MoeError;
pub use fold::{ExpertFold, ExpertRows, apply_router_lora_rows};
pub use host_driven::{
    ExpertWork, SortedExperts, apply_expert_lora_sorted, apply_router_lora, expert_delta_workitems,
};
pub use route::{
    MoeLoraRoute, MoeRowAdapters, NO_FOLD, build_moe_row_adapter_decode,
    build_moe_row_adapter_host, ensure_decode_route_servable, resolve_moe_lora_route,
};
pub use tables::{ExpertTables, ExpertTablesSpec};
