//! The verbs that bring adapters in.

use super::extensions::Extensions;
use super::shared::Shared;
use super::state::UnloadStep;
use super::{AdapterSlot, LoraWeights, SlotExtension, SlotTarget, StagedAdapter};
use crate::device::DeviceMemory;
use crate::pack::{PackSource, pack_adapter};
use crate::{AdapterStore, AuditReport, LoadPolicy, PoolSpec, WeightsError, audit_adapter};
use lora_config::{AdapterConfig, ModelSpec};
use std::sync::Arc;

/// An adapter to bring in.
#[derive(Clone)]
pub struct LoraAdapterInput<'a> {
    /// Name to load it under; may be empty, but no two residents share one.
    pub name: &'a str,
    /// Its tensors.
    pub store: &'a AdapterStore,
    /// Its parsed config.
    pub config: &'a AdapterConfig,
    /// At startup: never a victim of promotion. Not read by other verbs.
    pub pinned: bool,
    /// What [`LoraWeights::audit`] of the same pool said of the same store; audited again where `None`, and where that audit saw
    /// no values.
    pub report: Option<&'a AuditReport>,
    /// What the slot will own beside its pairs.
    extensions: Extensions,
}

impl<'a> LoraAdapterInput<'a> {
    /// A pinned adapter, not audited yet, without extensions.
    pub fn new(name: &'a str, store: &'a AdapterStore, config: &'a AdapterConfig) -> Self {
        Self {
            name,
            store,
            config,
            pinned: true,
            report: None,
            extensions: Extensions::default(),
        }
    }

    /// Not pinned: at startup it fills a slot that promotion may take later.
    #[must_use]
    pub fn unpinned(mut self) -> Self {
        self.pinned = false;
        self
    }

    /// With the report of an audit, which is not repeated.
    #[must_use]
    pub fn with_report(mut self, report: &'a AuditReport) -> Self {
        self.report = Some(report);
        self
    }

    /// With an extension more, installed after those given before. An adapter with vocabulary rows needs one that
    /// [applies them](SlotExtension::applies_overlays).
    #[must_use]
    pub fn with_extension(mut self, extension: Arc<dyn SlotExtension>) -> Self {
        self.extensions.attach(extension);
        self
    }
}

/// Allocates a pool and loads startup adapters into slots `0..n`; slot 0 is active.
///
/// # Errors
/// As [`LoraWeights::new`] and [`LoraWeights::load`].
pub fn load_lora_adapters_multi(
    memory: Arc<dyn DeviceMemory>,
    model: ModelSpec,
    pool: PoolSpec,
    adapters: &[LoraAdapterInput<'_>],
) -> Result<LoraWeights, WeightsError> {
    let weights = LoraWeights::new(memory, model, pool)?;
    weights.load(adapters)?;
    Ok(weights)
}

/// [`load_lora_adapters_multi`] of one adapter, whose name may be empty.
///
/// # Errors
/// As [`load_lora_adapters_multi`].
pub fn load_lora_adapters_generic(
    memory: Arc<dyn DeviceMemory>,
    model: ModelSpec,
    pool: PoolSpec,
    adapter: LoraAdapterInput<'_>,
) -> Result<LoraWeights, WeightsError> {
    load_lora_adapters_multi(memory, model, pool, &[adapter])
}

impl LoraWeights {
    /// Audits an adapter for this pool. Touches no device.
    pub fn audit(&self, adapter: &LoraAdapterInput<'_>) -> AuditReport {
        self.audit_under(adapter, self.shared.pool.policy)
    }

    /// [`audit`](Self::audit) under another policy than the pool's: for a layer above that permits more once it has what
    /// it takes.
    pub fn audit_under(&self, adapter: &LoraAdapterInput<'_>, policy: LoadPolicy) -> AuditReport {
        let _span = tracing::info_span!("lora_audit", adapter = adapter.name).entered();
        let shared = &self.shared;
        let pool = PoolSpec {
            policy,
            ..shared.pool
        };
        let audit = || audit_adapter(adapter.store, adapter.config, &shared.model, &pool);
        shared.metrics.audit.time(audit)
    }

    /// Gives the report of an adapter that loads back.
    ///
    /// # Errors
    /// [`WeightsError::Refused`] with a report that holds an error.
    pub fn accept(&self, name: &str, report: AuditReport) -> Result<AuditReport, WeightsError> {
        if report.ok() {
            return Ok(report);
        }
        Err(self.shared.metrics.refused(WeightsError::Refused {
            adapter: name.to_owned(),
            report: Box::new(report),
        }))
    }

    /// Audits an adapter and packs it into staging memory. Touches no slot.
    ///
    /// # Errors
    /// [`WeightsError::Refused`] with the whole report; [`WeightsError::Memory`] where there is no staging memory;
    /// [`WeightsError::PairMismatch`] where the input's report is another pool's.
    ///
    /// # Panics
    /// Where the input's report is another store's.
    pub fn stage(&self, adapter: &LoraAdapterInput<'_>) -> Result<StagedAdapter, WeightsError> {
        self.pack(adapter, self.accepted(adapter)?)
    }

    /// The report of an adapter that loads.
    fn accepted(&self, adapter: &LoraAdapterInput<'_>) -> Result<AuditReport, WeightsError> {
        let report = match adapter.report {
            Some(report) if report.values_read => report.clone(),
            _ => self.audit(adapter),
        };
        self.accept(adapter.name, report)
    }

    fn pack(
        &self,
        adapter: &LoraAdapterInput<'_>,
        report: AuditReport,
    ) -> Result<StagedAdapter, WeightsError> {
        let _span = tracing::info_span!("lora_pack", adapter = adapter.name).entered();
        let metrics = &self.shared.metrics;
        let packed = metrics.pack.time(|| self.packed(adapter, report));
        packed.map_err(|error| metrics.refused(error))
    }

    fn packed(
        &self,
        adapter: &LoraAdapterInput<'_>,
        report: AuditReport,
    ) -> Result<StagedAdapter, WeightsError> {
        let shared = &self.shared;
        let (mut staging, image_bytes) = shared.stage_image(&report.pairs)?;
        let source = PackSource {
            store: adapter.store,
            pairs: &report.pairs,
        };
        pack_adapter(source, &shared.layout, staging.bytes_mut())?;
        Ok(StagedAdapter {
            shared: Arc::clone(shared),
            name: adapter.name.to_owned(),
            config: adapter.config.clone(),
            report: Arc::new(report),
            image_bytes,
            staging,
            extensions: adapter.extensions.clone(),
        })
    }

    /// Brings a staged adapter into a slot, waiting for the upload: begin, wait, commit. Returns the new pairs, to be
    /// installed again where the slot is active.
    ///
    /// # Errors
    /// As [`StagedAdapter::begin`] and [`SlotTransaction::commit`](super::SlotTransaction::commit);
    /// [`WeightsError::OverlayWithoutExtension`] before any write.
    pub fn pack_store_into_slot(
        &self,
        target: SlotTarget,
        staged: StagedAdapter,
    ) -> Result<Arc<AdapterSlot>, WeightsError> {
        staged.check_overlays()?;
        staged.begin(target)?.commit()
    }

    /// Fills slots `0..n` of an empty pool and makes slot 0 active. All adapters are audited before the first is
    /// written; after a failure no slot is filled.
    ///
    /// # Errors
    /// [`WeightsError::NoAdapters`], [`TooManyAdapters`](WeightsError::TooManyAdapters),
    /// [`DuplicateName`](WeightsError::DuplicateName), [`AlreadyLoaded`](WeightsError::AlreadyLoaded),
    /// [`Refused`](WeightsError::Refused), [`ExpertRegionFull`](WeightsError::ExpertRegionFull),
    /// [`Upload`](WeightsError::Upload), [`Memory`](WeightsError::Memory).
    pub fn load(
        &self,
        adapters: &[LoraAdapterInput<'_>],
    ) -> Result<Vec<Arc<AdapterSlot>>, WeightsError> {
        let _span = tracing::info_span!("lora_load", adapters = adapters.len()).entered();
        self.check_load(adapters)
            .map_err(|error| self.shared.metrics.refused(error))?;
        let reports = adapters
            .iter()
            .map(|adapter| self.accepted(adapter))
            .collect::<Result<Vec<_>, _>>()?;
        let mut loaded = Vec::with_capacity(adapters.len());
        for (slot, (adapter, report)) in (0u32..).zip(adapters.iter().zip(reports)) {
            let filled = self.pack(adapter, report).and_then(|staged| {
                staged.check_overlays()?;
                staged.begin_startup(slot, adapter.pinned)?.commit()
            });
            match filled {
                Ok(adapter) => loaded.push(adapter),
                Err(error) => {
                    self.shared.discard_all(&loaded);
                    return Err(error);
                }
            }
        }
        self.shared.states.lock().activate(0);
        Ok(loaded)
    }

    /// Brings an adapter into a cache slot, stamped as just used so that the next promotion does not take it before its
    /// first request arrives.
    ///
    /// # Errors
    /// [`WeightsError::Victim`], [`DuplicateName`](WeightsError::DuplicateName) where the adapter is resident already
    /// ([`slot_of`](Self::slot_of) finds it), and as [`stage`](Self::stage) and
    /// [`pack_store_into_slot`](Self::pack_store_into_slot).
    pub fn promote(
        &self,
        adapter: &LoraAdapterInput<'_>,
    ) -> Result<Arc<AdapterSlot>, WeightsError> {
        let _span = tracing::info_span!("lora_promote", adapter = adapter.name).entered();
        // Not worth auditing and packing where there is no slot; the choice itself is made when the image is ready.
        self.victim()?;
        let staged = self.stage(adapter)?;
        self.pack_store_into_slot(SlotTarget::Victim, staged)
    }

    /// The slot that a promotion would take now.
    ///
    /// # Errors
    /// [`WeightsError::Victim`] where there is none.
    pub fn victim(&self) -> Result<u32, WeightsError> {
        let victim = self.shared.states.lock().victim();
        victim.map_err(|error| self.shared.metrics.refused(error.into()))
    }

    /// What a swap of `slot` would be refused for now, before an adapter is audited and packed for it.
    ///
    /// # Errors
    /// [`WeightsError::SlotOutOfRange`], [`SlotBusy`](WeightsError::SlotBusy),
    /// [`SlotBeingWritten`](WeightsError::SlotBeingWritten), [`RotationNotPermitted`](WeightsError::RotationNotPermitted).
    pub fn check_swap(&self, slot: u32) -> Result<(), WeightsError> {
        let writable = self.shared.states.lock().check_writable(slot, "swap");
        writable.map_err(|error| self.shared.metrics.refused(error))
    }

    /// Brings new contents into a slot, under the same name or another, as one transaction: the adapter is audited and
    /// packed while the former one still serves; then all of it becomes visible at once, or the slot becomes a
    /// placeholder.
    ///
    /// # Errors
    /// As [`stage`](Self::stage) and [`pack_store_into_slot`](Self::pack_store_into_slot).
    pub fn swap(
        &self,
        slot: u32,
        adapter: &LoraAdapterInput<'_>,
    ) -> Result<Arc<AdapterSlot>, WeightsError> {
        let _span = tracing::info_span!("lora_swap", slot, adapter = adapter.name).entered();
        self.check_swap(slot)?;
        let staged = self.stage(adapter)?;
        self.pack_store_into_slot(SlotTarget::Slot(slot), staged)
    }

    fn check_load(&self, adapters: &[LoraAdapterInput<'_>]) -> Result<(), WeightsError> {
        let slots = self.shared.layout.slots();
        if adapters.is_empty() {
            return Err(WeightsError::NoAdapters);
        }
        if adapters.len() > slots as usize {
            return Err(WeightsError::TooManyAdapters {
                given: adapters.len(),
                slots,
            });
        }
        for (at, adapter) in adapters.iter().enumerate() {
            if let Some(slot) = (0u32..)
                .zip(&adapters[..at])
                .find_map(|(slot, other)| (other.name == adapter.name).then_some(slot))
            {
                return Err(WeightsError::DuplicateName {
                    name: adapter.name.to_owned(),
                    slot,
                });
            }
        }
        match self.shared.states.lock().first_occupied() {
            Some(slot) => Err(WeightsError::AlreadyLoaded { slot }),
            None => Ok(()),
        }
    }
}

impl Shared {
    /// Unloads what a failed load has filled so far.
    fn discard_all(&self, loaded: &[Arc<AdapterSlot>]) {
        for adapter in loaded {
            let step = self.states.lock().discard(adapter.slot, adapter.generation);
            if let Some(UnloadStep::Retire(contents)) = step
                && let Err(error) = self.retire(contents)
            {
                tracing::warn!(slot = adapter.slot, %error, "tables of an unloaded slot were not zeroed");
            }
        }
    }
}
