//! The rules of slot life as a plain value: who may acquire, write, evict and free what. It knows no device and takes no
//! lock; its owner keeps it behind one, holds that for the length of one method, and does the slow work (packing,
//! uploads, frees) between two of them, on a slot that is reserved meanwhile.

use super::adapter::{AdapterSlot, Contents, SlotExtension};
use super::units::{UnitAllocator, UnitRuns};
use super::victim::{Occupancy, SlotView, select_victim_slot};
use crate::{Resolved, SlotSpace, VictimError, WeightsError};
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

/// A slot reserved for new contents.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) slot: u32,
    /// The generation that the new contents will have.
    pub(super) generation: u64,
    /// Units for the new contents.
    pub(super) units: UnitRuns,
    /// The former contents' extension, to uninstall and drop.
    pub(super) former: Option<Contents>,
    /// The slot's table entries must be zeroed before its memory is written.
    pub(super) clear_tables: bool,
}

/// What a release did.
#[derive(Debug)]
pub(super) enum ReleaseStep {
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
pub(super) enum UnloadStep {
    /// Requests still hold the adapter; the last release frees it.
    Draining { refs: u32 },
    /// As [`ReleaseStep::Retire`].
    Retire(Contents),
}

#[derive(Debug)]
pub(super) struct SlotStates {
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
    pub(super) fn new(slots: u32, units: u64, allow_rotation: bool) -> Self {
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

    pub(super) fn space(&self) -> SlotSpace {
        SlotSpace {
            slots: self.entries.len() as u32,
            active: self.active,
        }
    }

    /// Free and all units of the expert region.
    pub(super) fn expert_units(&self) -> (u64, u64) {
        (self.units.free(), self.units.total())
    }

    /// The adapter that requests for `slot` can acquire.
    pub(super) fn adapter(&self, slot: u32) -> Option<&Arc<AdapterSlot>> {
        match &self.entries.get(slot as usize)?.phase {
            Phase::Filled(contents) => Some(&contents.adapter),
            _ => None,
        }
    }

    pub(super) fn extension(&self, slot: u32) -> Option<Arc<dyn SlotExtension>> {
        match &self.entries.get(slot as usize)?.phase {
            Phase::Filled(contents) => contents.extension.clone(),
            _ => None,
        }
    }

    pub(super) fn refs(&self, slot: u32) -> Option<u32> {
        Some(self.entries.get(slot as usize)?.refs)
    }

    pub(super) fn last_used(&self, slot: u32) -> Option<u64> {
        Some(self.entries.get(slot as usize)?.last_used)
    }

    pub(super) fn is_pinned(&self, slot: u32) -> bool {
        self.entries
            .get(slot as usize)
            .is_some_and(|entry| entry.pinned)
    }

    pub(super) fn slot_of(&self, name: &str) -> Option<u32> {
        (0..self.entries.len() as u32)
            .find(|slot| self.adapter(*slot).is_some_and(|a| a.name == name))
    }

    /// First slot that holds or is about to hold anything.
    pub(super) fn first_occupied(&self) -> Option<u32> {
        let at = self
            .entries
            .iter()
            .position(|entry| !matches!(entry.phase, Phase::Placeholder))?;
        Some(at as u32)
    }

    /// Slots that promotion may take: neither pinned nor active. A promotion into the active slot would change what
    /// requests without a slot are served with.
    pub(super) fn cache_views(&self) -> Vec<SlotView> {
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

    pub(super) fn victim(&self) -> Result<u32, VictimError> {
        select_victim_slot(&self.cache_views())
    }

    /// Adds a reference to the adapter that `request` resolves to and stamps its recency. `None`, having changed
    /// nothing, where the request resolves to no adapter.
    pub(super) fn acquire(&mut self, request: i32) -> Option<Arc<AdapterSlot>> {
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

    pub(super) fn release(&mut self, slot: u32) -> ReleaseStep {
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
    pub(super) fn touch(&mut self, slot: u32) -> bool {
        let Some(entry) = self.entries.get_mut(slot as usize) else {
            return false;
        };
        self.clock += 1;
        entry.last_used = self.clock;
        true
    }

    /// What a swap of `slot` would be refused for now; packing is not worth starting then.
    pub(super) fn check_writable(&self, slot: u32, verb: &'static str) -> Result<(), WeightsError> {
        self.check_idle(slot)?;
        self.check_permitted(slot, verb)
    }

    /// Reserves a slot for new contents under `name` that need `units` units. From here on the former contents are
    /// gone. Changes nothing on an error.
    pub(super) fn reserve(
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
    pub(super) fn reserve_startup(
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
        let former = self.take_for_writing(slot, Some(name.to_owned()));
        let mut units_of_former = UnitRuns::default();
        let former = former.map(|mut contents| {
            units_of_former = std::mem::take(&mut contents.units);
            contents
        });
        self.units.release(units_of_former);
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
    pub(super) fn publish(&mut self, contents: Contents) {
        let slot = contents.adapter.slot;
        let entry = &mut self.entries[slot as usize];
        debug_assert!(matches!(entry.phase, Phase::Writing { .. }) && entry.refs == 0);
        entry.generation = contents.adapter.generation;
        entry.stale_tables = false;
        entry.phase = Phase::Filled(contents);
        self.touch(slot);
    }

    /// Makes a reserved slot a placeholder and its units free. `stale_tables`: its table entries could not be zeroed.
    pub(super) fn vacate(&mut self, slot: u32, units: UnitRuns, stale_tables: bool) {
        let entry = &mut self.entries[slot as usize];
        debug_assert!(matches!(entry.phase, Phase::Writing { .. }) && entry.refs == 0);
        entry.stale_tables = stale_tables;
        entry.phase = Phase::Placeholder;
        self.units.release(units);
    }

    /// Reserves a filled slot, keeping its contents, which [`restore`](Self::restore) or [`vacate`](Self::vacate) ends.
    pub(super) fn hold(&mut self, slot: u32) -> Result<Contents, WeightsError> {
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
    pub(super) fn restore(&mut self, contents: Contents) {
        let entry = &mut self.entries[contents.adapter.slot as usize];
        debug_assert!(matches!(entry.phase, Phase::Writing { .. }));
        entry.phase = Phase::Filled(contents);
    }

    /// Reserves a placeholder, to zero its tables; [`vacate`](Self::vacate) ends it.
    pub(super) fn hold_empty(&mut self, slot: u32) {
        let entry = &mut self.entries[slot as usize];
        debug_assert!(matches!(entry.phase, Phase::Placeholder));
        entry.phase = Phase::Writing { name: None };
    }

    /// Counts a held slot's contents as gone: their generation is not given out again.
    pub(super) fn forget(&mut self, slot: u32) {
        self.retired = self
            .retired
            .max(Some(self.entries[slot as usize].generation));
    }

    pub(super) fn pin(&mut self, slot: u32) {
        self.entries[slot as usize].pinned = true;
    }

    /// Starts or finishes an unload. `verb` is for the refusal.
    pub(super) fn unload(&mut self, slot: u32) -> Result<UnloadStep, WeightsError> {
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
        Ok(self.discard(slot))
    }

    /// Unloads a filled slot without asking for permission; it becomes an ordinary cache slot.
    pub(super) fn discard(&mut self, slot: u32) -> UnloadStep {
        let entry = &mut self.entries[slot as usize];
        entry.pinned = false;
        self.retired = self.retired.max(Some(entry.generation));
        if let Phase::Filled(contents) = std::mem::replace(&mut entry.phase, Phase::Placeholder) {
            entry.phase = Phase::Draining(contents);
        }
        match entry.drained() {
            Some(contents) => UnloadStep::Retire(contents),
            None => UnloadStep::Draining { refs: entry.refs },
        }
    }

    /// Makes `slot` active. Nothing changes where it already is.
    pub(super) fn rotate(&mut self, slot: u32) -> Result<Option<u32>, WeightsError> {
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

    /// Makes a startup slot active, before any request.
    pub(super) fn activate(&mut self, slot: u32) {
        self.active = Some(slot);
    }

    fn take_for_writing(&mut self, slot: u32, name: Option<String>) -> Option<Contents> {
        let entry = &mut self.entries[slot as usize];
        match std::mem::replace(&mut entry.phase, Phase::Writing { name }) {
            Phase::Filled(contents) => {
                self.retired = self.retired.max(Some(entry.generation));
                Some(contents)
            }
            _ => None,
        }
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
