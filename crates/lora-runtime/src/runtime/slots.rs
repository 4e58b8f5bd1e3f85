//! The life of adapters in slots.

use super::LoraRuntime;
use crate::{Adapter, RuntimeError};
use lora_weights::{AdapterSlot, SlotLease, SlotTarget, StagedAdapter, Unloaded};
use std::sync::Arc;

impl LoraRuntime {
    /// Fills slots `0..n` at startup; slot 0 is active.
    ///
    /// # Errors
    /// As [`LoraWeights::load`](lora_weights::LoraWeights::load): no slot is filled then.
    pub fn load<'a>(
        &self,
        adapters: impl IntoIterator<Item = &'a Adapter>,
    ) -> Result<Vec<Arc<AdapterSlot>>, RuntimeError> {
        let adapters: Vec<&Adapter> = adapters.into_iter().collect();
        let check = |adapter: &&'a Adapter| Ok((*adapter, self.check(adapter)?));
        let checked = adapters.iter().map(check);
        let checked = checked.collect::<Result<Vec<_>, RuntimeError>>()?;
        let inputs = checked
            .iter()
            .map(|(adapter, report)| self.input(adapter, report))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(self.weights.load(&inputs)?)
    }

    /// Brings an adapter into a cache slot: the first empty one, else the least recently used one that nobody holds.
    ///
    /// # Errors
    /// As [`LoraWeights::promote`](lora_weights::LoraWeights::promote).
    pub fn promote(&self, adapter: &Adapter) -> Result<Arc<AdapterSlot>, RuntimeError> {
        let _span = tracing::info_span!("lora_promote", adapter = adapter.name()).entered();
        // Not worth auditing and packing where there is no slot; the choice itself is made when the image is ready.
        self.weights.victim()?;
        self.bring_in(adapter, SlotTarget::Victim)
    }

    /// Replaces the contents of a slot as one transaction. Where the slot is active its pairs are to be installed again
    /// ([`layer`](Self::layer)).
    ///
    /// # Errors
    /// As [`LoraWeights::swap`](lora_weights::LoraWeights::swap). After an upload that failed midway the slot is a placeholder.
    pub fn swap(&self, slot: u32, adapter: &Adapter) -> Result<Arc<AdapterSlot>, RuntimeError> {
        let _span = tracing::info_span!("lora_swap", slot, adapter = adapter.name()).entered();
        self.weights.check_swap(slot)?;
        self.bring_in(adapter, SlotTarget::Slot(slot))
    }

    /// Audits an adapter and packs it into staging memory, on the calling thread; no slot and no device is touched. For an engine that
    /// paces a promotion or a swap itself: [`StagedAdapter::begin`] reserves the slot and starts the upload on a stream of its
    /// own, [`is_done`](lora_weights::SlotTransaction::is_done) polls it (or [`event`](lora_weights::SlotTransaction::event) is waited
    /// for), and [`commit`](lora_weights::SlotTransaction::commit), between two steps, makes the adapter visible, all at once. Other
    /// slots are routed and launched meanwhile.
    ///
    /// ```no_run
    /// use lora_runtime::weights::SlotTarget;
    /// # fn serve(runtime: &lora_runtime::LoraRuntime, adapter: &lora_runtime::Adapter, mut step: impl FnMut())
    /// # -> Result<(), lora_runtime::RuntimeError> {
    /// let staged = runtime.stage(adapter)?; // on any thread
    /// let swap = staged.begin(SlotTarget::Slot(3)).map_err(|refused| refused.error)?;
    /// while !swap.is_done().unwrap_or(true) {
    ///     step();
    /// }
    /// let adapter = swap.commit()?; // requests that lease slot 3 from here on get this generation
    /// # let _ = adapter;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`LoraWeights::stage`](lora_weights::LoraWeights::stage).
    pub fn stage(&self, adapter: &Adapter) -> Result<StagedAdapter, RuntimeError> {
        let report = self.check(adapter)?;
        Ok(self.weights.stage(&self.input(adapter, &report)?)?)
    }

    /// Makes `slot` active and returns the slot that was. Pairs are to be installed again ([`layer`](Self::layer)).
    ///
    /// # Errors
    /// As [`LoraWeights::rotate`](lora_weights::LoraWeights::rotate): refused while requests hold the old active slot, or where rotation is not permitted.
    pub fn rotate(&self, slot: u32) -> Result<Option<u32>, RuntimeError> {
        Ok(self.weights.rotate(slot)?)
    }

    /// Empties a slot, at once or when the last request that holds it has ended.
    ///
    /// # Errors
    /// As [`LoraWeights::unload`](lora_weights::LoraWeights::unload).
    pub fn unload(&self, slot: u32) -> Result<Unloaded, RuntimeError> {
        Ok(self.weights.unload(slot)?)
    }

    /// Holds the adapter that `request` resolves to until the lease is dropped: a slot number, a negative number for the
    /// active adapter, [`BASE_SLOT`](lora_weights::BASE_SLOT) for the base model. `None` where there is no adapter to hold.
    pub fn lease(&self, request: i32) -> Option<SlotLease> {
        self.weights.lease(request)
    }

    /// Holds `adapter` for a request, from wherever it is: the resident adapter of its name, else this one, promoted into a cache slot
    /// first. Threads that acquire adapters which are not resident promote one after the other, each name once.
    ///
    /// # Errors
    /// As [`promote`](Self::promote). An error that [is busy](RuntimeError::is_busy) says nothing against the adapter.
    pub fn acquire(&self, adapter: &Adapter) -> Result<SlotLease, RuntimeError> {
        if let Some(lease) = self.weights.lease_named(adapter.name()) {
            return Ok(lease);
        }
        let _promoting = self.promoting.lock();
        loop {
            if let Some(lease) = self.weights.lease_named(adapter.name()) {
                return Ok(lease);
            }
            self.promote(adapter)?;
        }
    }

    /// The prefix-cache key of what `request` is served with now.
    pub fn adapter_id(&self, request: i32) -> u64 {
        self.weights.adapter_id_for_slot(request)
    }
}
