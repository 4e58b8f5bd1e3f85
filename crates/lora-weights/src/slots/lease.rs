//! A request's hold on its adapter.

use super::adapter::AdapterSlot;
use super::shared::Shared;
use crate::{BASE_ADAPTER_ID, BASE_SLOT};
use std::sync::Arc;

/// One reference to a slot's adapter, given back on drop: while it lives, the slot keeps this adapter, whatever becomes
/// active meanwhile. A lease of the base model holds nothing.
///
/// It owns a share of the pool, so that a request may keep it for as long as it runs, on any thread.
#[must_use = "dropping the lease gives the reference back at once"]
pub struct SlotLease {
    held: Option<(Arc<Shared>, Arc<AdapterSlot>)>,
}

impl SlotLease {
    pub(super) fn base() -> Self {
        Self { held: None }
    }

    /// Takes over a reference that was acquired.
    pub(super) fn holding(shared: Arc<Shared>, adapter: Arc<AdapterSlot>) -> Self {
        Self {
            held: Some((shared, adapter)),
        }
    }

    /// What row maps take for this request: the slot, or [`BASE_SLOT`].
    pub fn slot(&self) -> i32 {
        // Slots are at most i32::MAX.
        self.adapter()
            .map_or(BASE_SLOT, |adapter| adapter.slot as i32)
    }

    /// The adapter; `None` for the base model.
    pub fn adapter(&self) -> Option<&AdapterSlot> {
        self.held.as_ref().map(|(_, adapter)| adapter.as_ref())
    }

    /// Key of the prefix cache; [`BASE_ADAPTER_ID`] for the base model.
    pub fn adapter_id(&self) -> u64 {
        self.adapter()
            .map_or(BASE_ADAPTER_ID, AdapterSlot::adapter_id)
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        if let Some((shared, adapter)) = self.held.take() {
            let slot = adapter.slot as i32;
            drop(adapter);
            shared.release(slot);
        }
    }
}

impl std::fmt::Debug for SlotLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlotLease")
            .field("slot", &self.slot())
            .field("adapter", &self.adapter().map(AdapterSlot::name))
            .finish()
    }
}
