//! An overlay bound to the life of a slot.

use crate::{EmbedOverlay, TokenOverlaySet};
use lora_weights::{AdapterSlot, SlotExtension};
use std::error::Error;
use std::sync::Arc;

/// One slot's overlay, bound to the slot's life: given to the adapter that is loaded, it is installed when the transaction commits, and removed and
/// freed before the slot is written again, when it is unloaded, and when its transaction fails.
///
/// Slots without an overlay get one too (`None`), so that a record which could not be cleared before is cleared before the slot is served again.
#[derive(Debug)]
pub struct OverlaySlotRows {
    set: Arc<TokenOverlaySet>,
    overlay: Option<Arc<EmbedOverlay>>,
}

impl OverlaySlotRows {
    /// The overlay of an adapter, to be installed in `set`.
    pub fn new(set: Arc<TokenOverlaySet>, overlay: Option<EmbedOverlay>) -> Self {
        Self {
            set,
            overlay: overlay.map(Arc::new),
        }
    }

    /// The overlay.
    pub fn overlay(&self) -> Option<&EmbedOverlay> {
        self.overlay.as_deref()
    }
}

impl SlotExtension for OverlaySlotRows {
    fn install(&self, adapter: &AdapterSlot) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(self.set.install(adapter.slot(), self.overlay.clone())?)
    }

    fn uninstall(&self, slot: u32) {
        if let Err(error) = self.set.remove(slot) {
            tracing::error!(%error, slot, "overlay records could not be cleared");
        }
    }

    fn device_bytes(&self) -> u64 {
        self.overlay
            .as_ref()
            .map_or(0, |overlay| overlay.device_bytes())
    }

    fn applies_overlays(&self) -> bool {
        true
    }
}
