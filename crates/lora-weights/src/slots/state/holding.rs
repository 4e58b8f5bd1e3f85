//! References, and what ends when they do.

use super::super::adapter::{AdapterSlot, Contents};
use super::{Entry, Phase, SlotStates};
use crate::{Resolved, WeightsError};
use std::sync::Arc;

/// What a release did.
#[derive(Debug)]
pub(in crate::slots) enum ReleaseStep {
    /// There was no reference to give back.
    Unheld,
    /// References remaining.
    Held(u32),
    /// It was the last reference of an unloaded adapter: the slot is reserved, the caller frees the contents and then
    /// calls [`SlotStates::vacate`].
    Retire(Contents),
}

/// What an unload did.
#[derive(Debug)]
pub(in crate::slots) enum UnloadStep {
    /// Requests still hold the adapter; the last release frees it.
    Draining { refs: u32 },
    /// As [`ReleaseStep::Retire`].
    Retire(Contents),
}

impl SlotStates {
    /// Adds a reference to the adapter that `request` resolves to and stamps its recency. `None`, having changed
    /// nothing, where the request resolves to no adapter.
    pub(in crate::slots) fn acquire(&mut self, request: i32) -> Option<Arc<AdapterSlot>> {
        let Resolved::Slot(slot) = self.space().resolve(request) else {
            return None;
        };
        let entry = &mut self.entries[slot as usize];
        let Phase::Filled(contents) = &entry.phase else {
            return None;
        };
        let refs = entry.refs.checked_add(1)?;
        let adapter = Arc::clone(&contents.adapter);
        entry.refs = refs;
        self.touch(slot);
        Some(adapter)
    }

    pub(in crate::slots) fn release(&mut self, slot: u32) -> ReleaseStep {
        let Some(entry) = self.entries.get_mut(slot as usize) else {
            return ReleaseStep::Unheld;
        };
        let Some(refs) = entry.refs.checked_sub(1) else {
            return ReleaseStep::Unheld;
        };
        entry.refs = refs;
        match entry.drained() {
            Some(contents) => ReleaseStep::Retire(contents),
            None => ReleaseStep::Held(refs),
        }
    }

    /// Stamps a slot as used now. False for a slot out of range.
    pub(in crate::slots) fn touch(&mut self, slot: u32) -> bool {
        let Some(entry) = self.entries.get_mut(slot as usize) else {
            return false;
        };
        self.clock += 1;
        entry.last_used = self.clock;
        true
    }

    /// Starts or finishes an unload.
    pub(in crate::slots) fn unload(&mut self, slot: u32) -> Result<UnloadStep, WeightsError> {
        self.check_range(slot)?;
        match &self.entries[slot as usize].phase {
            Phase::Placeholder => return Err(WeightsError::SlotEmpty { slot }),
            Phase::Writing { .. } => return Err(WeightsError::SlotBeingWritten { slot }),
            Phase::Draining(_) => {
                let refs = self.entries[slot as usize].refs;
                return Ok(UnloadStep::Draining { refs });
            }
            Phase::Filled(_) => self.check_permitted(slot, "unload")?,
        }
        Ok(self.drain(slot))
    }

    /// Unloads the adapter of `generation` without asking for permission; `None` where the slot holds it no longer.
    pub(in crate::slots) fn discard(&mut self, slot: u32, generation: u64) -> Option<UnloadStep> {
        let held = self.adapter(slot)?;
        (held.generation == generation).then(|| self.drain(slot))
    }

    /// Keeps further requests from a filled slot, which becomes an ordinary cache slot.
    fn drain(&mut self, slot: u32) -> UnloadStep {
        self.retire_generation(slot);
        let entry = &mut self.entries[slot as usize];
        entry.pinned = false;
        entry.phase = match std::mem::replace(&mut entry.phase, Phase::Placeholder) {
            Phase::Filled(contents) => Phase::Draining(contents),
            other => other,
        };
        match entry.drained() {
            Some(contents) => UnloadStep::Retire(contents),
            None => UnloadStep::Draining { refs: entry.refs },
        }
    }

    /// Makes `slot` active. Nothing changes where it already is.
    pub(in crate::slots) fn rotate(&mut self, slot: u32) -> Result<Option<u32>, WeightsError> {
        self.check_range(slot)?;
        if self.active == Some(slot) {
            return Ok(self.active);
        }
        if !self.allow_rotation {
            let verb = "rotate";
            return Err(WeightsError::RotationNotPermitted { verb, slot });
        }
        match self.entries[slot as usize].phase {
            Phase::Filled(_) => {}
            Phase::Writing { .. } => return Err(WeightsError::SlotBeingWritten { slot }),
            Phase::Placeholder | Phase::Draining(_) => {
                return Err(WeightsError::SlotEmpty { slot });
            }
        }
        if let Some(old) = self.active {
            self.check_idle(old)?;
        }
        Ok(self.active.replace(slot))
    }
}

impl Entry {
    /// Takes an unloaded adapter out once nobody holds it; the slot stays reserved.
    fn drained(&mut self) -> Option<Contents> {
        if self.refs > 0 {
            return None;
        }
        match std::mem::replace(&mut self.phase, Phase::Writing { name: None }) {
            Phase::Draining(contents) => Some(contents),
            other => {
                self.phase = other;
                None
            }
        }
    }
}
