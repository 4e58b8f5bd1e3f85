//! Adapters in slots: load, promote, swap, rotate, unload, and the references that requests hold.
//!
//! [`LoraWeights`] owns the device memory of a pool and the rules of slot life:
//!
//! - **load** fills slots `0..n` at startup; slot 0 is active. Startup slots are pinned unless asked otherwise. The rest
//!   are placeholders and serve as the promotion cache.
//! - **promote** brings an adapter into a cache slot: the first empty one, else the least recently used one that no
//!   request holds.
//! - **swap** brings new contents into a named slot, also under the same name (an RL step).
//! - **rotate** makes another slot active.
//! - **unload** makes a slot a placeholder, at once or when its last reference is gone.
//!
//! Changing what is active, or the contents of a pinned or the active slot, needs
//! [`LoadPolicy::allow_rotation`](crate::LoadPolicy); promotion does not, and takes neither.
//!
//! Threads: routes are values fixed for life and need no lock; everything else takes one lock for a few instructions.
//! Packing, uploads and frees run outside it, on a slot that is reserved meanwhile, so that nothing waits for another
//! slot's transaction.

mod adapter;
mod lease;
mod load;
mod memory;
mod shared;
mod state;
mod transaction;
mod units;
mod victim;

pub use adapter::{AdapterSlot, SlotExtension};
pub use lease::SlotLease;
pub use load::{LoraAdapterInput, load_lora_adapters_generic, load_lora_adapters_multi};
pub use state::SlotTarget;
pub use transaction::{BeginError, SlotTransaction, StagedAdapter};
pub use victim::{Occupancy, SlotView, VictimError, select_victim_slot};

use crate::device::{DeviceMemory, DevicePtr, LoraPair, LoraRoute, MemoryError};
use crate::{
    BASE_ADAPTER_ID, BASE_SLOT, LoraLayerWeights, LoraModule, NO_DELTA, PoolLayout, PoolSpec,
    Resolved, SlotSpace, UploadStage, WeightsError, routed_prefill_slot_of,
};
use lora_config::ModelSpec;
use shared::Shared;
use state::UnloadStep;
use std::sync::Arc;
use units::UnitRuns;

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
    /// Device bytes of its extension.
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

/// A pool of adapters on a device. A cheap handle: clones share the pool, whose device memory is freed with the last
/// handle, lease and transaction.
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

    /// Frees the staging buffer that is kept for the next image.
    pub fn trim_staging(&self) {
        self.shared.staging.clear();
    }

    /// The tables of a module in a layer: addresses fixed for life. `None` where the pool has no room for it.
    pub fn route(&self, layer: usize, module: LoraModule) -> Option<LoraRoute> {
        let (table, region) = self.shared.layout.region(layer, module)?;
        self.table_route(table, (region.n_out, region.k_in), region.max_rank)
    }

    /// The tables of a layer's router: addresses fixed for life. `None` where the layer is not MoE or the pool has no
    /// room for experts.
    pub fn router_route(&self, layer: usize) -> Option<LoraRoute> {
        let layout = &self.shared.layout;
        let experts = layout.experts()?;
        let dims = experts.dims(crate::LoraTarget::Router)?;
        self.table_route(layout.router_table(layer)?, dims, experts.max_rank())
    }

    fn table_route(
        &self,
        table: usize,
        (n_out, k_in): (u32, u32),
        max_rank: u32,
    ) -> Option<LoraRoute> {
        let base = self.shared.tables_base();
        let [a, b, scale, rank] = self.shared.layout.tables().offsets(table)?;
        Some(LoraRoute {
            a_table: base.offset(a),
            b_table: base.offset(b),
            scale_table: base.offset(scale),
            rank_table: base.offset(rank),
            slots: self.shared.layout.slots(),
            k_in,
            n_out,
            max_rank,
        })
    }

    /// What requests resolve against now. An engine takes it once a step and builds all row maps from it.
    pub fn slot_space(&self) -> SlotSpace {
        self.shared.states.lock().space()
    }

    /// The active slot; `None` where none was ever made active.
    pub fn active_slot(&self) -> Option<u32> {
        self.slot_space().active
    }

    /// The adapter in `slot`; `None` for a placeholder, a slot being written or unloaded, or one out of range.
    pub fn adapter(&self, slot: u32) -> Option<Arc<AdapterSlot>> {
        self.shared.states.lock().adapter(slot).cloned()
    }

    /// Dense pairs of the active adapter, for sites that have them installed: one entry a model layer. `None` where the
    /// active slot holds no adapter.
    pub fn active_layers(&self) -> Option<Arc<[LoraLayerWeights]>> {
        let states = self.shared.states.lock();
        let adapter = states.adapter(states.space().active?)?;
        Some(Arc::clone(&adapter.layers))
    }

    /// Name of the adapter in each slot; `None` where none can be acquired.
    pub fn adapter_names(&self) -> Vec<Option<String>> {
        let states = self.shared.states.lock();
        (0..states.space().slots)
            .map(|slot| states.adapter(slot).map(|adapter| adapter.name.clone()))
            .collect()
    }

    /// The slot whose adapter has this name and can be acquired.
    pub fn slot_of(&self, name: &str) -> Option<u32> {
        self.shared.states.lock().slot_of(name)
    }

    /// The prefix-cache key of what `request` is served with now; [`BASE_ADAPTER_ID`] where that is the base model. A
    /// lease's own key is the one to use for a running request.
    pub fn adapter_id_for_slot(&self, request: i32) -> u64 {
        self.resolved_adapter(request)
            .map_or(BASE_ADAPTER_ID, |adapter| adapter.adapter_id())
    }

    /// The pair that `request` is served with at a module. `None` for the base model, a slot out of range or without
    /// adapter, a layer that does not exist or has no pairs, a module that is not adapted.
    pub fn select_routed_pair(
        &self,
        request: i32,
        layer: usize,
        module: LoraModule,
    ) -> Option<LoraPair> {
        self.resolved_adapter(request)?.pair(layer, module)
    }

    /// [`routed_prefill_slot_of`] for this pool.
    pub fn routed_prefill_slot(&self, request: i32) -> Option<u32> {
        routed_prefill_slot_of(request, self.slot_space())
    }

    fn resolved_adapter(&self, request: i32) -> Option<Arc<AdapterSlot>> {
        let states = self.shared.states.lock();
        match states.space().resolve(request) {
            Resolved::Slot(slot) => states.adapter(slot).cloned(),
            Resolved::Base | Resolved::OutOfRange => None,
        }
    }

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

    /// Makes `slot` active and returns the slot that was. Nothing changes where it already is.
    ///
    /// # Errors
    /// [`WeightsError::RotationNotPermitted`], [`SlotOutOfRange`](WeightsError::SlotOutOfRange);
    /// [`SlotEmpty`](WeightsError::SlotEmpty) or [`SlotBeingWritten`](WeightsError::SlotBeingWritten) where the slot
    /// holds no adapter; [`SlotBusy`](WeightsError::SlotBusy) while requests hold the old active slot.
    pub fn rotate(&self, slot: u32) -> Result<Option<u32>, WeightsError> {
        let former = self.shared.states.lock().rotate(slot)?;
        tracing::info!(slot, ?former, "active adapter rotated");
        Ok(former)
    }

    /// Makes a slot a placeholder: at once where no request holds it, else when the last reference is given back. Its
    /// table entries, expert units and extension are freed; the slot becomes an ordinary cache slot.
    ///
    /// # Errors
    /// [`WeightsError::SlotOutOfRange`], [`SlotEmpty`](WeightsError::SlotEmpty),
    /// [`SlotBeingWritten`](WeightsError::SlotBeingWritten); [`RotationNotPermitted`](WeightsError::RotationNotPermitted)
    /// for a pinned or the active slot. [`WeightsError::Upload`] where the slot is a placeholder but its table entries
    /// could not be zeroed; they are zeroed before the slot is used again.
    pub fn unload(&self, slot: u32) -> Result<Unloaded, WeightsError> {
        let step = self.shared.states.lock().unload(slot)?;
        match step {
            UnloadStep::Draining { refs } => Ok(Unloaded::Draining { refs }),
            UnloadStep::Retire(contents) => self
                .shared
                .retire(contents)
                .map(Unloaded::Freed)
                .map_err(|source| stale(slot, source)),
        }
    }

    /// Writes a slot's table entries again from what the slot holds (zero for a placeholder): for an engine whose device
    /// memory was written by someone else. Launches of other slots are not affected.
    ///
    /// # Errors
    /// [`WeightsError::SlotOutOfRange`], [`SlotBusy`](WeightsError::SlotBusy),
    /// [`SlotBeingWritten`](WeightsError::SlotBeingWritten). [`WeightsError::Upload`]: the slot is a placeholder then.
    pub fn refresh_slot_tables(&self, slot: u32) -> Result<(), WeightsError> {
        let shared = &self.shared;
        let mut states = shared.states.lock();
        let held = match states.hold(slot) {
            Err(WeightsError::SlotEmpty { .. }) => {
                states.hold_empty(slot);
                None
            }
            held => Some(held?),
        };
        drop(states);
        let Some(contents) = held else {
            let cleared = shared.clear_tables(slot);
            let stale_tables = cleared.is_err();
            shared
                .states
                .lock()
                .vacate(slot, UnitRuns::default(), stale_tables);
            return cleared.map_err(|source| stale(slot, source));
        };
        let written = shared
            .memory
            .stage(shared.layout.tables().image_bytes())
            .and_then(|staging| {
                shared.write_tables(slot, shared.table_pairs(&contents.adapter), staging, 0)
            });
        match written {
            Ok(_) => {
                shared.states.lock().restore(contents);
                Ok(())
            }
            Err(source) => {
                self.shared.abandon(contents);
                Err(WeightsError::Upload {
                    slot,
                    stage: UploadStage::Tables,
                    source,
                })
            }
        }
    }

    /// The extension of the adapter in `slot`. A clone kept past the slot's life delays the drop, not the uninstall.
    pub fn extension(&self, slot: u32) -> Option<Arc<dyn SlotExtension>> {
        self.shared.states.lock().extension(slot)
    }

    /// Gives the adapter in a filled slot an extension, or another one: for overlays that can be built only once the
    /// served tables are known. New contents take theirs through [`SlotTransaction::attach`].
    ///
    /// # Errors
    /// [`WeightsError::SlotOutOfRange`], [`SlotEmpty`](WeightsError::SlotEmpty), [`SlotBusy`](WeightsError::SlotBusy),
    /// [`SlotBeingWritten`](WeightsError::SlotBeingWritten), [`GenerationChanged`](WeightsError::GenerationChanged)
    /// where the slot no longer holds what the caller saw. [`WeightsError::Extension`] where it cannot be installed: the
    /// slot is a placeholder then, since its adapter is not whole without.
    pub fn attach_extension(
        &self,
        slot: u32,
        generation: u64,
        extension: Arc<dyn SlotExtension>,
    ) -> Result<(), WeightsError> {
        let mut states = self.shared.states.lock();
        let mut contents = states.hold(slot)?;
        let found = contents.adapter.generation;
        if found != generation {
            states.restore(contents);
            return Err(WeightsError::GenerationChanged {
                slot,
                expected: generation,
                found,
            });
        }
        drop(states);
        if let Some(former) = contents.extension.take() {
            former.uninstall(slot);
        }
        let installed = extension.install(slot);
        contents.extension = Some(extension);
        match installed {
            Ok(()) => {
                self.shared.states.lock().restore(contents);
                Ok(())
            }
            Err(source) => {
                self.shared.abandon(contents);
                Err(WeightsError::Extension { slot, source })
            }
        }
    }
}

fn stale(slot: u32, source: MemoryError) -> WeightsError {
    WeightsError::Upload {
        slot,
        stage: UploadStage::ClearTables,
        source,
    }
}
