//! The rules of slot life as a plain value: who may acquire, write, evict and free what. It knows no device and takes no
//! lock; its owner keeps it behind one, holds that for the length of one method, and does the slow work (packing,
//! uploads, frees) between two of them, on a slot that is reserved meanwhile.

mod holding;
mod writing;

pub(super) use holding::{ReleaseStep, UnloadStep};
pub(super) use writing::Reservation;

use super::adapter::{AdapterSlot, Contents};
use super::extensions::SlotExtension;
use super::units::UnitAllocator;
use super::victim::{Occupancy, SlotView, select_victim_slot};
use crate::{SlotSpace, VictimError, WeightsError};
use std::sync::Arc;

/// Where the next contents go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotTarget {
    /// This slot.
    Slot(u32),
    /// The cache slot that [`select_victim_slot`] names.
    Victim,
}

#[derive(Debug)]
enum Phase {
    Placeholder,
    /// Reserved: nobody can acquire it. `name` keeps a second adapter of that name out.
    Writing {
        name: Option<String>,
    },
    Filled(Contents),
    /// Unloaded, but requests still hold it: no further acquire; the last release frees it.
    Draining(Contents),
}

#[derive(Debug)]
struct Entry {
    phase: Phase,
    refs: u32,
    last_used: u64,
    pinned: bool,
    /// Of the last contents.
    generation: u64,
    /// The device tables may still name former contents, because zeroing them failed.
    stale_tables: bool,
}

#[derive(Debug)]
pub(in crate::slots) struct SlotStates {
    entries: Vec<Entry>,
    active: Option<u32>,
    clock: u64,
    /// Largest generation that ever left a slot: later contents are numbered above it, so that (name, generation) never
    /// names two contents.
    retired: Option<u64>,
    units: UnitAllocator,
    allow_rotation: bool,
}

impl SlotStates {
    pub(in crate::slots) fn new(slots: u32, units: u64, allow_rotation: bool) -> Self {
        let placeholder = || Entry {
            phase: Phase::Placeholder,
            refs: 0,
            last_used: 0,
            pinned: false,
            generation: 0,
            stale_tables: false,
        };
        Self {
            entries: (0..slots).map(|_| placeholder()).collect(),
            active: None,
            clock: 0,
            retired: None,
            units: UnitAllocator::new(units),
            allow_rotation,
        }
    }

    pub(in crate::slots) fn space(&self) -> SlotSpace {
        SlotSpace {
            slots: self.entries.len() as u32,
            active: self.active,
        }
    }

    /// Free and all units of the expert region.
    pub(in crate::slots) fn expert_units(&self) -> (u64, u64) {
        (self.units.free(), self.units.total())
    }

    /// The adapter that requests for `slot` can acquire.
    pub(in crate::slots) fn adapter(&self, slot: u32) -> Option<&Arc<AdapterSlot>> {
        match &self.entries.get(slot as usize)?.phase {
            Phase::Filled(contents) => Some(&contents.adapter),
            _ => None,
        }
    }

    pub(in crate::slots) fn extensions(&self, slot: u32) -> Vec<Arc<dyn SlotExtension>> {
        match self.entries.get(slot as usize).map(|entry| &entry.phase) {
            Some(Phase::Filled(contents)) => contents.extensions.as_slice().to_vec(),
            _ => Vec::new(),
        }
    }

    pub(in crate::slots) fn refs(&self, slot: u32) -> Option<u32> {
        Some(self.entries.get(slot as usize)?.refs)
    }

    pub(in crate::slots) fn last_used(&self, slot: u32) -> Option<u64> {
        Some(self.entries.get(slot as usize)?.last_used)
    }

    pub(in crate::slots) fn is_pinned(&self, slot: u32) -> bool {
        self.entries
            .get(slot as usize)
            .is_some_and(|entry| entry.pinned)
    }

    pub(in crate::slots) fn slot_of(&self, name: &str) -> Option<u32> {
        (0..self.entries.len() as u32)
            .find(|slot| self.adapter(*slot).is_some_and(|a| a.name == name))
    }

    /// First slot that holds or is about to hold anything.
    pub(in crate::slots) fn first_occupied(&self) -> Option<u32> {
        let at = self
            .entries
            .iter()
            .position(|entry| !matches!(entry.phase, Phase::Placeholder))?;
        Some(at as u32)
    }

    /// Slots that promotion may take: neither pinned nor active. A promotion into the active slot would change what
    /// requests without a slot are served with.
    pub(in crate::slots) fn cache_views(&self) -> Vec<SlotView> {
        let of = |(slot, entry): (usize, &Entry)| SlotView {
            slot: slot as u32,
            occupancy: match entry.phase {
                Phase::Placeholder => Occupancy::Empty,
                Phase::Filled(_) => Occupancy::Filled,
                Phase::Writing { .. } | Phase::Draining(_) => Occupancy::Reserved,
            },
            refs: entry.refs,
            last_used: entry.last_used,
        };
        let is_cache =
            |(slot, entry): &(usize, &Entry)| !entry.pinned && self.active != Some(*slot as u32);
        self.entries
            .iter()
            .enumerate()
            .filter(is_cache)
            .map(of)
            .collect()
    }

    pub(in crate::slots) fn victim(&self) -> Result<u32, VictimError> {
        select_victim_slot(&self.cache_views())
    }

    pub(in crate::slots) fn pin(&mut self, slot: u32) {
        self.entries[slot as usize].pinned = true;
    }

    /// Makes a startup slot active, before any request.
    pub(in crate::slots) fn activate(&mut self, slot: u32) {
        self.active = Some(slot);
    }

    fn check_range(&self, slot: u32) -> Result<(), WeightsError> {
        if (slot as usize) < self.entries.len() {
            return Ok(());
        }
        Err(WeightsError::SlotOutOfRange {
            slot: slot.into(),
            slots: self.entries.len() as u32,
        })
    }

    /// No request holds the slot and nobody writes it.
    fn check_idle(&self, slot: u32) -> Result<(), WeightsError> {
        self.check_range(slot)?;
        let entry = &self.entries[slot as usize];
        if matches!(entry.phase, Phase::Writing { .. }) {
            return Err(WeightsError::SlotBeingWritten { slot });
        }
        if entry.refs > 0 {
            let refs = entry.refs;
            return Err(WeightsError::SlotBusy { slot, refs });
        }
        Ok(())
    }

    fn check_permitted(&self, slot: u32, verb: &'static str) -> Result<(), WeightsError> {
        let guarded = self.entries[slot as usize].pinned || self.active == Some(slot);
        if guarded && !self.allow_rotation {
            return Err(WeightsError::RotationNotPermitted { verb, slot });
        }
        Ok(())
    }
}
