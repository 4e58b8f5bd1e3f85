//! Threads that change what the slots hold.

use crate::contents::NAMES;
use crate::{EndOnPanic, Random, SLOTS, Soak, faulty};
use lora_runtime::RuntimeError;
use lora_runtime::weights::{
    LoraAdapterInput, SlotTarget, SlotTransaction, StagedAdapter, Unloaded, WeightsError,
};
use std::ops::AddAssign;
use std::sync::atomic::Ordering;

/// What became of the changes.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Change {
    pub(crate) promotions: u64,
    pub(crate) swaps: u64,
    /// Begun and dropped.
    pub(crate) abandoned: u64,
    /// An upload failed.
    pub(crate) failed: u64,
    pub(crate) unloads: u64,
    /// Unloads that requests delayed.
    pub(crate) drained: u64,
    pub(crate) rotations: u64,
    /// By the rules: a busy slot, a name that is taken.
    pub(crate) refused: u64,
}

impl AddAssign for Change {
    fn add_assign(&mut self, other: Self) {
        self.promotions += other.promotions;
        self.swaps += other.swaps;
        self.abandoned += other.abandoned;
        self.failed += other.failed;
        self.unloads += other.unloads;
        self.drained += other.drained;
        self.rotations += other.rotations;
        self.refused += other.refused;
    }
}

/// Startup: three slots of six.
pub(crate) fn fill(soak: &Soak) {
    let made: Vec<_> = (0..3).map(|name| soak.contents.make(name)).collect();
    let loaded = soak.runtime.load(made.iter().map(|(adapter, _)| adapter));
    for (adapter, (_, code)) in loaded.expect("startup loads").iter().zip(&made) {
        soak.contents.expect(adapter.adapter_id(), *code);
        soak.contents.committed(adapter.adapter_id());
    }
}

/// Changes until enough rows are served.
pub(crate) fn run(soak: &Soak, mut random: Random) -> Change {
    let _guard = EndOnPanic(soak);
    let mut change = Change::default();
    while !soak.done() {
        soak.begun.fetch_add(1, Ordering::Relaxed);
        match random.below(10) {
            0..4 => bring_in(soak, &mut random, SlotTarget::Victim, &mut change),
            4..7 => {
                let slot = random.below(SLOTS.into()) as u32;
                bring_in(soak, &mut random, SlotTarget::Slot(slot), &mut change);
            }
            7..9 => unload(soak, random.below(SLOTS.into()) as u32, &mut change),
            _ => match soak.runtime.rotate(random.below(SLOTS.into()) as u32) {
                Ok(_) => change.rotations += 1,
                Err(error) => refused(&error, &mut change),
            },
        }
    }
    change
}

fn unload(soak: &Soak, slot: u32, change: &mut Change) {
    match soak.runtime.unload(slot) {
        Ok(Unloaded::Freed(_)) => change.unloads += 1,
        Ok(Unloaded::Draining { .. }) => change.drained += 1,
        Err(error) => refused(&error, change),
    }
}

/// Fresh contents into a slot: staged, begun, then committed or not.
fn bring_in(soak: &Soak, random: &mut Random, target: SlotTarget, change: &mut Change) {
    let (adapter, code) = soak.contents.make(random.below(NAMES));
    let input = LoraAdapterInput::new(adapter.name(), adapter.store(), adapter.config());
    let staged = soak
        .runtime
        .weights()
        .stage(&input)
        .expect("a plain adapter");
    if random.below(5) == 0 {
        faulty::fail_upload(1 + random.below(3), random.below(2) == 0);
    }
    let ended = begin(staged, target).and_then(|transaction| {
        let id = transaction.adapter().adapter_id();
        soak.contents.expect(id, code);
        if random.below(8) == 0 {
            return Ok(None);
        }
        std::thread::yield_now();
        transaction
            .commit()
            .map(|adapter| Some(adapter.adapter_id()))
    });
    faulty::heal();
    match ended {
        Ok(None) => change.abandoned += 1,
        Ok(Some(id)) => {
            soak.contents.committed(id);
            match target {
                SlotTarget::Victim => change.promotions += 1,
                SlotTarget::Slot(_) => change.swaps += 1,
            }
        }
        Err(error) => refused(&error.into(), change),
    }
}

fn begin(staged: StagedAdapter, target: SlotTarget) -> Result<SlotTransaction, WeightsError> {
    Ok(staged.begin(target)?)
}

/// Refusals that a race or an injected failure explains.
fn refused(error: &RuntimeError, change: &mut Change) {
    match error {
        RuntimeError::Weights(WeightsError::Upload { .. }) => change.failed += 1,
        RuntimeError::Weights(
            WeightsError::SlotBusy { .. }
            | WeightsError::SlotBeingWritten { .. }
            | WeightsError::SlotEmpty { .. }
            | WeightsError::DuplicateName { .. }
            | WeightsError::Victim(_),
        ) => change.refused += 1,
        other => panic!("{other}"),
    }
}
