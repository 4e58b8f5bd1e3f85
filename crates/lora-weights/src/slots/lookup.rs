//! What an engine asks of the pool while it serves.

use super::{AdapterSlot, LoraWeights};
use crate::device::{LoraPair, LoraRoute};
use crate::{
    BASE_ADAPTER_ID, LoraLayerWeights, LoraModule, LoraTarget, Resolved, SlotSpace,
    routed_prefill_slot_of,
};
use std::sync::Arc;

impl LoraWeights {
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
        let dims = experts.dims(LoraTarget::Router)?;
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
}
