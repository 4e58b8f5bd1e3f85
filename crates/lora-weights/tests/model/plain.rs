//! The rules as plainly as they can be said.

use lora_weights::{LoraWeights, Occupancy, Released, Unloaded, VictimError, WeightsError};

/// A slot of the model. `adapter` indexes the test's adapters.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slot {
    pub(crate) adapter: Option<usize>,
    pub(crate) draining: bool,
    pub(crate) refs: u32,
    pub(crate) last_used: u64,
    pub(crate) pinned: bool,
    pub(crate) generation: u64,
}

/// Why the model refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    OutOfRange,
    Busy,
    Empty,
    Permission,
    Duplicate,
    PoolFull,
    NoCache,
    AlreadyLoaded,
    NoAdapters,
    TooMany,
    Upload,
}

impl Refusal {
    pub(crate) fn of(error: &WeightsError) -> Self {
        match error {
            WeightsError::SlotOutOfRange { .. } => Self::OutOfRange,
            WeightsError::SlotBusy { .. } => Self::Busy,
            WeightsError::SlotEmpty { .. } => Self::Empty,
            WeightsError::RotationNotPermitted { .. } => Self::Permission,
            WeightsError::DuplicateName { .. } => Self::Duplicate,
            WeightsError::Victim(VictimError::PoolFull { .. }) => Self::PoolFull,
            WeightsError::Victim(VictimError::NoCacheSlots) => Self::NoCache,
            WeightsError::AlreadyLoaded { .. } => Self::AlreadyLoaded,
            WeightsError::NoAdapters => Self::NoAdapters,
            WeightsError::TooManyAdapters { .. } => Self::TooMany,
            WeightsError::Upload { .. } => Self::Upload,
            other => panic!("the model knows no such refusal: {other}"),
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) slots: Vec<Slot>,
    pub(crate) active: Option<usize>,
    clock: u64,
    /// Largest generation of anything that left a slot.
    retired: Option<u64>,
    permitted: bool,
}

impl Model {
    pub(crate) fn new(slots: usize, permitted: bool) -> Self {
        Self {
            slots: vec![Slot::default(); slots],
            active: None,
            clock: 0,
            retired: None,
            permitted,
        }
    }

    fn visible(&self, slot: usize) -> Option<usize> {
        let slot = &self.slots[slot];
        slot.adapter.filter(|_| !slot.draining)
    }

    fn stamp(&mut self, slot: usize) {
        self.clock += 1;
        self.slots[slot].last_used = self.clock;
    }

    fn retire(&mut self, slot: usize) {
        self.retired = self.retired.max(Some(self.slots[slot].generation));
    }

    fn resident(&self, adapter: usize, except: Option<usize>) -> bool {
        (0..self.slots.len()).any(|s| Some(s) != except && self.visible(s) == Some(adapter))
    }

    fn fill(&mut self, slot: usize, adapter: usize, generation: u64) {
        let slot_ = &mut self.slots[slot];
        slot_.adapter = Some(adapter);
        slot_.generation = generation;
        self.stamp(slot);
    }

    fn next_generation(&self, slot: usize) -> u64 {
        self.slots[slot].generation.max(self.retired.unwrap_or(0)) + 1
    }

    pub(crate) fn load(&mut self, adapters: &[usize]) -> Result<(), Refusal> {
        if adapters.is_empty() {
            return Err(Refusal::NoAdapters);
        }
        if adapters.len() > self.slots.len() {
            return Err(Refusal::TooMany);
        }
        if (1..adapters.len()).any(|n| adapters[..n].contains(&adapters[n])) {
            return Err(Refusal::Duplicate);
        }
        if self.slots.iter().any(|slot| slot.adapter.is_some()) {
            return Err(Refusal::AlreadyLoaded);
        }
        for (slot, adapter) in adapters.iter().enumerate() {
            let generation = match self.retired {
                None => self.slots[slot].generation,
                Some(_) => self.next_generation(slot),
            };
            self.fill(slot, *adapter, generation);
            self.slots[slot].pinned = true;
        }
        self.active = Some(0);
        Ok(())
    }

    pub(crate) fn victim(&self) -> Result<usize, Refusal> {
        let cache: Vec<usize> = (0..self.slots.len())
            .filter(|s| !self.slots[*s].pinned && self.active != Some(*s))
            .collect();
        if cache.is_empty() {
            return Err(Refusal::NoCache);
        }
        if let Some(empty) = cache.iter().find(|s| self.slots[**s].adapter.is_none()) {
            return Ok(*empty);
        }
        let idle = cache.into_iter().filter(|s| self.slots[*s].refs == 0);
        idle.min_by_key(|s| (self.slots[*s].last_used, *s))
            .ok_or(Refusal::PoolFull)
    }

    pub(crate) fn promote(&mut self, adapter: usize) -> Result<usize, Refusal> {
        self.victim()?;
        if self.resident(adapter, None) {
            return Err(Refusal::Duplicate);
        }
        let slot = self.victim()?;
        self.write(slot, adapter, false)?;
        Ok(slot)
    }

    /// `fails`: one of its uploads does.
    pub(crate) fn swap(&mut self, slot: usize, adapter: usize, fails: bool) -> Result<(), Refusal> {
        self.idle(slot)?;
        self.allowed(slot)?;
        if self.resident(adapter, Some(slot)) {
            return Err(Refusal::Duplicate);
        }
        self.write(slot, adapter, fails)
    }

    fn write(&mut self, slot: usize, adapter: usize, fails: bool) -> Result<(), Refusal> {
        if self.slots[slot].adapter.take().is_some() {
            self.retire(slot);
        }
        if fails {
            return Err(Refusal::Upload);
        }
        let generation = self.next_generation(slot);
        self.fill(slot, adapter, generation);
        Ok(())
    }

    fn idle(&self, slot: usize) -> Result<(), Refusal> {
        match self.slots.get(slot) {
            None => Err(Refusal::OutOfRange),
            Some(slot) if slot.refs > 0 => Err(Refusal::Busy),
            Some(_) => Ok(()),
        }
    }

    fn allowed(&self, slot: usize) -> Result<(), Refusal> {
        let guarded = self.slots[slot].pinned || self.active == Some(slot);
        if guarded && !self.permitted {
            return Err(Refusal::Permission);
        }
        Ok(())
    }

    pub(crate) fn rotate(&mut self, slot: usize) -> Result<(), Refusal> {
        if slot >= self.slots.len() {
            return Err(Refusal::OutOfRange);
        }
        if self.active == Some(slot) {
            return Ok(());
        }
        if !self.permitted {
            return Err(Refusal::Permission);
        }
        if self.visible(slot).is_none() {
            return Err(Refusal::Empty);
        }
        if let Some(old) = self.active {
            self.idle(old)?;
        }
        self.active = Some(slot);
        Ok(())
    }

    /// References that the unload waits for.
    pub(crate) fn unload(&mut self, slot: usize) -> Result<u32, Refusal> {
        let Some(state) = self.slots.get(slot) else {
            return Err(Refusal::OutOfRange);
        };
        if state.adapter.is_none() {
            return Err(Refusal::Empty);
        }
        if !state.draining {
            self.allowed(slot)?;
            self.retire(slot);
        }
        let state = &mut self.slots[slot];
        state.pinned = false;
        state.draining = state.refs > 0;
        if state.refs == 0 {
            state.adapter = None;
        }
        Ok(state.refs)
    }

    pub(crate) fn resolve(&self, request: i32) -> Option<usize> {
        match usize::try_from(request) {
            Ok(slot) => (slot < self.slots.len()).then_some(slot),
            Err(_) => self.active,
        }
    }

    pub(crate) fn acquire(&mut self, request: i32) -> i32 {
        match self.resolve(request) {
            None if request < 0 => lora_weights::BASE_SLOT,
            Some(slot) if self.visible(slot).is_some() => {
                self.slots[slot].refs += 1;
                self.stamp(slot);
                slot as i32
            }
            _ => -1,
        }
    }

    /// The references remaining, and whether the adapter went with the last.
    pub(crate) fn release(&mut self, slot: i32) -> Option<(u32, bool)> {
        let slot = self.slots.get_mut(usize::try_from(slot).ok()?)?;
        slot.refs = slot.refs.checked_sub(1)?;
        let gone = slot.draining && slot.refs == 0;
        if gone {
            slot.adapter = None;
            slot.draining = false;
        }
        Some((slot.refs, gone))
    }

    pub(crate) fn touch(&mut self, slot: usize) -> bool {
        if slot >= self.slots.len() {
            return false;
        }
        self.stamp(slot);
        true
    }

    /// Fails unless everything that the weights tell of themselves is what the model holds.
    pub(crate) fn check(&self, weights: &LoraWeights, names: &[String]) {
        assert_eq!(weights.active_slot(), self.active.map(|s| s as u32));
        for (number, slot) in (0u32..).zip(&self.slots) {
            let held = weights.adapter(number);
            let visible = self.visible(number as usize);
            assert_eq!(
                held.as_ref().map(|a| (a.name(), a.generation())),
                visible.map(|a| (names[a].as_str(), slot.generation)),
                "slot {number}"
            );
            assert_eq!(weights.slot_ref_count(number), Some(slot.refs));
            assert_eq!(weights.slot_last_used(number), Some(slot.last_used));
            assert_eq!(weights.is_pinned(number), slot.pinned);
        }
        for view in weights.cache_slot_views() {
            let slot = &self.slots[view.slot as usize];
            let occupancy = match (slot.adapter, slot.draining) {
                (None, _) => Occupancy::Empty,
                (Some(_), false) => Occupancy::Filled,
                (Some(_), true) => Occupancy::Reserved,
            };
            assert_eq!(view.occupancy, occupancy);
        }
    }
}

/// What the model says of an unload, in the weights' words.
pub(crate) fn refs_of(unloaded: &Unloaded) -> u32 {
    match unloaded {
        Unloaded::Freed(_) => 0,
        Unloaded::Draining { refs } => *refs,
    }
}

/// What the model says of a release, in the weights' words.
pub(crate) fn step_of(released: &Released) -> Option<(u32, bool)> {
    match released {
        Released::Unheld => None,
        Released::Held { refs } => Some((*refs, false)),
        Released::Freed(_) => Some((0, true)),
        Released::FreedWithStaleTables { source, .. } => panic!("{source}"),
    }
}
