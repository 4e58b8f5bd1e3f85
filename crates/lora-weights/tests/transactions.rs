//! What a slot's transaction does to the device, and what it leaves when it fails.

mod common;

use common::{
    Adapter, Geometry, Recorder, SlotBytes, TestMemory, assert_placeholder, assert_serves,
    moe_model, tiny_model,
};
use lora_weights::{
    AdapterStore, ExpertPoolSpec, LoadPolicy, LoraAdapterInput, LoraWeights, MemoryTensor,
    PoolSpec, SlotTarget, UploadStage, WeightsError,
};
use parking_lot::Mutex;
use std::sync::Arc;

const GIB: u64 = 1 << 30;

fn pool(slots: u32) -> PoolSpec {
    PoolSpec {
        experts: Some(ExpertPoolSpec {
            max_rank: 4,
            units: 80,
        }),
        policy: LoadPolicy {
            allow_rotation: true,
            ..LoadPolicy::default()
        },
        ..PoolSpec::new(slots, 8)
    }
}

/// Three MoE adapters resident, one more outside.
struct Bench {
    memory: Arc<TestMemory>,
    weights: LoraWeights,
    resident: Vec<Adapter>,
    fresh: Adapter,
}

impl Bench {
    fn new() -> Self {
        let model = moe_model();
        let geometry = Geometry::dense(&model, 4).with_experts(&[0, 2]);
        let resident: Vec<_> = [("a", 1.0), ("b", 2.0), ("c", 3.0)]
            .into_iter()
            .map(|(name, mark)| Adapter::new(name, &geometry, mark))
            .collect();
        let fresh = Adapter::new("d", &Geometry::dense(&model, 3).with_experts(&[1]), 4.0);
        let memory = TestMemory::new(GIB);
        let weights = LoraWeights::new(memory.clone(), model, pool(4)).unwrap();
        let inputs: Vec<_> = resident.iter().map(Adapter::input).collect();
        weights.load(&inputs).unwrap();
        Self {
            memory,
            weights,
            resident,
            fresh,
        }
    }

    fn recorder(
        &self,
        name: &'static str,
        fails: bool,
    ) -> (Arc<Recorder>, Arc<Mutex<Vec<String>>>) {
        let log = Arc::new(Mutex::new(Vec::new()));
        let recorder = Recorder {
            name,
            log: Arc::clone(&log),
            fails,
        };
        (Arc::new(recorder), log)
    }
}

#[test]
fn failed_swap_leaves_a_placeholder_whichever_upload_fails() {
    let mut failures = 0;
    for when_landing in [false, true] {
        for upload in 1.. {
            let bench = Bench::new();
            let Bench {
                memory,
                weights,
                resident,
                fresh,
            } = &bench;
            let (recorder, log) = bench.recorder("overlay", false);
            weights.attach_extension(1, 0, recorder).unwrap();
            let before = SlotBytes::read_all(weights, memory);
            let totals = memory.totals();
            let (free_units, all_units) = weights.expert_units();

            memory.fail_upload(upload, when_landing);
            let swapped = weights.swap(1, &fresh.input());
            if memory.failure_pending() {
                swapped.unwrap();
                assert!(upload > 3, "clearing, image and tables are an upload each");
                break;
            }
            failures += 1;

            assert!(matches!(swapped, Err(WeightsError::Upload { slot: 1, .. })));
            assert_placeholder(weights, memory, 1);
            let after = SlotBytes::read_all(weights, memory);
            for slot in [0, 2, 3] {
                assert!(after[slot] == before[slot], "slot {slot} changed");
            }
            assert_serves(weights, memory, 0, &resident[0]);
            assert_serves(weights, memory, 2, &resident[2]);
            // Two routers and two layers of two experts were slot 1's.
            assert_eq!(weights.expert_units(), (free_units + 14, all_units));
            assert_eq!(
                *log.lock(),
                ["overlay install 1", "overlay uninstall 1", "overlay drop"]
            );
            let now = memory.totals();
            assert_eq!(
                (now.allocations, now.used),
                (totals.allocations, totals.used)
            );
            assert_eq!(now.in_flight, 0);
            assert!(now.staging_buffers <= 1);

            let again = weights.swap(1, &fresh.input()).unwrap();
            assert_eq!((again.name(), again.generation()), ("d", 1));
            assert_serves(weights, memory, 1, fresh);
        }
    }
    assert_eq!(failures, 6);
}

#[test]
fn tables_that_could_not_be_zeroed_are_zeroed_before_the_slot_is_written_again() {
    let bench = Bench::new();
    let Bench {
        memory,
        weights,
        fresh,
        ..
    } = &bench;
    memory.break_uploads();
    assert!(matches!(
        weights.swap(1, &fresh.input()),
        Err(WeightsError::Upload {
            stage: UploadStage::ClearTables,
            ..
        })
    ));
    assert!(!SlotBytes::read(weights, memory, 1).tables_are_zero());
    memory.heal();

    let mut transaction = weights
        .stage(&fresh.input())
        .unwrap()
        .begin(SlotTarget::Slot(1))
        .unwrap();
    assert!(SlotBytes::read(weights, memory, 1).tables_are_zero());
    transaction = transaction.wait().unwrap();
    transaction.commit().unwrap();
    assert_serves(weights, memory, 1, fresh);
}

#[test]
fn a_slot_changes_hands_only_at_commit_and_nothing_else_waits() {
    let bench = Bench::new();
    let Bench {
        memory,
        weights,
        resident,
        fresh,
    } = &bench;
    let staged = weights.stage(&fresh.input()).unwrap();
    assert_eq!(
        weights.adapter(1).unwrap().name(),
        "b",
        "staging touches no slot"
    );
    let begun = staged.begin(SlotTarget::Slot(1)).unwrap();
    // The clearing of the tables has landed, the image has not.
    memory.hold_uploads();
    assert_eq!(begun.is_done(), Ok(false));
    assert_eq!(begun.slot(), 1);
    assert_eq!(weights.acquire_slot(1), -1);
    assert!(weights.adapter(1).is_none());
    assert_eq!(weights.slot_of("b"), None);
    assert_eq!(weights.slot_of("d"), None);
    assert!(matches!(
        weights.unload(1),
        Err(WeightsError::SlotBeingWritten { slot: 1 })
    ));
    assert!(matches!(
        weights.rotate(1),
        Err(WeightsError::SlotBeingWritten { slot: 1 })
    ));

    // Other slots serve, and change hands.
    let lease = weights.lease(0).unwrap();
    assert_eq!(lease.adapter().unwrap().name(), "a");
    assert_eq!(weights.adapter_names()[2].as_deref(), Some("c"));
    weights.rotate(2).unwrap_err();
    drop(lease);
    assert_eq!(weights.rotate(2).unwrap(), Some(0));

    memory.land();
    assert_eq!(begun.is_done(), Ok(true));
    assert!(weights.adapter(1).is_none(), "landed is not visible");
    assert!(SlotBytes::read(weights, memory, 1).tables_are_zero());
    let committed = begun.commit().unwrap();
    assert_eq!(weights.slot_of("d"), Some(1));
    assert_eq!(committed.generation(), 1);
    assert_serves(weights, memory, 1, fresh);
    assert_serves(weights, memory, 2, &resident[2]);
}

#[test]
fn an_abandoned_transaction_leaves_a_placeholder() {
    let bench = Bench::new();
    let Bench {
        memory,
        weights,
        resident,
        fresh,
    } = &bench;
    let (recorder, log) = bench.recorder("overlay", false);
    let (free_units, _) = weights.expert_units();
    let mut begun = weights
        .stage(&fresh.input())
        .unwrap()
        .begin(SlotTarget::Slot(2))
        .unwrap();
    begun.attach(recorder);
    drop(begun);
    assert_placeholder(weights, memory, 2);
    assert_eq!(weights.expert_units().0, free_units + 14);
    assert_eq!(*log.lock(), ["overlay drop"], "it was never installed");
    assert_serves(weights, memory, 1, &resident[1]);
}

#[test]
fn a_refused_swap_changes_nothing_and_gives_the_staged_adapter_back() {
    let bench = Bench::new();
    let Bench {
        memory,
        weights,
        fresh,
        ..
    } = &bench;
    let before = memory.snapshot();
    let uploads = memory.totals().uploads;
    let staged = weights.stage(&fresh.input()).unwrap();

    assert_eq!(weights.acquire_slot(1), 1);
    assert!(matches!(
        weights.swap(1, &fresh.input()),
        Err(WeightsError::SlotBusy { slot: 1, refs: 1 })
    ));
    let refused = staged.begin(SlotTarget::Slot(1)).unwrap_err();
    assert!(matches!(refused.error, WeightsError::SlotBusy { .. }));
    assert!(matches!(
        weights.swap(4, &fresh.input()),
        Err(WeightsError::SlotOutOfRange { slot: 4, slots: 4 })
    ));
    assert!(matches!(
        weights.swap(3, &fresh.named("a")),
        Err(WeightsError::DuplicateName { slot: 0, .. })
    ));
    assert_eq!(memory.snapshot(), before);
    assert_eq!(memory.totals().uploads, uploads);

    weights.release_slot(1);
    let staged = refused.staged.expect("nothing was written");
    staged.begin(SlotTarget::Slot(1)).unwrap().commit().unwrap();
    assert_serves(weights, memory, 1, fresh);
}

#[test]
fn an_adapter_that_fails_the_audit_is_refused_before_any_write() {
    let bench = Bench::new();
    let Bench {
        memory, weights, ..
    } = &bench;
    let poisoned = Adapter::new("d", &Geometry::dense(weights.model(), 4), f32::NAN);
    let before = memory.snapshot();
    let error = weights.swap(1, &poisoned.input()).unwrap_err();
    let WeightsError::Refused { adapter, report } = &error else {
        panic!("{error}");
    };
    assert_eq!(adapter, "d");
    assert!(!report.findings.is_empty());
    assert!(error.to_string().contains("REJECT[non-finite-weights]"));
    assert_eq!(memory.snapshot(), before);
    assert_eq!(weights.adapter(1).unwrap().name(), "b");
}

#[test]
fn swapping_the_same_name_in_place_is_a_step_of_its_own() {
    let bench = Bench::new();
    let Bench {
        memory,
        weights,
        fresh,
        ..
    } = &bench;
    let before = weights.adapter_id_for_slot(1);
    for generation in 1..4 {
        let stepped = weights.swap(1, &fresh.named("b")).unwrap();
        assert_eq!(stepped.generation(), generation);
        assert_eq!(stepped.adapter_id(), weights.adapter_id_for_slot(1));
        assert_ne!(stepped.adapter_id(), before);
        assert_serves(weights, memory, 1, fresh);
    }
}

#[test]
fn an_identity_is_never_given_to_other_weights_of_the_same_name() {
    let bench = Bench::new();
    let Bench { weights, fresh, .. } = &bench;
    let mut seen = vec![weights.adapter_id_for_slot(1)];
    let mut note = |id: u64| {
        assert!(!seen.contains(&id), "an identity came back");
        seen.push(id);
    };
    note(weights.swap(1, &fresh.named("b")).unwrap().adapter_id());
    weights.unload(1).unwrap();
    note(weights.swap(3, &fresh.named("b")).unwrap().adapter_id());
    weights.unload(3).unwrap();
    note(weights.promote(&fresh.named("b")).unwrap().adapter_id());
}

#[test]
fn an_adapter_with_more_experts_than_units_are_free_is_refused_and_the_old_one_stays() {
    let model = moe_model();
    let small = Adapter::new("s", &Geometry::dense(&model, 4).with_experts(&[0]), 1.0);
    let large = Adapter::new(
        "l",
        &Geometry::dense(&model, 4).with_experts(&[0, 1, 2]),
        2.0,
    );
    let memory = TestMemory::new(GIB);
    let mut spec = pool(2);
    // Two layers of a router and three projections an expert: 8 units for one expert, 20 for three.
    spec.experts = Some(ExpertPoolSpec {
        max_rank: 4,
        units: 20,
    });
    let weights = LoraWeights::new(memory.clone(), model, spec).unwrap();
    weights.load(&[small.input()]).unwrap();
    assert_eq!(weights.expert_units(), (12, 20));
    assert!(matches!(
        weights.swap(1, &large.input()),
        Err(WeightsError::ExpertRegionFull {
            needed: 20,
            free: 12,
            total: 20
        })
    ));
    assert_serves(&weights, &memory, 0, &small);
    weights
        .swap(0, &large.input())
        .expect("its own units count as free");
    assert_serves(&weights, &memory, 0, &large);
    assert_eq!(weights.expert_units(), (0, 20));
    weights.unload(0).unwrap();
    assert_eq!(weights.expert_units(), (20, 20));
}

#[test]
fn units_that_come_back_in_pieces_serve_the_next_adapter_whole() {
    let model = moe_model();
    let one = Geometry::dense(&model, 4).with_experts(&[0]);
    let adapters: Vec<_> = (0..4)
        .map(|n| Adapter::new(&format!("s{n}"), &one, 1.0 + n as f32))
        .collect();
    let all = Adapter::new(
        "l",
        &Geometry::dense(&model, 2).with_experts(&[0, 1, 2]),
        9.0,
    );
    let memory = TestMemory::new(GIB);
    let mut spec = pool(5);
    spec.experts = Some(ExpertPoolSpec {
        max_rank: 4,
        units: 36,
    });
    let weights = LoraWeights::new(memory.clone(), model, spec).unwrap();
    let inputs: Vec<_> = adapters.iter().map(Adapter::input).collect();
    weights.load(&inputs).unwrap();
    // Two holes of 8 and the last 4: 20 units, nowhere together.
    weights.unload(0).unwrap();
    weights.unload(2).unwrap();
    weights.swap(4, &all.input()).unwrap();
    assert_eq!(weights.expert_units(), (0, 36));
    assert_serves(&weights, &memory, 4, &all);
    assert_serves(&weights, &memory, 1, &adapters[1]);
    assert_serves(&weights, &memory, 3, &adapters[3]);
}

#[test]
fn an_extension_lives_and_dies_with_its_slot() {
    let bench = Bench::new();
    let Bench {
        weights,
        fresh,
        resident,
        ..
    } = &bench;
    let (first, log) = bench.recorder("first", false);
    let mut begun = weights
        .stage(&fresh.input())
        .unwrap()
        .begin(SlotTarget::Slot(3))
        .unwrap();
    begun.attach(first);
    assert!(log.lock().is_empty(), "installed at commit");
    begun.commit().unwrap();
    assert_eq!(*log.lock(), ["first install 3"]);
    assert_eq!(weights.extension(3).unwrap().device_bytes(), 7);

    // Replaced in place, then gone with a swap.
    let generation = weights.adapter(3).unwrap().generation();
    let (second, later) = bench.recorder("second", false);
    weights.attach_extension(3, generation, second).unwrap();
    assert_eq!(
        *log.lock(),
        ["first install 3", "first uninstall 3", "first drop"]
    );
    weights.swap(3, &resident[1].named("e")).unwrap();
    assert_eq!(
        *later.lock(),
        ["second install 3", "second uninstall 3", "second drop"]
    );
    assert!(weights.extension(3).is_none());
}

#[test]
fn an_extension_that_cannot_be_installed_takes_its_adapter_with_it() {
    let bench = Bench::new();
    let Bench {
        memory,
        weights,
        fresh,
        ..
    } = &bench;
    let (failing, log) = bench.recorder("overlay", true);
    let mut begun = weights
        .stage(&fresh.input())
        .unwrap()
        .begin(SlotTarget::Slot(1))
        .unwrap();
    begun.attach(failing);
    assert!(matches!(
        begun.commit(),
        Err(WeightsError::Extension { slot: 1, .. })
    ));
    assert_placeholder(weights, memory, 1);
    let died = ["overlay install 1", "overlay uninstall 1", "overlay drop"];
    assert_eq!(*log.lock(), died);

    let (failing, log) = bench.recorder("overlay", true);
    assert!(matches!(
        weights.attach_extension(2, 0, failing),
        Err(WeightsError::Extension { slot: 2, .. })
    ));
    assert_placeholder(weights, memory, 2);
    assert_eq!(log.lock().len(), 3);
}

#[test]
fn an_extension_for_contents_that_are_gone_is_refused() {
    let bench = Bench::new();
    let Bench { weights, fresh, .. } = &bench;
    weights.swap(1, &fresh.input()).unwrap();
    let (late, log) = bench.recorder("late", false);
    assert!(matches!(
        weights.attach_extension(1, 0, late),
        Err(WeightsError::GenerationChanged {
            slot: 1,
            expected: 0,
            found: 1
        })
    ));
    assert_eq!(*log.lock(), ["late drop"]);
    assert_eq!(weights.adapter(1).unwrap().name(), "d");
}

#[test]
fn refreshing_rewrites_the_entries_of_one_slot() {
    let bench = Bench::new();
    let Bench {
        memory,
        weights,
        resident,
        ..
    } = &bench;
    let route = weights.route(0, lora_weights::LoraModule::QProj).unwrap();
    memory.scribble(route.a_table, 4 * 8);
    for slot in 0..4 {
        weights.refresh_slot_tables(slot).unwrap();
    }
    for (slot, adapter) in (0..).zip(resident) {
        assert_serves(weights, memory, slot, adapter);
    }
    assert_placeholder(weights, memory, 3);

    let lease = weights.lease(0).unwrap();
    assert!(matches!(
        weights.refresh_slot_tables(0),
        Err(WeightsError::SlotBusy { .. })
    ));
    drop(lease);
    memory.fail_upload(1, true);
    assert!(weights.refresh_slot_tables(0).is_err());
    assert_placeholder(weights, memory, 0);
}

#[test]
fn staging_memory_is_used_again() {
    let bench = Bench::new();
    let Bench {
        memory,
        weights,
        fresh,
        ..
    } = &bench;
    weights.swap(1, &fresh.input()).unwrap();
    let made = memory.totals().stagings;
    for _ in 0..5 {
        weights.swap(1, &fresh.input()).unwrap();
    }
    assert_eq!(memory.totals().stagings, made);
    weights.trim_staging();
    assert_eq!(memory.totals().staging_buffers, 0);
}

#[test]
fn a_pool_that_leaves_less_than_it_takes_is_refused_with_both_numbers() {
    let model = tiny_model();
    let spec = PoolSpec::new(4, 8);
    let needed = lora_weights::PoolLayout::new(&model, &spec)
        .unwrap()
        .bytes()
        .total();
    let memory = TestMemory::new(2 * needed - 1);
    match LoraWeights::new(memory.clone(), model.clone(), spec) {
        Err(WeightsError::InsufficientMemory { required, free, .. }) => {
            assert_eq!((required, free), (needed, 2 * needed - 1));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(memory.totals().allocations, 0);
    LoraWeights::new(TestMemory::new(2 * needed), model, spec).unwrap();
}

#[test]
fn nothing_is_leaked_by_failed_allocations_or_the_last_handle() {
    for allocation in 1..=3 {
        let memory = TestMemory::new(GIB);
        memory.fail_allocation(allocation);
        let made = LoraWeights::new(memory.clone(), moe_model(), pool(2));
        assert!(matches!(made, Err(WeightsError::Memory(_))));
        assert_eq!(memory.totals().used, 0);
    }
    let bench = Bench::new();
    let lease = bench.weights.lease(1).unwrap();
    let memory = Arc::clone(&bench.memory);
    drop(bench);
    assert!(memory.totals().used > 0, "the lease holds the pool");
    drop(lease);
    let left = memory.totals();
    assert_eq!(
        (left.allocations, left.used, left.staging_buffers),
        (0, 0, 0)
    );
}

#[test]
fn an_adapter_with_vocabulary_rows_needs_the_extension_that_applies_them() {
    let model = tiny_model();
    let mut spec = pool(2);
    spec.policy.overlays = true;
    let json = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": false, "target_modules": [],
        "modules_to_save": ["embed_tokens"]}"#;
    let table = MemoryTensor::from_f32(
        "base_model.model.model.embed_tokens.weight",
        [48, 32],
        &[0.5; 48 * 32],
    );
    let store = AdapterStore::from_tensors(json, [table]).unwrap();
    let config = lora_config::parse_peft_adapter_config(json, &Default::default()).unwrap();
    let input = LoraAdapterInput::new("t", &store, &config);
    let memory = TestMemory::new(GIB);
    let weights = LoraWeights::new(memory.clone(), model, spec).unwrap();
    let missing = |result: Result<(), WeightsError>| {
        let error = result.unwrap_err();
        assert!(
            error.to_string().starts_with("REJECT[overlay-unapplied]"),
            "{error}"
        );
    };
    let uploads = memory.totals().uploads;
    missing(weights.load(std::slice::from_ref(&input)).map(drop));
    missing(weights.promote(&input).map(drop));
    missing(weights.swap(1, &input).map(drop));
    assert_eq!(memory.totals().uploads, uploads, "refused before any write");

    let begin = || {
        let staged = weights.stage(&input).unwrap();
        staged.begin(SlotTarget::Slot(1)).unwrap()
    };
    missing(begin().commit().map(drop));
    assert_placeholder(&weights, &memory, 1);

    let log = Arc::new(Mutex::new(Vec::new()));
    let overlay = || {
        Arc::new(Recorder {
            name: "overlay",
            log: Arc::clone(&log),
            fails: false,
        })
    };
    let mut begun = begin();
    begun.attach(overlay());
    begun.commit().unwrap();
    weights
        .swap(1, &input.clone().with_extension(overlay()))
        .unwrap();
    assert_eq!(log.lock().len(), 4, "installed, replaced, installed");
}

#[test]
fn a_report_that_is_given_is_not_made_again() {
    let bench = Bench::new();
    let Bench {
        memory,
        weights,
        fresh,
        ..
    } = &bench;
    let report = weights.audit(&fresh.input());
    weights
        .swap(1, &fresh.input().with_report(&report))
        .unwrap();
    assert_serves(weights, memory, 1, fresh);

    let mut refused = report.clone();
    let poisoned = Adapter::new("p", &Geometry::dense(weights.model(), 4), f32::NAN);
    refused.findings = weights.audit(&poisoned.input()).findings;
    assert!(matches!(
        weights.swap(1, &fresh.input().with_report(&refused)),
        Err(WeightsError::Refused { .. })
    ));
}
