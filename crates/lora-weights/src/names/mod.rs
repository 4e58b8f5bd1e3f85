//! Tensor names of PEFT adapter files, and what they stand for in a model.
//!
//! A name is read in steps: `TensorPath` takes prefix and wrappers off, [`classify_overlay_key`] recognises vocabulary tables,
//! [`classify_key`] places everything else on a layer and a [`LoraTarget`]. What cannot be placed is a [`Reject`] with a
//! stable reason, never a skip.

mod classify;
mod key;
mod module;
mod overlay;
mod reject;
#[cfg(test)]
pub(crate) mod specs;
#[cfg(test)]
mod tests;

pub use classify::{NameRules, classify_key, is_gdn_key};
pub(crate) use classify::{is_moe_block, moe_of_layer, place};
pub(crate) use key::{LayerPath, LoraWeightPath, TensorPath};
pub use module::{
    AdapterAb, ExpertProj, LoraModule, LoraTarget, full_attention_layers, router_dims,
};
pub use overlay::{
    OverlayModule, OverlayTensor, OverlayTensorKind, OverlayTensors, classify_overlay_key,
    reject_pending_overlay,
};
pub(crate) use overlay::{is_original_module, overlay_of, table_of};
pub use reject::{Reject, RejectReason};
