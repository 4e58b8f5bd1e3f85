//! One thread: every answer and every visible number is the model's.

use crate::common::{
    Adapter, Geometry, SlotBytes, TestMemory, assert_placeholder, assert_serves, tiny_model,
};
use crate::plain::{Model, Refusal, refs_of, step_of};
use lora_weights::{
    BASE_SLOT, LoadPolicy, LoraModule, LoraTarget, LoraWeights, ModuleSet, PoolSpec,
};
use proptest::prelude::*;

const SLOTS: usize = 4;
const ADAPTERS: usize = 6;

#[derive(Debug, Clone)]
enum Step {
    Load(Vec<usize>),
    Promote(usize),
    Swap(usize, usize),
    /// The given upload of the swap fails, when started or when landing.
    FailedSwap(usize, usize, u64, bool),
    Rotate(usize),
    Unload(usize),
    Acquire(i32),
    Release(i32),
    Touch(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // One past the last slot is out of range.
    let slot = || 0..SLOTS + 1;
    let adapter = || 0..ADAPTERS;
    let request = prop_oneof![
        5 => 0..SLOTS as i32 + 1,
        2 => -3..0,
        1 => Just(BASE_SLOT),
    ];
    let step = prop_oneof![
        1 => prop::collection::vec(adapter(), 0..SLOTS + 2).prop_map(Step::Load),
        4 => adapter().prop_map(Step::Promote),
        3 => (slot(), adapter()).prop_map(|(s, a)| Step::Swap(s, a)),
        2 => (slot(), adapter(), 1u64..4, any::<bool>())
            .prop_map(|(s, a, upload, landing)| Step::FailedSwap(s, a, upload, landing)),
        2 => slot().prop_map(Step::Rotate),
        3 => slot().prop_map(Step::Unload),
        6 => request.prop_map(Step::Acquire),
        6 => (-1..SLOTS as i32 + 1).prop_map(Step::Release),
        2 => slot().prop_map(Step::Touch),
    ];
    let start = prop::sample::subsequence((0..ADAPTERS).collect::<Vec<_>>(), 1..=SLOTS)
        .prop_map(Step::Load);
    (start, prop::collection::vec(step, 1..80)).prop_map(|(first, mut steps)| {
        steps.insert(0, first);
        steps
    })
}

struct World {
    memory: std::sync::Arc<TestMemory>,
    weights: LoraWeights,
    adapters: Vec<Adapter>,
    names: Vec<String>,
    model: Model,
}

impl World {
    fn new(permitted: bool) -> Self {
        let spec = tiny_model();
        let modules = [LoraModule::QProj, LoraModule::VProj];
        let geometry = Geometry {
            targets: modules.map(LoraTarget::Attn).to_vec(),
            ..Geometry::dense(&spec, 2)
        };
        let adapters: Vec<_> = (0..ADAPTERS)
            .map(|n| Adapter::new(&format!("adapter {n}"), &geometry, 1.0 + n as f32))
            .collect();
        let pool = PoolSpec {
            modules: modules.into_iter().collect::<ModuleSet>(),
            policy: LoadPolicy {
                allow_rotation: permitted,
                ..LoadPolicy::default()
            },
            ..PoolSpec::new(SLOTS as u32, 2)
        };
        let memory = TestMemory::new(1 << 30);
        Self {
            weights: LoraWeights::new(memory.clone(), spec, pool).unwrap(),
            memory,
            names: adapters.iter().map(|a| a.name.clone()).collect(),
            adapters,
            model: Model::new(SLOTS, permitted),
        }
    }

    fn take(&mut self, step: &Step) {
        let Self {
            memory,
            weights,
            adapters,
            model,
            ..
        } = self;
        let reason = |error| Refusal::of(&error);
        match step {
            Step::Load(list) => {
                let inputs: Vec<_> = list.iter().map(|a| adapters[*a].input()).collect();
                let loaded = weights.load(&inputs).map(drop).map_err(reason);
                assert_eq!(loaded, model.load(list));
            }
            Step::Promote(adapter) => {
                let promoted = weights.promote(&adapters[*adapter].input());
                let slot = promoted.map(|a| a.slot() as usize).map_err(reason);
                assert_eq!(slot, model.promote(*adapter));
            }
            Step::Swap(slot, adapter) => {
                let swapped = weights.swap(*slot as u32, &adapters[*adapter].input());
                let swapped = swapped.map(drop).map_err(reason);
                assert_eq!(swapped, model.swap(*slot, *adapter, false));
            }
            Step::FailedSwap(slot, adapter, upload, landing) => {
                memory.fail_upload(*upload, *landing);
                let swapped = weights.swap(*slot as u32, &adapters[*adapter].input());
                // A swap that is refused, or into an empty slot, may not come to that upload.
                let failed = !memory.failure_pending();
                memory.heal();
                let swapped = swapped.map(drop).map_err(reason);
                assert_eq!(swapped, model.swap(*slot, *adapter, failed));
            }
            Step::Rotate(slot) => {
                let rotated = weights.rotate(*slot as u32).map(drop).map_err(reason);
                assert_eq!(rotated, model.rotate(*slot));
            }
            Step::Unload(slot) => {
                let unloaded = weights.unload(*slot as u32);
                let refs = unloaded.map(|u| refs_of(&u)).map_err(reason);
                assert_eq!(refs, model.unload(*slot));
            }
            Step::Acquire(request) => {
                let expected = match *request {
                    BASE_SLOT => BASE_SLOT,
                    request => model.acquire(request),
                };
                assert_eq!(weights.acquire_slot(*request), expected);
            }
            Step::Release(slot) => {
                assert_eq!(step_of(&weights.release_slot(*slot)), model.release(*slot));
            }
            Step::Touch(slot) => {
                assert_eq!(weights.touch_slot(*slot as u32), model.touch(*slot));
            }
        }
    }

    /// The device holds what the model says, slot by slot.
    fn check_device(&self) {
        for (number, slot) in (0u32..).zip(&self.model.slots) {
            match (slot.adapter, slot.draining) {
                (Some(adapter), false) => {
                    let adapter = &self.adapters[adapter];
                    assert_serves(&self.weights, &self.memory, number, adapter);
                }
                (Some(_), true) => {
                    let held = SlotBytes::read(&self.weights, &self.memory, number);
                    assert!(!held.tables_are_zero(), "requests still use it");
                }
                (None, _) => assert_placeholder(&self.weights, &self.memory, number),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_answer_is_the_models(permitted in any::<bool>(), steps in steps()) {
        let mut world = World::new(permitted);
        for step in &steps {
            world.take(step);
            world.model.check(&world.weights, &world.names);
            world.check_device();
        }
        let memory = std::sync::Arc::clone(&world.memory);
        drop(world);
        let left = memory.totals();
        prop_assert_eq!((left.used, left.staging_buffers, left.in_flight), (0, 0, 0));
    }
}
