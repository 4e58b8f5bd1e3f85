//! An adapter in host memory, ready for any slot.

use super::adapter::AdapterSlot;
use super::extensions::Extensions;
use super::metrics::Arrival;
use super::open::OpenSlot;
use super::shared::Shared;
use super::state::{Reservation, SlotTarget};
use super::transaction::{SlotTransaction, Upload};
use super::units::UnitRuns;
use crate::device::StagingBuffer;
use crate::pack::{SlotPairs, place_pairs, unit_count};
use crate::{AuditReport, UploadStage, WeightsError};
use lora_config::AdapterConfig;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// An audited adapter, packed into host memory: the image of a slot, ready to upload into any. Nothing on the device
/// has been touched.
pub struct StagedAdapter {
    pub(super) shared: Arc<Shared>,
    pub(super) name: String,
    pub(super) config: AdapterConfig,
    pub(super) report: Arc<AuditReport>,
    /// Bytes of the image; the table entries follow it in the buffer.
    pub(super) image_bytes: usize,
    pub(super) staging: Box<dyn StagingBuffer>,
    pub(super) extensions: Extensions,
}

/// A refusal to begin, with the staged adapter where it can be tried again.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct BeginError {
    /// Why.
    #[source]
    pub error: WeightsError,
    /// The adapter, still staged, where the refusal came before any write; `None` where an upload failed.
    pub staged: Option<Box<StagedAdapter>>,
}

impl From<BeginError> for WeightsError {
    fn from(refused: BeginError) -> Self {
        refused.error
    }
}

impl From<WeightsError> for BeginError {
    fn from(error: WeightsError) -> Self {
        Self {
            error,
            staged: None,
        }
    }
}

impl StagedAdapter {
    /// Name it will have.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the audit saw.
    pub fn report(&self) -> &AuditReport {
        &self.report
    }

    /// Bytes that `begin` uploads.
    pub fn image_bytes(&self) -> usize {
        self.image_bytes
    }

    /// Reserves a slot and starts the upload. From here on the slot's former adapter is gone: its table entries are
    /// zeroed and its extensions dropped before the first byte of the slot is written.
    ///
    /// # Errors
    /// Having changed nothing: [`WeightsError::SlotOutOfRange`], [`SlotBusy`](WeightsError::SlotBusy),
    /// [`SlotBeingWritten`](WeightsError::SlotBeingWritten),
    /// [`RotationNotPermitted`](WeightsError::RotationNotPermitted), [`DuplicateName`](WeightsError::DuplicateName),
    /// [`ExpertRegionFull`](WeightsError::ExpertRegionFull), [`Victim`](WeightsError::Victim).
    /// [`WeightsError::Upload`] where an upload failed: the slot is a placeholder then.
    pub fn begin(self, target: SlotTarget) -> Result<SlotTransaction, BeginError> {
        let mut states = self.shared.states.lock();
        let reserved = states.reserve(target, &self.name, self.units());
        drop(states);
        let arrival = match target {
            SlotTarget::Slot(_) => Arrival::Swap,
            SlotTarget::Victim => Arrival::Promotion,
        };
        self.begin_reserved(reserved, arrival, false)
    }

    /// As [`begin`](Self::begin), into an empty slot at startup.
    pub(super) fn begin_startup(
        self,
        slot: u32,
        pinned: bool,
    ) -> Result<SlotTransaction, BeginError> {
        let mut states = self.shared.states.lock();
        let reserved = states.reserve_startup(slot, &self.name, self.units());
        drop(states);
        self.begin_reserved(reserved, Arrival::Startup, pinned)
    }

    /// Vocabulary rows need an extension that applies them.
    pub(super) fn check_overlays(&self) -> Result<(), WeightsError> {
        let tensors = self.report.overlays.len();
        if tensors == 0 || self.extensions.apply_overlays() {
            return Ok(());
        }
        let adapter = self.name.clone();
        let error = WeightsError::OverlayWithoutExtension { adapter, tensors };
        Err(self.shared.metrics.refused(error))
    }

    fn begin_reserved(
        self,
        reserved: Result<Reservation, WeightsError>,
        arrival: Arrival,
        pin: bool,
    ) -> Result<SlotTransaction, BeginError> {
        match reserved {
            Ok(reserved) => Ok(self.start(reserved, arrival, pin)?),
            Err(error) => Err(BeginError {
                error: self.shared.metrics.refused(error),
                staged: Some(Box::new(self)),
            }),
        }
    }

    fn start(
        self,
        reserved: Reservation,
        arrival: Arrival,
        pin: bool,
    ) -> Result<SlotTransaction, WeightsError> {
        let slot = reserved.slot;
        let bytes = self.image_bytes;
        let _span = tracing::info_span!("lora_begin", adapter = %self.name, slot, bytes).entered();
        let shared = Arc::clone(&self.shared);
        let mut open = OpenSlot::new(
            Arc::clone(&shared),
            slot,
            reserved.units,
            !reserved.clear_tables,
        );
        if let Some(mut former) = reserved.former {
            shared.metrics.evictions.add(1);
            former.extensions.uninstall(slot);
        }
        let adapter = self.adapter(slot, reserved.generation, &open.units)?;
        open.extensions = self.extensions;
        let mut staging = self.staging;
        if reserved.clear_tables {
            staging = shared
                .write_tables(slot, std::iter::empty(), staging, self.image_bytes)
                .map_err(|source| open.fail(UploadStage::ClearTables, source))?;
            open.tables_are_zero = true;
        }
        let copies = shared.image_copies(slot, &open.units);
        let begun = Instant::now();
        let upload = if copies.is_empty() {
            Upload::Landed(staging)
        } else {
            let started = shared.memory.upload(staging, &copies);
            Upload::Pending(started.map_err(|source| open.fail(UploadStage::Image, source))?)
        };
        Ok(SlotTransaction {
            upload,
            begun,
            landed: OnceLock::new(),
            open,
            adapter: Arc::new(adapter),
            image_bytes: self.image_bytes,
            overlay_tensors: self.report.overlays.len(),
            arrival,
            pin,
        })
    }

    /// Units of the expert region that it needs.
    fn units(&self) -> u64 {
        unit_count(&self.report.pairs)
    }

    fn adapter(
        &self,
        slot: u32,
        generation: u64,
        units: &UnitRuns,
    ) -> Result<AdapterSlot, WeightsError> {
        let shared = &self.shared;
        let SlotPairs { layers, experts } = place_pairs(
            &self.report.pairs,
            &shared.layout,
            shared.slot_base(slot),
            units.units().map(|unit| shared.unit_base(unit)),
        )?;
        Ok(AdapterSlot {
            name: self.name.clone(),
            slot,
            generation,
            config: self.config.clone(),
            layers: layers.into(),
            experts: experts.into(),
            report: Arc::clone(&self.report),
        })
    }
}

impl std::fmt::Debug for StagedAdapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StagedAdapter")
            .field("name", &self.name)
            .field("image_bytes", &self.image_bytes)
            .finish_non_exhaustive()
    }
}
