//! Adapters in slots: load, promote, swap, rotate, unload, and the references that requests hold.

mod adapter;
mod extensions;
mod landed;
mod lease;
mod load;
mod lookup;
mod memory;
mod metrics;
mod open;
mod references;
mod shared;
mod staged;
mod state;
mod sync;
mod transaction;
mod units;
mod upkeep;
mod victim;

pub use adapter::AdapterSlot;
pub use extensions::SlotExtension;
pub use landed::LandingInput;
pub use lease::SlotLease;
pub use load::{LoraAdapterInput, load_lora_adapters_generic, load_lora_adapters_multi};
pub use metrics::{Metrics, StageTimes};
pub use staged::{BeginError, StagedAdapter};
pub use state::SlotTarget;
pub use transaction::SlotTransaction;
pub use victim::{Occupancy, SlotView, VictimError, select_victim_slot};

use crate::device::{DeviceMemory, DevicePtr, MemoryError};
use crate::{PoolLayout, PoolSpec, WeightsError};
use lora_config::ModelSpec;
use shared::Shared;
use std::sync::Arc;

/// What an unload gave back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FreedSlot {
    /// The slot, a placeholder now.
    pub slot: u32,
    /// Name of the adapter that is gone.
    pub name: String,
    /// Its generation.
    pub generation: u64,
    /// Bytes of the slot, ready for the next adapter.
    pub slot_bytes: u64,
    /// Bytes given back to the expert region.
    pub expert_bytes: u64,
    /// Device bytes of its extensions.
    pub extension_bytes: u64,
}

/// What became of an unload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unloaded {
    /// Everything was freed.
    Freed(FreedSlot),
    /// Requests still hold the adapter. No further request can acquire it; the last release frees it.
    Draining {
        /// References held.
        refs: u32,
    },
}

/// What became of a release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Released {
    /// There was nothing to give back: no such slot, the base model, or no reference.
    Unheld,
    /// The slot is still filled.
    Held {
        /// References remaining.
        refs: u32,
    },
    /// It was the last reference of an unloaded adapter, and everything was freed.
    Freed(FreedSlot),
    /// As `Freed`, but the slot's table entries could not be zeroed. They are zeroed before the slot is used again.
    FreedWithStaleTables {
        /// The slot, a placeholder.
        slot: u32,
        /// Why.
        source: MemoryError,
    },
}

/// A pool of adapters on a device, and the rules by which they come and go.
///
/// - **load** fills slots `0..n` at startup; slot 0 is active. Startup slots are pinned unless asked otherwise. The rest
///   are placeholders and serve as the promotion cache.
/// - **promote** brings an adapter into a cache slot: the first empty one, else the least recently used one that no
///   request holds ([`select_victim_slot`]). Neither pinned slots nor the active one are cache slots.
/// - **swap** brings new contents into a named slot, also under the same name (an RL step).
/// - **rotate** makes another slot active.
/// - **unload** makes a slot a placeholder, at once or when its last reference is gone.
///
/// Changing what is active, or the contents of a pinned or the active slot, needs
/// [`LoadPolicy::allow_rotation`](crate::LoadPolicy::allow_rotation); promotion does not. A slot whose adapter requests
/// hold is never written. Every change of contents is a transaction ([`StagedAdapter::begin`],
/// [`SlotTransaction::commit`]) that ends with the whole adapter visible or with a placeholder whose table entries are
/// zero, and touches no byte of another slot.
///
/// Threads: routes are values fixed for life and need no lock; everything else takes one lock for a few instructions.
/// Packing, uploads and frees run outside it, on a slot that is reserved meanwhile, so that nothing waits for another
/// slot's transaction.
///
/// A cheap handle: clones share the pool, whose device memory is freed with the last handle, lease and transaction.
#[derive(Clone)]
pub struct LoraWeights {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for LoraWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoraWeights")
            .field("bytes", &self.shared.layout.bytes())
            .field("adapters", &self.adapter_names())
            .finish_non_exhaustive()
    }
}

impl LoraWeights {
    /// Allocates a pool of placeholders, zeroed.
    ///
    /// # Errors
    /// As [`PoolLayout::new`]; [`WeightsError::InsufficientMemory`], before anything is allocated, where slots, tables
    /// and expert region would leave less free memory than they take; [`WeightsError::Memory`].
    pub fn new(
        memory: Arc<dyn DeviceMemory>,
        model: ModelSpec,
        pool: PoolSpec,
    ) -> Result<Self, WeightsError> {
        Ok(Self {
            shared: Arc::new(Shared::allocate(memory, model, pool)?),
        })
    }

    /// The pool's layout.
    pub fn layout(&self) -> &PoolLayout {
        &self.shared.layout
    }

    /// The model it was laid out for.
    pub fn model(&self) -> &ModelSpec {
        &self.shared.model
    }

    /// The spec it was laid out by.
    pub fn pool(&self) -> &PoolSpec {
        &self.shared.pool
    }

    /// Address of a slot's first byte, fixed for life; `None` out of range.
    pub fn slot_base(&self, slot: u32) -> Option<DevicePtr> {
        (slot < self.shared.layout.slots()).then(|| self.shared.slot_base(slot))
    }

    /// Free and all units of the expert region.
    pub fn expert_units(&self) -> (u64, u64) {
        self.shared.states.lock().expert_units()
    }

    /// Counters of this pool's life so far.
    pub fn metrics(&self) -> Metrics {
        self.shared.metrics.snapshot()
    }

    /// Makes staging memory for a slot's image, kept for the next one. Page-locking it can hold up other threads' calls into the
    /// driver for as long as a quarter of a second: an engine that starts without adapters does it before it serves. An adapter with experts takes more than
    /// this, and page-locks it when it is staged.
    ///
    /// # Errors
    /// [`WeightsError::Memory`].
    pub fn reserve_staging(&self) -> Result<(), WeightsError> {
        let layout = &self.shared.layout;
        // A slot is allocated, so its bytes fit.
        let bytes = layout.bytes().slot as usize + layout.tables().image_bytes();
        let staging = self.shared.staging.take(bytes)?;
        self.shared.staging.put(staging);
        Ok(())
    }

    /// Frees the staging memory that is kept for the next image. The next one page-locks its own: see
    /// [`reserve_staging`](Self::reserve_staging).
    pub fn trim_staging(&self) {
        self.shared.staging.clear();
        self.shared.memory.trim_staging();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_leases_and_transactions_move_between_threads() {
        fn moves<T: Send>() {}
        fn is_shared<T: Send + Sync>() {}
        is_shared::<LoraWeights>();
        is_shared::<SlotLease>();
        moves::<StagedAdapter>();
        moves::<SlotTransaction>();
    }
}
