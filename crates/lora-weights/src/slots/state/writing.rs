//! Slots on their way to other contents.

use super::super::adapter::Contents;
use super::super::units::UnitRuns;
use super::{Entry, Phase, SlotStates, SlotTarget};
use crate::WeightsError;

/// A slot reserved for new contents.
#[derive(Debug)]
pub(in crate::slots) struct Reservation {
    pub(in crate::slots) slot: u32,
    /// The generation that the new contents will have.
    pub(in crate::slots) generation: u64,
    /// Units for the new contents.
    pub(in crate::slots) units: UnitRuns,
    /// The former contents, but for their units: the extensions are to be uninstalled.
    pub(in crate::slots) former: Option<Contents>,
    /// The slot's table entries must be zeroed before its memory is written.
    pub(in crate::slots) clear_tables: bool,
}

impl SlotStates {
    /// What a swap of `slot` would be refused for now; packing is not worth starting then.
    pub(in crate::slots) fn check_writable(
        &self,
        slot: u32,
        verb: &'static str,
    ) -> Result<(), WeightsError> {
        self.check_idle(slot)?;
        self.check_permitted(slot, verb)
    }

    /// Reserves a slot for new contents under `name` that need `units` units. From here on the former contents are
    /// gone. Changes nothing on an error.
    pub(in crate::slots) fn reserve(
        &mut self,
        target: SlotTarget,
        name: &str,
        units: u64,
    ) -> Result<Reservation, WeightsError> {
        let slot = match target {
            SlotTarget::Slot(slot) => {
                self.check_writable(slot, "swap")?;
                slot
            }
            SlotTarget::Victim => {
                self.check_name(name, None)?;
                self.victim()?
            }
        };
        let generation = |states: &Self| {
            let of_slot = states.entries[slot as usize].generation;
            of_slot.max(states.retired.unwrap_or(0)) + 1
        };
        self.reserve_at(slot, name, units, generation)
    }

    /// Reserves an empty slot for a startup adapter. The first load of a pool has generation 0.
    pub(in crate::slots) fn reserve_startup(
        &mut self,
        slot: u32,
        name: &str,
        units: u64,
    ) -> Result<Reservation, WeightsError> {
        self.check_range(slot)?;
        if !matches!(self.entries[slot as usize].phase, Phase::Placeholder) {
            return Err(WeightsError::AlreadyLoaded { slot });
        }
        let generation = |states: &Self| {
            let of_slot = states.entries[slot as usize].generation;
            states
                .retired
                .map_or(of_slot, |retired| of_slot.max(retired) + 1)
        };
        self.reserve_at(slot, name, units, generation)
    }

    fn reserve_at(
        &mut self,
        slot: u32,
        name: &str,
        units: u64,
        generation: impl Fn(&Self) -> u64,
    ) -> Result<Reservation, WeightsError> {
        self.check_name(name, Some(slot))?;
        let entry = &self.entries[slot as usize];
        let held = match &entry.phase {
            Phase::Filled(contents) => contents.units.len(),
            _ => 0,
        };
        let free = self.units.free() + held;
        if units > free {
            return Err(WeightsError::ExpertRegionFull {
                needed: units,
                free,
                total: self.units.total(),
            });
        }
        let name = Some(name.to_owned());
        let entry = &mut self.entries[slot as usize];
        let former = match std::mem::replace(&mut entry.phase, Phase::Writing { name }) {
            Phase::Filled(mut contents) => {
                self.units.release(std::mem::take(&mut contents.units));
                self.retire_generation(slot);
                Some(contents)
            }
            _ => None,
        };
        // Enough are free: checked above, and nothing was taken since.
        let taken = self.units.allocate(units).unwrap_or_default();
        Ok(Reservation {
            slot,
            generation: generation(self),
            units: taken,
            clear_tables: former.is_some() || self.entries[slot as usize].stale_tables,
            former,
        })
    }

    /// Makes a reserved slot's new contents visible, all at once.
    pub(in crate::slots) fn publish(&mut self, contents: Contents) {
        let slot = contents.adapter.slot;
        let entry = &mut self.entries[slot as usize];
        debug_assert!(matches!(entry.phase, Phase::Writing { .. }) && entry.refs == 0);
        entry.generation = contents.adapter.generation;
        entry.stale_tables = false;
        entry.phase = Phase::Filled(contents);
        self.touch(slot);
    }

    /// Makes a reserved slot a placeholder and its units free. `stale_tables`: its table entries could not be zeroed.
    pub(in crate::slots) fn vacate(&mut self, slot: u32, units: UnitRuns, stale_tables: bool) {
        let entry = &mut self.entries[slot as usize];
        debug_assert!(matches!(entry.phase, Phase::Writing { .. }) && entry.refs == 0);
        entry.stale_tables = stale_tables;
        entry.phase = Phase::Placeholder;
        self.units.release(units);
    }

    /// Reserves a filled slot, keeping its contents, which [`restore`](Self::restore) or [`vacate`](Self::vacate) ends.
    pub(in crate::slots) fn hold(&mut self, slot: u32) -> Result<Contents, WeightsError> {
        self.check_idle(slot)?;
        let entry = &mut self.entries[slot as usize];
        match std::mem::replace(&mut entry.phase, Phase::Placeholder) {
            Phase::Filled(contents) => {
                let name = Some(contents.adapter.name.clone());
                entry.phase = Phase::Writing { name };
                Ok(contents)
            }
            other => {
                entry.phase = other;
                Err(WeightsError::SlotEmpty { slot })
            }
        }
    }

    /// Gives a held slot its contents back.
    pub(in crate::slots) fn restore(&mut self, contents: Contents) {
        let entry = &mut self.entries[contents.adapter.slot as usize];
        debug_assert!(matches!(entry.phase, Phase::Writing { .. }));
        entry.phase = Phase::Filled(contents);
    }

    /// Reserves a placeholder, to zero its tables; [`vacate`](Self::vacate) ends it.
    pub(in crate::slots) fn hold_empty(&mut self, slot: u32) {
        let entry = &mut self.entries[slot as usize];
        debug_assert!(matches!(entry.phase, Phase::Placeholder));
        entry.phase = Phase::Writing { name: None };
    }

    /// Counts a slot's contents as gone: their generation is not given out again.
    pub(in crate::slots) fn retire_generation(&mut self, slot: u32) {
        let generation = self.entries[slot as usize].generation;
        self.retired = self.retired.max(Some(generation));
    }

    /// No slot but `except` has or is about to have an adapter of this name.
    fn check_name(&self, name: &str, except: Option<u32>) -> Result<(), WeightsError> {
        let has = |entry: &Entry| match &entry.phase {
            Phase::Filled(contents) => contents.adapter.name == name,
            Phase::Writing { name: Some(other) } => other == name,
            _ => false,
        };
        let holder = self
            .entries
            .iter()
            .enumerate()
            .find(|(slot, entry)| except != Some(*slot as u32) && has(entry));
        match holder {
            None => Ok(()),
            Some((slot, _)) => Err(WeightsError::DuplicateName {
                name: name.to_owned(),
                slot: slot as u32,
            }),
        }
    }
}
