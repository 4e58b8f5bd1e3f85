//! A slot between two contents.

use super::adapter::{AdapterSlot, Contents};
use super::extensions::Extensions;
use super::shared::Shared;
use super::units::UnitRuns;
use crate::device::MemoryError;
use crate::{UploadStage, WeightsError};
use std::sync::Arc;

/// A reserved slot. Unless it is closed into new contents it becomes a placeholder when dropped, whatever happened in
/// between: its table entries zeroed, its extensions uninstalled, its units free.
pub(super) struct OpenSlot {
    pub(super) shared: Arc<Shared>,
    pub(super) slot: u32,
    pub(super) units: UnitRuns,
    pub(super) extensions: Extensions,
    /// The slot's table entries are known to be zero.
    pub(super) tables_are_zero: bool,
    open: bool,
}

impl OpenSlot {
    pub(super) fn new(
        shared: Arc<Shared>,
        slot: u32,
        units: UnitRuns,
        tables_are_zero: bool,
    ) -> Self {
        Self {
            shared,
            slot,
            units,
            extensions: Extensions::default(),
            tables_are_zero,
            open: true,
        }
    }

    /// Makes the extensions reachable.
    pub(super) fn install(&mut self, adapter: &AdapterSlot) -> Result<(), WeightsError> {
        let slot = self.slot;
        self.extensions.install(adapter).map_err(|source| {
            self.vacate();
            tracing::warn!(slot, error = %source, "slot extension failed to install");
            let error = WeightsError::Extension { slot, source };
            self.shared.metrics.refused(error)
        })
    }

    /// Makes the slot a placeholder after a failed upload, and says so.
    pub(super) fn fail(&mut self, stage: UploadStage, source: MemoryError) -> WeightsError {
        self.vacate();
        let slot = self.slot;
        tracing::warn!(slot, %stage, error = %source, "slot transaction failed");
        self.shared.metrics.refused(WeightsError::Upload {
            slot,
            stage,
            source,
        })
    }

    /// Hands over what the slot owns from now on.
    pub(super) fn close(&mut self, adapter: Arc<AdapterSlot>) -> Contents {
        self.open = false;
        Contents {
            adapter,
            units: std::mem::take(&mut self.units),
            extensions: std::mem::take(&mut self.extensions),
        }
    }

    fn vacate(&mut self) {
        self.open = false;
        self.extensions.uninstall(self.slot);
        let stale = !self.tables_are_zero && self.shared.clear_tables(self.slot).is_err();
        let units = std::mem::take(&mut self.units);
        self.shared.states.lock().vacate(self.slot, units, stale);
    }
}

impl Drop for OpenSlot {
    fn drop(&mut self) {
        if self.open {
            self.vacate();
        }
    }
}
