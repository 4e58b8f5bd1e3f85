//! New contents for a slot, in three steps that the engine paces: stage (audit and pack, the device untouched), begin
//! (reserve the slot, start the upload), commit (tables, then everything visible at once).

use super::adapter::AdapterSlot;
use super::extensions::SlotExtension;
use super::metrics::Arrival;
use super::open::OpenSlot;
use crate::device::{Completion, MemoryError, StagingBuffer};
use crate::{UploadStage, WeightsError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How far the image is.
pub(super) enum Upload {
    Pending(Box<dyn Completion>),
    Landed(Box<dyn StagingBuffer>),
}

/// A slot on its way to new contents. Nobody can acquire it, its table entries are zero, and nothing else is affected:
/// routing, leases and transactions of other slots go on. Dropping it waits for the upload and leaves a placeholder.
pub struct SlotTransaction {
    // Dropped first: an upload must have ended before the slot becomes anybody else's.
    pub(super) upload: Upload,
    pub(super) begun: Instant,
    /// From `begun` until the image was first seen to have landed.
    pub(super) landed: OnceLock<Duration>,
    pub(super) open: OpenSlot,
    pub(super) adapter: Arc<AdapterSlot>,
    pub(super) image_bytes: usize,
    /// Tensors that nothing but an extension applies.
    pub(super) overlay_tensors: usize,
    pub(super) arrival: Arrival,
    pub(super) pin: bool,
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

    /// Gives the slot an extension more, which [`commit`](Self::commit) installs after those given before.
    pub fn attach(&mut self, extension: Arc<dyn SlotExtension>) {
        self.open.extensions.attach(extension);
    }

    /// True once the image has landed, so that [`commit`](Self::commit) waits for nothing but its small table writes.
    /// Never blocks.
    ///
    /// # Errors
    /// The upload's own; [`commit`](Self::commit) will fail too.
    pub fn is_done(&self) -> Result<bool, MemoryError> {
        match &self.upload {
            Upload::Pending(completion) => {
                let done = completion.is_done()?;
                if done {
                    self.note_landed();
                }
                Ok(done)
            }
            Upload::Landed(_) => Ok(true),
        }
    }

    fn note_landed(&self) {
        if self.landed.get().is_none() {
            let time = self.begun.elapsed();
            let landed = self.landed.get_or_init(|| time);
            self.open.shared.metrics.upload.took(*landed);
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
    pub fn wait(mut self) -> Result<Self, WeightsError> {
        if let Upload::Pending(completion) = self.upload {
            match completion.wait() {
                Ok(staging) => self.upload = Upload::Landed(staging),
                Err(source) => return Err(self.open.fail(UploadStage::Image, source)),
            }
            self.note_landed();
        }
        Ok(self)
    }

    /// Waits for the image, writes the slot's table entries, installs the extensions and makes name, config, pairs and
    /// generation visible, all at once.
    ///
    /// # Errors
    /// [`WeightsError::Upload`], [`Extension`](WeightsError::Extension) or
    /// [`OverlayWithoutExtension`](WeightsError::OverlayWithoutExtension): the slot is a placeholder with zeroed table
    /// entries.
    pub fn commit(self) -> Result<Arc<AdapterSlot>, WeightsError> {
        let landed = self.wait()?;
        let shared = Arc::clone(&landed.open.shared);
        let (adapter, bytes, arrival) = (
            Arc::clone(&landed.adapter),
            landed.image_bytes,
            landed.arrival,
        );
        let (slot, generation) = (adapter.slot, adapter.generation);
        let _span =
            tracing::info_span!("lora_commit", adapter = %adapter.name, slot, generation).entered();
        shared.metrics.commit.time(|| landed.make_visible())?;
        shared.metrics.loaded(arrival, bytes as u64);
        tracing::info!(bytes, "adapter loaded");
        Ok(adapter)
    }

    /// The steps of a commit whose image has landed.
    fn make_visible(self) -> Result<(), WeightsError> {
        let Self {
            upload,
            mut open,
            adapter,
            image_bytes,
            overlay_tensors,
            pin,
            ..
        } = self;
        let slot = open.slot;
        let shared = Arc::clone(&open.shared);
        if overlay_tensors > 0 && !open.extensions.apply_overlays() {
            let error = WeightsError::OverlayWithoutExtension {
                adapter: adapter.name.clone(),
                tensors: overlay_tensors,
            };
            return Err(shared.metrics.refused(error));
        }
        let Upload::Landed(staging) = upload else {
            // `wait` returns landed uploads only; dropping `open` leaves a placeholder.
            return Err(WeightsError::SlotBeingWritten { slot });
        };
        open.tables_are_zero = false;
        let staging = shared
            .write_tables(slot, shared.table_pairs(&adapter), staging, image_bytes)
            .map_err(|source| open.fail(UploadStage::Tables, source))?;
        shared.staging.put(staging);
        open.install(&adapter)?;
        let contents = open.close(adapter);
        let mut states = shared.states.lock();
        states.publish(contents);
        if pin {
            states.pin(slot);
        }
        Ok(())
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
