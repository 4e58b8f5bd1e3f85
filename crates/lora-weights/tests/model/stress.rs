//! Several threads: whatever the interleaving, the invariants hold.

use crate::common::{Adapter, Geometry, TestMemory, moe_model};
use lora_weights::device::DevicePtr;
use lora_weights::{
    ExpertPoolSpec, LoadPolicy, LoraModule, LoraWeights, PoolSpec, Released, Unloaded, WeightsError,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const SLOTS: u32 = 6;
const THREADS: u64 = 4;
const STEPS: usize = 3000;

/// Marsaglia's xorshift64: enough to mix the verbs.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

struct Arena {
    memory: Arc<TestMemory>,
    weights: LoraWeights,
    /// Two versions of each name: weights that change under it.
    adapters: Vec<[Adapter; 2]>,
    /// The first value of A that each identity was ever seen with.
    identities: Mutex<HashMap<u64, u16>>,
    /// What each (slot, generation) was ever seen to hold.
    contents: Mutex<HashMap<(u32, u64), String>>,
    drained: AtomicU64,
    freed_late: AtomicU64,
}

impl Arena {
    fn new(permitted: bool) -> Self {
        let model = moe_model();
        let geometry = Geometry::dense(&model, 2).with_experts(&[1]);
        let version = |name: usize, mark: usize| {
            Adapter::new(&format!("adapter {name}"), &geometry, mark as f32)
        };
        let adapters: Vec<_> = (0..9)
            .map(|name| [version(name, 1 + 2 * name), version(name, 2 + 2 * name)])
            .collect();
        let pool = PoolSpec {
            experts: Some(ExpertPoolSpec {
                max_rank: 2,
                units: 8 * u64::from(SLOTS),
            }),
            policy: LoadPolicy {
                allow_rotation: permitted,
                ..LoadPolicy::default()
            },
            ..PoolSpec::new(SLOTS, 2)
        };
        let memory = TestMemory::new(1 << 30);
        let weights = LoraWeights::new(memory.clone(), model, pool).unwrap();
        weights
            .load(&[adapters[0][0].input(), adapters[1][0].input()])
            .unwrap();
        Self {
            memory,
            weights,
            adapters,
            identities: Mutex::default(),
            contents: Mutex::default(),
            drained: AtomicU64::new(0),
            freed_late: AtomicU64::new(0),
        }
    }

    /// Holds an adapter and checks, twice, that the device serves it and nothing else under its slot.
    fn serve(&self, request: i32, seen: &mut HashMap<u32, u64>) {
        let Some(lease) = self.weights.lease(request) else {
            return;
        };
        let adapter = lease.adapter().expect("something is active");
        let slot = adapter.slot();
        let last = seen.entry(slot).or_insert(adapter.generation());
        assert!(*last <= adapter.generation(), "a generation went back");
        *last = adapter.generation();
        let name = adapter.name().to_owned();
        let known = self
            .contents
            .lock()
            .entry((slot, adapter.generation()))
            .or_insert_with(|| name.clone())
            .clone();
        assert_eq!(known, name, "two adapters under one generation");

        let first = self.first_value(&lease);
        let known = *self
            .identities
            .lock()
            .entry(lease.adapter_id())
            .or_insert(first);
        assert_eq!(known, first, "one identity, two weights");
        assert!(self.is_of(&name, first), "another adapter's bytes");
        std::thread::yield_now();
        assert_eq!(self.first_value(&lease), first, "a held slot changed");
        assert!(self.weights.slot_ref_count(slot).unwrap() >= 1);
    }

    /// First value of the first A, found through the table as a kernel finds it.
    fn first_value(&self, lease: &lora_weights::SlotLease) -> u16 {
        let slot = lease.slot() as u64;
        let route = self.weights.route(0, LoraModule::QProj).unwrap();
        let entry = self.memory.read(route.a_table.offset(8 * slot), 8);
        let a = u64::from_ne_bytes(entry.try_into().unwrap());
        let pair = lease.adapter().unwrap().pair(0, LoraModule::QProj).unwrap();
        assert_eq!(DevicePtr(a), pair.a, "the table names another pair");
        let expert = lease.adapter().unwrap().experts()[0].router().unwrap();
        let read = |at| u16::from_ne_bytes(self.memory.read(at, 2).try_into().unwrap());
        assert_eq!(read(pair.a), read(expert.a), "units of another adapter");
        read(pair.a)
    }

    fn is_of(&self, name: &str, first: u16) -> bool {
        let versions = self.adapters.iter().flatten();
        versions
            .filter(|adapter| adapter.name == name)
            .any(|adapter| {
                let bytes = adapter.store.tensor_bytes(lora_weights::TensorId(0));
                u16::from_le_bytes([bytes[0], bytes[1]]) == first
            })
    }

    fn change(&self, random: &mut Random) {
        let versions = &self.adapters[random.below(9) as usize];
        let adapter = versions[random.below(2) as usize].input();
        let slot = random.below(u64::from(SLOTS)) as u32;
        if random.below(6) == 0 {
            self.memory
                .fail_upload(1 + random.below(3), random.below(2) == 0);
        }
        let error = match random.below(8) {
            0..3 => self.weights.promote(&adapter).err(),
            3..6 => self.weights.swap(slot, &adapter).err(),
            6 => self.weights.rotate(slot).err(),
            _ => match self.weights.unload(slot) {
                Ok(Unloaded::Draining { refs }) => {
                    assert!(refs > 0);
                    self.drained.fetch_add(1, Ordering::Relaxed);
                    None
                }
                Ok(Unloaded::Freed(freed)) => {
                    assert_eq!(freed.slot, slot);
                    None
                }
                Err(error) => Some(error),
            },
        };
        if let Some(error) = error {
            assert!(is_of_the_rules(&error), "{error}");
        }
    }

    fn run(&self, seed: u64) {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (seed << 32 | 1));
        let mut seen = HashMap::new();
        let mut held = Vec::new();
        for _ in 0..STEPS {
            match random.below(10) {
                0..2 => self.change(&mut random),
                2..5 => self.serve(random.below(8) as i32 - 1, &mut seen),
                5..7 => {
                    let slot = self.weights.acquire_slot(random.below(7) as i32);
                    held.extend((slot >= 0).then_some(slot));
                }
                7..9 if !held.is_empty() => {
                    let at = random.below(held.len() as u64) as usize;
                    self.give_back(held.swap_remove(at));
                }
                _ => {
                    self.weights.touch_slot(random.below(8) as u32);
                }
            }
        }
        for slot in held {
            self.give_back(slot);
        }
    }

    fn give_back(&self, slot: i32) {
        match self.weights.release_slot(slot) {
            Released::Unheld => panic!("a reference was lost"),
            Released::Held { .. } | Released::FreedWithStaleTables { .. } => {}
            Released::Freed(freed) => {
                assert_eq!(freed.slot as i32, slot);
                self.freed_late.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Refusals that a race or an injected failure explains.
fn is_of_the_rules(error: &WeightsError) -> bool {
    matches!(
        error,
        WeightsError::SlotBusy { .. }
            | WeightsError::SlotBeingWritten { .. }
            | WeightsError::SlotEmpty { .. }
            | WeightsError::DuplicateName { .. }
            | WeightsError::RotationNotPermitted { .. }
            | WeightsError::Upload { .. }
            | WeightsError::Victim(_)
    )
}

fn stress(permitted: bool) -> Arena {
    let arena = Arena::new(permitted);
    std::thread::scope(|scope| {
        for seed in 0..THREADS {
            let arena = &arena;
            scope.spawn(move || arena.run(seed));
        }
    });
    arena.memory.heal();
    for slot in 0..SLOTS {
        assert_eq!(arena.weights.slot_ref_count(slot), Some(0));
        assert_eq!(arena.weights.release_slot(slot as i32), Released::Unheld);
    }
    arena
}

fn assert_nothing_leaked(arena: Arena) {
    for slot in 0..SLOTS {
        let _ = arena.weights.unload(slot);
    }
    let memory = Arc::clone(&arena.memory);
    drop(arena);
    let left = memory.totals();
    assert_eq!((left.used, left.staging_buffers, left.in_flight), (0, 0, 0));
}

#[test]
fn threads_that_change_everything_break_no_invariant() {
    let arena = stress(true);
    assert!(arena.drained.load(Ordering::Relaxed) > 0);
    assert!(arena.freed_late.load(Ordering::Relaxed) > 0);
    assert!(arena.contents.lock().len() > 100, "slots did change hands");
    for slot in 0..SLOTS {
        let _ = arena.weights.unload(slot);
    }
    assert_eq!(arena.weights.expert_units(), (48, 48));
    assert_nothing_leaked(arena);
}

#[test]
fn threads_without_permission_never_change_a_pinned_slot_or_the_active_one() {
    let arena = stress(false);
    assert_eq!(arena.weights.active_slot(), Some(0));
    for (slot, name) in [(0, "adapter 0"), (1, "adapter 1")] {
        let held = arena.weights.adapter(slot).unwrap();
        assert_eq!((held.name(), held.generation()), (name, 0));
        assert!(arena.weights.is_pinned(slot));
    }
    assert!(
        arena.contents.lock().len() > 100,
        "the cache did change hands"
    );
    assert_nothing_leaked(arena);
}
