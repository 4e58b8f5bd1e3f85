//! New contents for a slot, in three steps that the engine paces: stage (audit and pack, the device untouched), begin
//! (reserve the slot, start the upload), commit (tables, then everything visible at once).

use super::adapter::{AdapterSlot, Contents, SlotExtension};
use super::shared::Shared;
use super::state::{Reservation, SlotTarget};
use super::units::UnitRuns;
use crate::device::{Completion, MemoryError, StagingBuffer};
use crate::pack::{SlotPairs, place_pairs, unit_count};
use crate::{AuditReport, UploadStage, WeightsError};
use lora_config::AdapterConfig;
use std::sync::Arc;

/// An audited adapter, packed into host memory: the image of a slot, ready to upload into any. Nothing on the device
/// has been touched. Dropping it gives its staging buffer back for the next one.
pub struct StagedAdapter {
    pub(super) shared: Arc<Shared>,
    pub(super) name: String,
    pub(super) config: AdapterConfig,
    pub(super) report: Arc<AuditReport>,
    /// Bytes of the image; the table entries follow it in the buffer.
    pub(super) image_bytes: usize,
    /// Taken out by `begin` alone.
    pub(super) staging: Option<Box<dyn StagingBuffer>>,
    pub(super) extension: Option<Arc<dyn SlotExtension>>,
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

    /// Vocabulary rows need an extension that applies them.
    pub(super) fn check_extension(&self) -> Result<(), WeightsError> {
        let tensors = self.report.overlays.len();
        if tensors == 0 || self.extension.is_some() {
            return Ok(());
        }
        Err(WeightsError::OverlayWithoutExtension {
            adapter: self.name.clone(),
            tensors,
        })
    }

    /// Reserves a slot and starts the upload. From here on the slot's former adapter is gone: its table entries are
    /// zeroed and its extension dropped before the first byte of the slot is written.
    ///
    /// # Errors
    /// Having changed nothing: [`WeightsError::SlotOutOfRange`], [`SlotBusy`](WeightsError::SlotBusy),
    /// [`SlotBeingWritten`](WeightsError::SlotBeingWritten),
    /// [`RotationNotPermitted`](WeightsError::RotationNotPermitted), [`DuplicateName`](WeightsError::DuplicateName),
    /// [`ExpertRegionFull`](WeightsError::ExpertRegionFull), [`Victim`](WeightsError::Victim).
    /// [`WeightsError::Upload`] where an upload failed: the slot is a placeholder then.
    pub fn begin(self, target: SlotTarget) -> Result<SlotTransaction, BeginError> {
        let units = unit_count(&self.report.pairs);
        let reserved = self.shared.states.lock().reserve(target, &self.name, units);
        self.begin_reserved(reserved, false)
    }

    /// As [`begin`](Self::begin), into an empty slot at startup.
    pub(super) fn begin_startup(
        self,
        slot: u32,
        pinned: bool,
    ) -> Result<SlotTransaction, BeginError> {
        let units = unit_count(&self.report.pairs);
        let reserved = self
            .shared
            .states
            .lock()
            .reserve_startup(slot, &self.name, units);
        self.begin_reserved(reserved, pinned)
    }

    fn begin_reserved(
        mut self,
        reserved: Result<Reservation, WeightsError>,
        pin: bool,
    ) -> Result<SlotTransaction, BeginError> {
        let reserved = match reserved {
            Ok(reserved) => reserved,
            Err(error) => {
                let staged = Some(Box::new(self));
                return Err(BeginError { error, staged });
            }
        };
        let staging = self.staging.take();
        let image_bytes = self.image_bytes;
        let failed = |error| BeginError {
            error,
            staged: None,
        };
        let Reservation {
            slot,
            former,
            clear_tables,
            ..
        } = reserved;
        let mut open = OpenSlot {
            shared: Arc::clone(&self.shared),
            slot,
            units: reserved.units,
            extension: self.extension.take(),
            open: true,
        };
        if let Some(extension) = former.and_then(|contents| contents.extension) {
            extension.uninstall(slot);
        }
        let adapter = self
            .adapter(slot, reserved.generation, &open.units)
            .map_err(failed)?;
        let shared = &self.shared;
        // Never absent: only this function takes it, and it consumes the adapter.
        let mut staging = match staging {
            Some(staging) => staging,
            None => shared
                .staging
                .take(image_bytes)
                .map_err(|e| failed(e.into()))?,
        };
        if clear_tables {
            staging = shared
                .write_tables(slot, std::iter::empty(), staging, image_bytes)
                .map_err(|source| failed(open.fail(UploadStage::ClearTables, source)))?;
        }
        let copies = shared.image_copies(slot, &open.units);
        let upload = if copies.is_empty() {
            Upload::Landed(staging)
        } else {
            let started = shared.memory.upload(staging, &copies);
            Upload::Pending(
                started.map_err(|source| failed(open.fail(UploadStage::Image, source)))?,
            )
        };
        Ok(SlotTransaction {
            upload,
            open,
            adapter: Arc::new(adapter),
            image_bytes,
            overlay_tensors: self.report.overlays.len(),
            pin,
        })
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

impl Drop for StagedAdapter {
    fn drop(&mut self) {
        if let Some(staging) = self.staging.take() {
            self.shared.staging.put(staging);
        }
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

enum Upload {
    Pending(Box<dyn Completion>),
    Landed(Box<dyn StagingBuffer>),
}

/// A slot on its way to new contents. Nobody can acquire it, its table entries are zero, and nothing else is affected:
/// routing, leases and transactions of other slots go on. Dropping it waits for the upload and leaves a placeholder.
pub struct SlotTransaction {
    // Dropped first: an upload must have ended before the slot becomes anybody else's.
    upload: Upload,
    open: OpenSlot,
    adapter: Arc<AdapterSlot>,
    image_bytes: usize,
    /// Tensors that nothing but an extension applies.
    overlay_tensors: usize,
    pin: bool,
}

impl SlotTransaction {
    /// The slot being written.
    pub fn slot(&self) -> u32 {
        self.open.slot
    }

    /// The adapter as it will be visible: pairs at their device addresses, from which a [`SlotExtension`] can be built.
    pub fn adapter(&self) -> &AdapterSlot {
        &self.adapter
    }

    /// Gives the slot an extension, in place of one given before; it is installed by [`commit`](Self::commit).
    pub fn attach(&mut self, extension: Arc<dyn SlotExtension>) {
        self.open.extension = Some(extension);
    }

    /// True once the image has landed, so that [`commit`](Self::commit) waits for nothing but its small table writes.
    /// Never blocks.
    ///
    /// # Errors
    /// The upload's own; [`commit`](Self::commit) will fail too.
    pub fn is_done(&self) -> Result<bool, MemoryError> {
        match &self.upload {
            Upload::Pending(completion) => completion.is_done(),
            Upload::Landed(_) => Ok(true),
        }
    }

    /// The driver's event behind [`is_done`](Self::is_done), where the memory has events.
    pub fn event(&self) -> Option<u64> {
        match &self.upload {
            Upload::Pending(completion) => completion.event(),
            Upload::Landed(_) => None,
        }
    }

    /// Waits until the image has landed.
    ///
    /// # Errors
    /// [`WeightsError::Upload`]: the slot is a placeholder.
    pub fn wait(self) -> Result<Self, WeightsError> {
        let Self {
            upload, mut open, ..
        } = self;
        let landed = match upload {
            Upload::Pending(completion) => completion
                .wait()
                .map_err(|source| open.fail(UploadStage::Image, source))?,
            Upload::Landed(staging) => staging,
        };
        Ok(Self {
            upload: Upload::Landed(landed),
            open,
            ..self
        })
    }

    /// Waits for the image, writes the slot's table entries, installs the extension and makes name, config, pairs and
    /// generation visible, all at once.
    ///
    /// # Errors
    /// [`WeightsError::Upload`], [`Extension`](WeightsError::Extension) or
    /// [`OverlayWithoutExtension`](WeightsError::OverlayWithoutExtension): the slot is a placeholder with zeroed table
    /// entries.
    pub fn commit(self) -> Result<Arc<AdapterSlot>, WeightsError> {
        let Self {
            upload,
            mut open,
            adapter,
            image_bytes,
            overlay_tensors,
            pin,
        } = self.wait()?;
        if overlay_tensors > 0 && open.extension.is_none() {
            return Err(WeightsError::OverlayWithoutExtension {
                adapter: adapter.name.clone(),
                tensors: overlay_tensors,
            });
        }
        let Upload::Landed(staging) = upload else {
            // `wait` returns landed uploads only; dropping `open` leaves a placeholder.
            return Err(WeightsError::SlotBeingWritten { slot: open.slot });
        };
        let slot = open.slot;
        let shared = Arc::clone(&open.shared);
        let staging = shared
            .write_tables(slot, shared.table_pairs(&adapter), staging, image_bytes)
            .map_err(|source| open.fail(UploadStage::Tables, source))?;
        shared.staging.put(staging);
        if let Some(extension) = &open.extension
            && let Err(source) = extension.install(slot)
        {
            return Err(open.fail_extension(source));
        }
        let contents = open.close(Arc::clone(&adapter));
        let mut states = shared.states.lock();
        states.publish(contents);
        if pin {
            states.pin(slot);
        }
        drop(states);
        tracing::info!(
            slot,
            adapter = %adapter.name,
            generation = adapter.generation,
            bytes = image_bytes,
            "adapter loaded"
        );
        Ok(adapter)
    }
}

impl std::fmt::Debug for SlotTransaction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlotTransaction")
            .field("slot", &self.open.slot)
            .field("adapter", &self.adapter.name)
            .finish_non_exhaustive()
    }
}

/// A reserved slot. Unless it is closed into new contents it becomes a placeholder when dropped.
struct OpenSlot {
    shared: Arc<Shared>,
    slot: u32,
    units: UnitRuns,
    extension: Option<Arc<dyn SlotExtension>>,
    open: bool,
}

impl OpenSlot {
    /// Makes the slot a placeholder after a failed upload, and says so.
    fn fail(&mut self, stage: UploadStage, source: MemoryError) -> WeightsError {
        // The image goes up with the entries already zero; in the other stages nothing is known of them.
        self.vacate(stage != UploadStage::Image);
        let slot = self.slot;
        tracing::warn!(slot, %stage, error = %source, "slot transaction failed");
        WeightsError::Upload {
            slot,
            stage,
            source,
        }
    }

    /// Makes the slot a placeholder after its extension failed to install.
    fn fail_extension(&mut self, source: Box<dyn std::error::Error + Send + Sync>) -> WeightsError {
        if let Some(extension) = self.extension.take() {
            extension.uninstall(self.slot);
        }
        self.vacate(true);
        let slot = self.slot;
        tracing::warn!(slot, error = %source, "slot extension failed to install");
        WeightsError::Extension { slot, source }
    }

    fn vacate(&mut self, clear_tables: bool) {
        let stale = clear_tables && self.shared.clear_tables(self.slot).is_err();
        let units = std::mem::take(&mut self.units);
        self.shared.states.lock().vacate(self.slot, units, stale);
        self.open = false;
    }

    fn close(&mut self, adapter: Arc<AdapterSlot>) -> Contents {
        self.open = false;
        Contents {
            adapter,
            units: std::mem::take(&mut self.units),
            extension: self.extension.take(),
        }
    }
}

impl Drop for OpenSlot {
    fn drop(&mut self) {
        if self.open {
            self.vacate(false);
        }
    }
}
