//! What a slot owns beside pool and expert units.

use super::adapter::AdapterSlot;
use std::any::Any;
use std::error::Error;
use std::sync::Arc;

/// What a slot owns beside pool and expert units: expert tables, a token overlay. Made by the layer above and bound to the slot's life: installed when
/// the slot's transaction commits, uninstalled and dropped when the slot is written again, unloaded, or its transaction fails.
///
/// A slot may have several: they are installed in the order in which they were attached, and uninstalled in reverse. One extension may serve several
/// slots, such as tables that all slots share.
pub trait SlotExtension: Any + Send + Sync {
    /// Makes the extension reachable from the device: writes the entries of the adapter's slot in tables that it shares with
    /// other slots. Called once a slot, after the slot's own tables are written and before any request can acquire the slot. An error
    /// fails the transaction.
    ///
    /// # Errors
    /// The implementation's own.
    fn install(&self, adapter: &AdapterSlot) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// Undoes [`install`](Self::install): zeroes `slot`'s entries. Called once after an install, whether it succeeded or
    /// not, when no request holds the slot and before any other contents of the slot are written.
    fn uninstall(&self, slot: u32);

    /// Device bytes that are freed with the slot, for reports.
    fn device_bytes(&self) -> u64 {
        0
    }

    /// True where it applies the adapter's vocabulary rows. An adapter that has some becomes visible only with such an extension.
    fn applies_overlays(&self) -> bool {
        false
    }
}

/// The extensions of a slot, in the order in which they are installed.
#[derive(Clone, Default)]
pub(super) struct Extensions {
    all: Vec<Arc<dyn SlotExtension>>,
    /// How many of them `install` was called on.
    installed: usize,
}

impl Extensions {
    pub(super) fn attach(&mut self, extension: Arc<dyn SlotExtension>) {
        self.all.push(extension);
    }

    pub(super) fn as_slice(&self) -> &[Arc<dyn SlotExtension>] {
        &self.all
    }

    pub(super) fn apply_overlays(&self) -> bool {
        self.all
            .iter()
            .any(|extension| extension.applies_overlays())
    }

    pub(super) fn device_bytes(&self) -> u64 {
        self.all
            .iter()
            .map(|extension| extension.device_bytes())
            .sum()
    }

    /// Installs those that are not, up to the first that fails.
    pub(super) fn install(
        &mut self,
        adapter: &AdapterSlot,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        while let Some(extension) = self.all.get(self.installed) {
            // Counted first: one that fails or panics is uninstalled too.
            self.installed += 1;
            extension.install(adapter)?;
        }
        Ok(())
    }

    /// Uninstalls and drops all, the last one first.
    pub(super) fn uninstall(&mut self, slot: u32) {
        while let Some(extension) = self.all.pop() {
            if self.all.len() < self.installed {
                extension.uninstall(slot);
            }
        }
        self.installed = 0;
    }
}
