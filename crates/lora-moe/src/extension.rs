//! Expert tables bound to the life of a slot.

use crate::ExpertTables;
use lora_weights::{ExpertLoraLayer, SlotExtension};
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One slot's part of [`ExpertTables`], bound to the slot's life: attached to a [`SlotTransaction`](lora_weights::SlotTransaction), it is
/// installed when the transaction commits and removed before the slot is written again.
///
/// A slot has one extension, and a pool takes any to be the one that applies an adapter's vocabulary rows: where the adapter has some, their own
/// extension goes along by [`and`](Self::and).
pub struct ExpertSlotTables {
    tables: Arc<ExpertTables>,
    layers: Vec<ExpertLoraLayer>,
    next: Option<Arc<dyn SlotExtension>>,
    next_is_installed: AtomicBool,
}

impl ExpertSlotTables {
    /// The experts of an adapter: what [`AdapterSlot::experts`](lora_weights::AdapterSlot::experts) gives.
    pub fn new(tables: Arc<ExpertTables>, layers: &[ExpertLoraLayer]) -> Self {
        Self {
            tables,
            layers: layers.to_vec(),
            next: None,
            next_is_installed: AtomicBool::new(false),
        }
    }

    /// With another extension of the same slot, installed after the experts and uninstalled before them.
    #[must_use]
    pub fn and(mut self, next: Arc<dyn SlotExtension>) -> Self {
        self.next = Some(next);
        self
    }
}

impl SlotExtension for ExpertSlotTables {
    fn install(&self, slot: u32) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.tables.install(slot, &self.layers)?;
        self.next.as_ref().map_or(Ok(()), |next| {
            self.next_is_installed.store(true, Ordering::Release);
            next.install(slot)
        })
    }

    fn uninstall(&self, slot: u32) {
        if let Some(next) = &self.next
            && self.next_is_installed.swap(false, Ordering::AcqRel)
        {
            next.uninstall(slot);
        }
        if let Err(error) = self.tables.remove(slot) {
            tracing::error!(%error, slot, "expert entries could not be zeroed");
        }
    }

    fn device_bytes(&self) -> u64 {
        // The tables are allocated once for all slots.
        self.next.as_ref().map_or(0, |next| next.device_bytes())
    }
}

impl fmt::Debug for ExpertSlotTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertSlotTables")
            .field("layers", &self.layers.len())
            .field("and", &self.next.is_some())
            .finish_non_exhaustive()
    }
}
