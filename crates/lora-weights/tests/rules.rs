//! The rules of slot life, one by one.

mod common;

use common::{
    Adapter, Geometry, SlotBytes, TestMemory, assert_placeholder, assert_serves, tiny_model,
};
use lora_weights::{
    BASE_ADAPTER_ID, BASE_SLOT, LoadPolicy, LoraModule, LoraTarget, LoraWeights, Occupancy,
    PoolSpec, Released, SlotSpace, Unloaded, VictimError, WeightsError, adapter_id_hash,
    build_seq_slot_host, load_lora_adapters_generic, load_lora_adapters_multi,
};
use std::sync::Arc;

const GIB: u64 = 1 << 30;

fn adapters(names: &[&str]) -> Vec<Adapter> {
    let model = tiny_model();
    let geometry = Geometry::dense(&model, 4);
    (1..)
        .zip(names)
        .map(|(mark, name)| Adapter::new(name, &geometry, mark as f32))
        .collect()
}

fn pool(slots: u32, allow_rotation: bool) -> PoolSpec {
    PoolSpec {
        policy: LoadPolicy {
            allow_rotation,
            ..LoadPolicy::default()
        },
        ..PoolSpec::new(slots, 8)
    }
}

/// `loaded` at startup in `slots` slots.
fn serving(loaded: &[Adapter], slots: u32, allow_rotation: bool) -> (Arc<TestMemory>, LoraWeights) {
    let memory = TestMemory::new(GIB);
    let inputs: Vec<_> = loaded.iter().map(Adapter::input).collect();
    let spec = pool(slots, allow_rotation);
    let weights = load_lora_adapters_multi(memory.clone(), tiny_model(), spec, &inputs).unwrap();
    (memory, weights)
}

#[test]
fn load_fills_the_first_slots_pins_them_and_makes_slot_0_active() {
    let loaded = adapters(&["a", "b"]);
    let (memory, weights) = serving(&loaded, 4, false);
    assert_eq!(weights.active_slot(), Some(0));
    let names = weights.adapter_names();
    assert_eq!(names, [Some("a".into()), Some("b".into()), None, None]);
    for (slot, adapter) in (0..).zip(&loaded) {
        assert_serves(&weights, &memory, slot, adapter);
        assert!(weights.is_pinned(slot));
        assert_eq!(weights.adapter(slot).unwrap().generation(), 0);
    }
    for slot in [2, 3] {
        assert_placeholder(&weights, &memory, slot);
        assert!(!weights.is_pinned(slot));
    }
    assert_eq!(weights.adapter_id_for_slot(1), adapter_id_hash("b", 0));
    assert_eq!(weights.adapter_id_for_slot(-1), adapter_id_hash("a", 0));
    assert_eq!(weights.adapter_id_for_slot(BASE_SLOT), BASE_ADAPTER_ID);
    let layers = weights.active_layers().unwrap();
    assert_eq!(layers.len(), 2);
    assert_eq!(
        layers[1].module_pair(LoraModule::VProj),
        weights.select_routed_pair(-1, 1, LoraModule::VProj)
    );
}

#[test]
fn load_of_none_too_many_or_two_of_a_name_is_refused_by_name() {
    let loaded = adapters(&["a", "b", "c"]);
    let inputs: Vec<_> = loaded.iter().map(Adapter::input).collect();
    let load = |inputs: &[_]| {
        let memory = TestMemory::new(GIB);
        load_lora_adapters_multi(memory, tiny_model(), pool(2, false), inputs).unwrap_err()
    };
    assert!(matches!(load(&[]), WeightsError::NoAdapters));
    let error = load(&inputs);
    assert!(error.to_string().starts_with("REJECT[too-many-adapters]"));
    let error = load(&[inputs[0].clone(), loaded[1].named("a")]);
    assert!(error.to_string().starts_with("REJECT[duplicate-name]"));
}

#[test]
fn load_is_for_startup_only() {
    let loaded = adapters(&["a", "b"]);
    let (_, weights) = serving(&loaded[..1], 4, true);
    assert!(matches!(
        weights.load(&[loaded[1].input()]),
        Err(WeightsError::AlreadyLoaded { slot: 0 })
    ));
}

#[test]
fn one_adapter_may_have_an_empty_name() {
    let loaded = adapters(&[""]);
    let memory = TestMemory::new(GIB);
    let weights =
        load_lora_adapters_generic(memory, tiny_model(), pool(2, false), loaded[0].input())
            .unwrap();
    assert_eq!(weights.slot_of(""), Some(0));
    assert_eq!(weights.acquire_slot(0), 0);
    assert_eq!(
        weights.acquire_slot(1),
        -1,
        "a placeholder has no name at all"
    );
    assert_ne!(weights.adapter_id_for_slot(0), BASE_ADAPTER_ID);
}

#[test]
fn a_load_that_fails_midway_leaves_no_slot_filled() {
    let loaded = adapters(&["a", "b", "c"]);
    let inputs: Vec<_> = loaded.iter().map(Adapter::input).collect();
    // Image and tables are an upload each: the third is the second adapter's image.
    for upload in 1..=6 {
        let memory = TestMemory::new(GIB);
        let weights = LoraWeights::new(memory.clone(), tiny_model(), pool(4, false)).unwrap();
        memory.fail_upload(upload, true);
        assert!(matches!(
            weights.load(&inputs),
            Err(WeightsError::Upload { .. })
        ));
        assert!(!memory.failure_pending());
        for slot in 0..4 {
            assert_placeholder(&weights, &memory, slot);
            assert!(!weights.is_pinned(slot));
        }
        assert_eq!(weights.active_slot(), None);
        weights.load(&inputs).unwrap();
        assert_serves(&weights, &memory, 2, &loaded[2]);
    }
}

#[test]
fn nothing_is_written_where_one_startup_adapter_fails_the_audit() {
    let model = tiny_model();
    let good = Adapter::new("a", &Geometry::dense(&model, 4), 1.0);
    let bad = Adapter::new("b", &Geometry::dense(&model, 4), f32::INFINITY);
    let memory = TestMemory::new(GIB);
    let weights = LoraWeights::new(memory.clone(), model, pool(4, false)).unwrap();
    assert!(matches!(
        weights.load(&[good.input(), bad.input()]),
        Err(WeightsError::Refused { .. })
    ));
    assert_eq!(memory.totals().uploads, 0);
}

#[test]
fn acquire_resolves_counts_and_stamps_or_changes_nothing() {
    let loaded = adapters(&["a", "b"]);
    let (_, weights) = serving(&loaded, 3, true);
    let stamp = weights.slot_last_used(1).unwrap();
    assert_eq!(weights.acquire_slot(1), 1);
    assert_eq!(weights.slot_ref_count(1), Some(1));
    assert!(weights.slot_last_used(1).unwrap() > stamp);
    assert_eq!(weights.acquire_slot(-5), 0, "negative is the active slot");

    let stamps: Vec<_> = (0..3).map(|slot| weights.slot_last_used(slot)).collect();
    for request in [2, 3, i32::MAX] {
        assert_eq!(weights.acquire_slot(request), -1);
        assert!(weights.lease(request).is_none());
    }
    assert_eq!(weights.acquire_slot(BASE_SLOT), BASE_SLOT);
    let after: Vec<_> = (0..3).map(|slot| weights.slot_last_used(slot)).collect();
    assert_eq!(after, stamps);
    assert_eq!(weights.slot_ref_count(3), None);
}

#[test]
fn release_takes_what_acquire_returned_even_if_active_moved() {
    let loaded = adapters(&["a", "b"]);
    let (_, weights) = serving(&loaded, 3, true);
    weights.rotate(1).unwrap();
    let held = weights.acquire_slot(-1);
    assert_eq!(held, 1);
    assert_eq!(weights.release_slot(held), Released::Held { refs: 0 });
    weights.rotate(0).unwrap();
    assert_eq!(weights.release_slot(held), Released::Unheld);
    assert_eq!(
        weights.slot_ref_count(1),
        Some(0),
        "counts never go below 0"
    );
    for nothing in [-1, BASE_SLOT, 3] {
        assert_eq!(weights.release_slot(nothing), Released::Unheld);
    }
}

#[test]
fn a_lease_gives_back_on_drop_and_base_leases_hold_nothing() {
    let loaded = adapters(&["a"]);
    let (_, weights) = serving(&loaded, 2, false);
    let lease = weights.lease(-1).unwrap();
    assert_eq!(
        (lease.slot(), lease.adapter_id()),
        (0, adapter_id_hash("a", 0))
    );
    assert_eq!(weights.slot_ref_count(0), Some(1));
    drop(lease);
    assert_eq!(weights.slot_ref_count(0), Some(0));

    let base = weights.lease(BASE_SLOT).unwrap();
    assert_eq!(
        (base.slot(), base.adapter_id()),
        (BASE_SLOT, BASE_ADAPTER_ID)
    );
    assert!(base.adapter().is_none());
    assert_eq!(weights.slot_ref_count(0), Some(0));
}

#[test]
fn nothing_active_is_the_base_model() {
    let memory = TestMemory::new(GIB);
    let weights = LoraWeights::new(memory, tiny_model(), pool(2, false)).unwrap();
    let extra = adapters(&["x"]);
    weights.promote(&extra[0].input()).unwrap();
    assert_eq!(weights.acquire_slot(-1), BASE_SLOT);
    assert_eq!(weights.lease(-1).unwrap().slot(), BASE_SLOT);
    assert_eq!(weights.adapter_id_for_slot(-1), BASE_ADAPTER_ID);
    assert!(weights.active_layers().is_none());
    let rows = build_seq_slot_host(&[-1, 0], 2, weights.slot_space()).unwrap();
    assert_eq!(rows, [-1, 0]);
}

#[test]
fn promotion_takes_the_first_empty_slot_then_the_least_recently_used_idle_one() {
    let loaded = adapters(&["a", "x", "y", "z", "w"]);
    let (memory, weights) = serving(&loaded[..1], 4, false);
    let promote = |n: usize| weights.promote(&loaded[n].input()).map(|a| a.slot());
    assert_eq!(promote(1).unwrap(), 1);
    assert_eq!(promote(2).unwrap(), 2);
    assert_eq!(promote(3).unwrap(), 3);
    // Least recently used is x in 1; touched, y in 2 is; held, z in 3 is.
    weights.touch_slot(1);
    let held = weights.lease(2).unwrap();
    assert_eq!(promote(4).unwrap(), 3);
    assert_serves(&weights, &memory, 3, &loaded[4]);
    assert_eq!(weights.slot_of("z"), None);
    // Just promoted, w is the last to go.
    assert_eq!(promote(3).unwrap(), 1);
    drop(held);
    assert_eq!(promote(1).unwrap(), 2);
}

#[test]
fn promotion_never_takes_a_pinned_or_the_active_slot() {
    let loaded = adapters(&["a", "b", "x", "y"]);
    let (_, weights) = serving(&loaded[..2], 3, true);
    weights.promote(&loaded[2].input()).unwrap();
    weights.rotate(2).unwrap();
    assert!(matches!(
        weights.promote(&loaded[3].input()),
        Err(WeightsError::Victim(VictimError::NoCacheSlots))
    ));
    weights.rotate(0).unwrap();
    let held = weights.lease(2).unwrap();
    assert!(matches!(
        weights.promote(&loaded[3].input()),
        Err(WeightsError::Victim(VictimError::PoolFull { slots: 1 }))
    ));
    drop(held);
    assert_eq!(weights.promote(&loaded[3].input()).unwrap().slot(), 2);
}

#[test]
fn an_unpinned_startup_adapter_is_a_cache_slot_once_another_is_active() {
    let loaded = adapters(&["a", "b", "x"]);
    let memory = TestMemory::new(GIB);
    let inputs = [loaded[0].input(), loaded[1].input().unpinned()];
    let weights = load_lora_adapters_multi(memory, tiny_model(), pool(2, false), &inputs).unwrap();
    let views = weights.cache_slot_views();
    assert_eq!((views.len(), views[0].slot), (1, 1));
    assert_eq!(views[0].occupancy, Occupancy::Filled);
    assert_eq!(weights.promote(&loaded[2].input()).unwrap().slot(), 1);
}

#[test]
fn an_adapter_that_is_resident_is_not_promoted_twice() {
    let loaded = adapters(&["a", "x"]);
    let (_, weights) = serving(&loaded[..1], 4, false);
    weights.promote(&loaded[1].input()).unwrap();
    for resident in &loaded {
        assert!(matches!(
            weights.promote(&resident.input()),
            Err(WeightsError::DuplicateName { .. })
        ));
    }
}

#[test]
fn only_the_cache_changes_without_permission() {
    let loaded = adapters(&["a", "b", "x", "y"]);
    let (_, weights) = serving(&loaded[..2], 3, false);
    let refused = |result: Result<(), WeightsError>| {
        assert!(matches!(
            result,
            Err(WeightsError::RotationNotPermitted { .. })
        ));
    };
    refused(weights.rotate(1).map(drop));
    refused(weights.swap(0, &loaded[2].input()).map(drop));
    refused(weights.swap(1, &loaded[2].input()).map(drop));
    refused(weights.unload(1).map(drop));
    assert_eq!(weights.rotate(0).unwrap(), Some(0), "nothing changes");
    weights.promote(&loaded[2].input()).unwrap();
    weights.swap(2, &loaded[3].input()).unwrap();
    weights.unload(2).unwrap();
}

#[test]
fn rotation_waits_for_the_old_active_slot_and_needs_a_filled_one() {
    let loaded = adapters(&["a", "b"]);
    let (_, weights) = serving(&loaded, 3, true);
    let held = weights.lease(-1).unwrap();
    assert!(matches!(
        weights.rotate(1),
        Err(WeightsError::SlotBusy { slot: 0, refs: 1 })
    ));
    drop(held);
    assert!(matches!(
        weights.rotate(2),
        Err(WeightsError::SlotEmpty { slot: 2 })
    ));
    assert!(matches!(
        weights.rotate(3),
        Err(WeightsError::SlotOutOfRange { .. })
    ));
    assert_eq!(weights.rotate(1).unwrap(), Some(0));
    let space = SlotSpace {
        slots: 3,
        active: Some(1),
    };
    assert_eq!(weights.slot_space(), space);
    assert_eq!(weights.routed_prefill_slot(0), Some(0));
    assert_eq!(weights.routed_prefill_slot(1), None);
    assert_eq!(weights.routed_prefill_slot(-1), None);
}

#[test]
fn unload_frees_at_once_or_with_the_last_release_and_says_so() {
    let loaded = adapters(&["a", "x", "y"]);
    let (memory, weights) = serving(&loaded[..1], 3, true);
    weights.promote(&loaded[1].input()).unwrap();
    let others = SlotBytes::read(&weights, &memory, 0);

    let first = weights.lease(1).unwrap();
    assert_eq!(weights.acquire_slot(1), 1);
    assert_eq!(weights.unload(1).unwrap(), Unloaded::Draining { refs: 2 });
    assert_eq!(weights.acquire_slot(1), -1, "no new request");
    assert_eq!(weights.slot_of("x"), None);
    assert!(!SlotBytes::read(&weights, &memory, 1).tables_are_zero());
    assert!(matches!(
        weights.swap(1, &loaded[2].input()),
        Err(WeightsError::SlotBusy { refs: 2, .. })
    ));
    // The name is free: a second copy may come while the first drains.
    assert_eq!(weights.promote(&loaded[1].input()).unwrap().slot(), 2);

    drop(first);
    assert_eq!(weights.unload(1).unwrap(), Unloaded::Draining { refs: 1 });
    let Released::Freed(freed) = weights.release_slot(1) else {
        panic!("the last reference frees");
    };
    assert_eq!((freed.slot, freed.name.as_str()), (1, "x"));
    assert_eq!(freed.slot_bytes, weights.layout().bytes().slot);
    assert_placeholder(&weights, &memory, 1);
    assert_eq!(SlotBytes::read(&weights, &memory, 0), others);

    let Unloaded::Freed(freed) = weights.unload(2).unwrap() else {
        panic!("nobody holds it");
    };
    assert_eq!(freed.name, "x");
    assert!(matches!(
        weights.unload(2),
        Err(WeightsError::SlotEmpty { slot: 2 })
    ));
}

#[test]
fn an_unloaded_startup_slot_joins_the_cache_and_an_unloaded_active_one_serves_nothing() {
    let loaded = adapters(&["a", "b", "x"]);
    let (_, weights) = serving(&loaded[..2], 2, true);
    weights.unload(1).unwrap();
    assert_eq!(weights.promote(&loaded[2].input()).unwrap().slot(), 1);
    weights.unload(0).unwrap();
    assert_eq!(weights.active_slot(), Some(0));
    assert_eq!(weights.acquire_slot(-1), -1);
    assert!(weights.lease(-1).is_none());
    weights.swap(0, &loaded[1].input()).unwrap();
    assert_eq!(weights.acquire_slot(-1), 0);
}

#[test]
fn a_drained_slot_whose_tables_cannot_be_zeroed_says_so_and_is_cleaned_later() {
    let loaded = adapters(&["a", "x"]);
    let (memory, weights) = serving(&loaded[..1], 2, true);
    weights.promote(&loaded[1].input()).unwrap();
    weights.acquire_slot(1);
    weights.unload(1).unwrap();
    memory.fail_upload(1, false);
    assert!(matches!(
        weights.release_slot(1),
        Released::FreedWithStaleTables { slot: 1, .. }
    ));
    assert_eq!(weights.acquire_slot(1), -1);
    weights.refresh_slot_tables(1).unwrap();
    assert_placeholder(&weights, &memory, 1);
}

#[test]
fn a_routed_pair_is_none_wherever_there_is_nothing() {
    let model = tiny_model();
    let only_q = Geometry {
        targets: vec![LoraTarget::Attn(LoraModule::QProj)],
        ..Geometry::dense(&model, 4)
    };
    let loaded = [Adapter::new("q", &only_q, 1.0)];
    let (_, weights) = serving(&loaded, 2, false);
    let pair = |slot, layer, module| weights.select_routed_pair(slot, layer, module);
    let found = pair(0, 1, LoraModule::QProj).unwrap();
    assert_eq!((found.rank, found.max_rank, found.scale), (4, 16, 2.0));
    assert_eq!((found.k_in, found.n_out), (32, 32));
    assert_eq!(pair(-1, 1, LoraModule::QProj), Some(found));
    assert_eq!(pair(0, 1, LoraModule::KProj), None, "not adapted");
    assert_eq!(pair(0, 2, LoraModule::QProj), None, "no such layer");
    assert_eq!(pair(1, 1, LoraModule::QProj), None, "placeholder");
    assert_eq!(pair(2, 1, LoraModule::QProj), None, "out of range");
    assert_eq!(pair(BASE_SLOT, 1, LoraModule::QProj), None);
}

#[test]
fn routes_stay_where_they_are_for_life() {
    let loaded = adapters(&["a", "x", "y"]);
    let (_, weights) = serving(&loaded[..1], 2, true);
    let route = weights.route(1, LoraModule::DownProj).unwrap();
    assert_eq!((route.slots, route.k_in, route.n_out), (2, 40, 32));
    assert_eq!(weights.route(2, LoraModule::DownProj), None);
    assert_eq!(weights.route(0, LoraModule::OutProj), None);
    assert_eq!(weights.router_route(0), None);
    weights.promote(&loaded[1].input()).unwrap();
    weights.swap(0, &loaded[2].input()).unwrap();
    weights.unload(1).unwrap();
    assert_eq!(weights.route(1, LoraModule::DownProj), Some(route));
}
