//! References that requests hold.

use super::{LoraWeights, Released, SlotLease, SlotView};
use crate::{BASE_SLOT, NO_DELTA, Resolved};
use std::sync::Arc;

impl LoraWeights {
    /// Holds the adapter that `request` resolves to until the lease is dropped. `None`, having changed nothing, where it
    /// resolves to a placeholder, a slot being written or unloaded, or one out of range. A request for the base model,
    /// and a negative one where nothing is active, gets a lease that holds nothing.
    pub fn lease(&self, request: i32) -> Option<SlotLease> {
        let mut states = self.shared.states.lock();
        if states.space().resolve(request) == Resolved::Base {
            return Some(SlotLease::base());
        }
        let adapter = states.acquire(request)?;
        drop(states);
        Some(SlotLease::holding(Arc::clone(&self.shared), adapter))
    }

    /// Holds the adapter of this name, found and held in one step: it cannot be evicted in between. `None`, having changed nothing, where
    /// none that can be acquired has it.
    pub fn lease_named(&self, name: &str) -> Option<SlotLease> {
        let mut states = self.shared.states.lock();
        let slot = states.slot_of(name)?;
        // Slots are at most i32::MAX.
        let adapter = states.acquire(slot as i32)?;
        drop(states);
        Some(SlotLease::holding(Arc::clone(&self.shared), adapter))
    }

    /// [`lease`](Self::lease) for engines that keep numbers: adds a reference, stamps recency and returns the resolved
    /// slot, which is what [`release_slot`](Self::release_slot) takes even if `active` moves meanwhile. `-1`, having
    /// changed nothing, where there is no adapter to acquire; [`BASE_SLOT`] for the base model.
    pub fn acquire_slot(&self, request: i32) -> i32 {
        let mut states = self.shared.states.lock();
        if states.space().resolve(request) == Resolved::Base {
            return BASE_SLOT;
        }
        // Slots are at most i32::MAX.
        states
            .acquire(request)
            .map_or(NO_DELTA, |adapter| adapter.slot as i32)
    }

    /// Gives back a reference that [`acquire_slot`](Self::acquire_slot) returned. Negative numbers and slots that nobody
    /// holds change nothing: counts never go below 0. The release that ends an unload also zeroes the slot's table
    /// entries, one small blocking upload; no other release reaches the device.
    pub fn release_slot(&self, slot: i32) -> Released {
        self.shared.release(slot)
    }

    /// Stamps a slot as used now. False for a slot out of range.
    pub fn touch_slot(&self, slot: u32) -> bool {
        self.shared.states.lock().touch(slot)
    }

    /// References that requests hold; `None` for a slot out of range.
    pub fn slot_ref_count(&self, slot: u32) -> Option<u32> {
        self.shared.states.lock().refs(slot)
    }

    /// Stamp of the last use, larger is later, 0 is never; `None` for a slot out of range.
    pub fn slot_last_used(&self, slot: u32) -> Option<u64> {
        self.shared.states.lock().last_used(slot)
    }

    /// True for a slot that was filled at startup and is never a victim.
    pub fn is_pinned(&self, slot: u32) -> bool {
        self.shared.states.lock().is_pinned(slot)
    }

    /// The slots that promotion may take, ascending: neither pinned nor active.
    pub fn cache_slot_views(&self) -> Vec<SlotView> {
        self.shared.states.lock().cache_views()
    }
}
