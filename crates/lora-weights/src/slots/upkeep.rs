//! Verbs that move no adapter in: rotate, unload, refresh, extend.

use super::state::UnloadStep;
use super::units::UnitRuns;
use super::{LoraWeights, SlotExtension, Unloaded};
use crate::device::MemoryError;
use crate::{UploadStage, WeightsError};
use std::sync::Arc;

impl LoraWeights {
    /// Makes `slot` active and returns the slot that was. Nothing changes where it already is.
    ///
    /// # Errors
    /// [`WeightsError::RotationNotPermitted`], [`SlotOutOfRange`](WeightsError::SlotOutOfRange);
    /// [`SlotEmpty`](WeightsError::SlotEmpty) or [`SlotBeingWritten`](WeightsError::SlotBeingWritten) where the slot
    /// holds no adapter; [`SlotBusy`](WeightsError::SlotBusy) while requests hold the old active slot.
    pub fn rotate(&self, slot: u32) -> Result<Option<u32>, WeightsError> {
        let metrics = &self.shared.metrics;
        let rotated = self.shared.states.lock().rotate(slot);
        let former = rotated.map_err(|error| metrics.refused(error))?;
        if former != Some(slot) {
            metrics.rotations.add(1);
        }
        tracing::info!(slot, ?former, "active adapter rotated");
        Ok(former)
    }

    /// Makes a slot a placeholder: at once where no request holds it, else when the last reference is given back. Its
    /// table entries, expert units and extensions are freed; the slot becomes an ordinary cache slot.
    ///
    /// # Errors
    /// [`WeightsError::SlotOutOfRange`], [`SlotEmpty`](WeightsError::SlotEmpty),
    /// [`SlotBeingWritten`](WeightsError::SlotBeingWritten); [`RotationNotPermitted`](WeightsError::RotationNotPermitted)
    /// for a pinned or the active slot. [`WeightsError::Upload`] where the slot is a placeholder but its table entries
    /// could not be zeroed; they are zeroed before the slot is used again.
    pub fn unload(&self, slot: u32) -> Result<Unloaded, WeightsError> {
        let shared = &self.shared;
        let step = shared.states.lock().unload(slot);
        let unloaded = step.and_then(|step| match step {
            UnloadStep::Draining { refs } => Ok(Unloaded::Draining { refs }),
            UnloadStep::Retire(contents) => shared
                .retire(contents)
                .map(Unloaded::Freed)
                .map_err(|source| stale(slot, source)),
        });
        match unloaded {
            Ok(_) => shared.metrics.unloads.add(1),
            Err(error) => return Err(shared.metrics.refused(error)),
        }
        unloaded
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

    /// The extensions of the adapter in `slot`, in the order in which they were installed. A clone kept past the slot's life
    /// delays the drop, not the uninstall.
    pub fn extensions(&self, slot: u32) -> Vec<Arc<dyn SlotExtension>> {
        self.shared.states.lock().extensions(slot)
    }

    /// Gives the adapter in a filled slot an extension more, installed after those it has: for overlays that can be built only once the
    /// served tables are known. New contents take theirs through [`SlotTransaction::attach`](crate::SlotTransaction::attach).
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
        contents.extensions.attach(extension);
        let adapter = Arc::clone(&contents.adapter);
        match contents.extensions.install(&adapter) {
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
