//! What a slot's transaction does to the device, and what it leaves when it fails.

mod common;

use common::{Adapter, Geometry, Recorder, SlotBytes, World, assert_placeholder, assert_serves};
use lora_weights::{SlotTarget, UploadStage, WeightsError};

#[test]
fn failed_swap_leaves_a_placeholder_whichever_upload_fails() {
    let mut failures = 0;
    for when_landing in [false, true] {
        for upload in 1.. {
            let World(memory, weights, resident, fresh) = &World::new();
            let (recorder, log) = Recorder::new("overlay", false);
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
    let World(memory, weights, _, fresh) = &World::new();
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
    let World(memory, weights, resident, fresh) = &World::new();
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
    let World(memory, weights, resident, fresh) = &World::new();
    let (recorder, log) = Recorder::new("overlay", false);
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
    let World(memory, weights, _, fresh) = &World::new();
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
    let World(memory, weights, _, _) = &World::new();
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
    let World(memory, weights, _, fresh) = &World::new();
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
    let World(_, weights, _, fresh) = &World::new();
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
fn refreshing_rewrites_the_entries_of_one_slot() {
    let World(memory, weights, resident, _) = &World::new();
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
fn a_report_that_is_given_is_not_made_again() {
    let World(memory, weights, _, fresh) = &World::new();
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
