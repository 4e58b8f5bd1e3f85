//! Adapters come, go and are counted.

use crate::{adapter, model, rotating, routed_q, runtime};
use lora_runtime::config::RuntimeConfig;
use lora_runtime::weights::{
    BASE_ADAPTER_ID, BASE_SLOT, MemoryTensor, SlotTarget, TensorId, Unloaded, WeightsError,
};
use lora_runtime::{LoraRuntime, RuntimeError, RuntimeOptions};
use lora_tests::case_dir;

#[test]
fn promotion_evicts_and_every_verb_is_counted() {
    let runtime = runtime("llama_plain", RuntimeOptions::new(2, 16));
    runtime
        .load(&[adapter(&runtime, "llama_plain")])
        .expect("loads");
    assert_eq!(
        runtime
            .promote(&adapter(&runtime, "llama_rslora"))
            .expect("a cache slot is free")
            .slot(),
        1
    );
    let refused = runtime
        .promote(&adapter(&runtime, "bad_nan"))
        .expect_err("holds a NaN");
    assert!(
        matches!(
            &refused,
            RuntimeError::Weights(WeightsError::Refused { .. })
        ),
        "{refused}"
    );
    let evicting = runtime
        .promote(&adapter(&runtime, "llama_patterns"))
        .expect("the other one is idle");
    assert_eq!(
        (evicting.slot(), runtime.weights().slot_of("llama_rslora")),
        (1, None)
    );
    let held = runtime.lease(1).expect("slot 1 is filled");
    assert!(
        runtime.promote(&adapter(&runtime, "llama_rslora")).is_err(),
        "the only cache slot is held"
    );
    assert_eq!(held.adapter_id(), runtime.adapter_id(1));
    drop(held);
    assert!(matches!(runtime.unload(1), Ok(Unloaded::Freed(_))));
    let metrics = runtime.metrics();
    assert_eq!(
        (
            metrics.loads,
            metrics.promotions,
            metrics.evictions,
            metrics.unloads
        ),
        (3, 2, 1, 1)
    );
    assert_eq!(metrics.refusals, 2);
    assert_eq!(metrics.refusal_reasons.get("non-finite-weights"), Some(&1));
    assert_eq!(metrics.refusal_reasons.get("pool-full"), Some(&1));
    assert!(metrics.bytes >= 3 * runtime.report().pool.slot);
}

#[test]
fn acquire_finds_a_resident_adapter_promotes_another_and_says_when_to_wait() {
    let runtime = runtime("llama_plain", RuntimeOptions::new(1, 16));
    let (plain, rslora) = (
        adapter(&runtime, "llama_plain"),
        adapter(&runtime, "llama_rslora"),
    );
    let first = runtime.acquire(&plain).expect("a slot is empty");
    let again = runtime.acquire(&plain).expect("it is resident");
    assert_eq!(first.adapter_id(), again.adapter_id());
    assert_eq!(runtime.metrics().promotions, 1);

    let full = runtime.acquire(&rslora).expect_err("the slot is held");
    assert!(full.is_busy(), "{full}");
    drop((first, again));
    let other = runtime.acquire(&rslora).expect("nobody holds the slot");
    let name = other.adapter().map(|adapter| adapter.name().to_owned());
    assert_eq!(name.as_deref(), Some("llama_rslora"));

    drop(other);
    let refused = runtime
        .acquire(&adapter(&runtime, "bad_nan"))
        .expect_err("holds a NaN");
    assert!(!refused.is_busy(), "{refused}");
}

#[test]
fn an_unloaded_adapter_serves_on_while_its_successor_is_acquired_under_its_name() {
    let runtime = runtime("llama_plain", RuntimeOptions::new(2, 16));
    let plain = adapter(&runtime, "llama_plain");
    let running = runtime.acquire(&plain).expect("a slot is empty");
    let unloaded = runtime.unload(0).expect("it is filled");
    assert_eq!(unloaded, Unloaded::Draining { refs: 1 });
    let next = runtime.acquire(&plain).expect("the other slot is empty");
    assert_ne!(running.slot(), next.slot());
    assert_ne!(
        running.adapter_id(),
        next.adapter_id(),
        "cached prefixes are not shared"
    );
}

#[test]
fn threads_that_acquire_one_name_promote_it_once() {
    let runtime = runtime("llama_plain", RuntimeOptions::new(4, 16));
    let plain = adapter(&runtime, "llama_plain");
    let ids: Vec<u64> = std::thread::scope(|scope| {
        let acquire = || {
            runtime
                .acquire(&plain)
                .expect("slots are empty")
                .adapter_id()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(acquire)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, u64>| thread.join();
        threads
            .into_iter()
            .map(|t| join(t).expect("no panic"))
            .collect()
    });
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    assert_eq!(runtime.metrics().promotions, 1);
}

#[test]
fn a_snapshot_says_what_happened_how_long_it_took_and_who_is_there() {
    let runtime = runtime("llama_plain", rotating());
    runtime
        .load(&[adapter(&runtime, "llama_plain")])
        .expect("loads");
    let staged = runtime
        .stage(&adapter(&runtime, "llama_rslora"))
        .expect("packs");
    let swap = staged.begin(SlotTarget::Slot(0)).expect("slot 0 is idle");
    assert!(
        runtime.lease(0).is_none(),
        "nobody may hold a slot that is written"
    );
    while !swap.is_done().expect("the host does not fail") {
        std::thread::yield_now();
    }
    let swapped = swap.commit().expect("the host does not fail");
    assert!(runtime.swap(9, &adapter(&runtime, "llama_plain")).is_err());
    let json = serde_json::to_value(runtime.snapshot()).expect("serializes");
    let metrics = &json["metrics"];
    for (counter, count) in [
        ("loads", 2),
        ("swaps", 1),
        ("evictions", 1),
        ("refusals", 1),
    ] {
        assert_eq!(metrics[counter], count, "{counter}: {metrics}");
    }
    assert_eq!(metrics["refusal_reasons"]["slot-out-of-range"], 1);
    for stage in ["audit", "pack", "upload", "commit"] {
        assert_eq!(metrics[stage]["count"], 2, "{stage}: {metrics}");
        assert!(metrics[stage]["most_us"].as_u64() <= metrics[stage]["total_us"].as_u64());
    }
    let resident = &json["report"]["adapters"][0];
    assert_eq!(resident["name"], "llama_rslora");
    assert_eq!(resident["generation"], swapped.generation());
}

#[test]
fn rotation_waits_for_the_old_active_slot_and_needs_permission() {
    let runtime = runtime("llama_plain", rotating());
    runtime
        .load(&["llama_plain", "llama_rslora"].map(|case| adapter(&runtime, case)))
        .expect("loads");
    let held = runtime.lease(-1).expect("slot 0 is active");
    assert!(matches!(
        runtime.rotate(1),
        Err(RuntimeError::Weights(WeightsError::SlotBusy {
            slot: 0,
            ..
        }))
    ));
    drop(held);
    runtime.rotate(1).expect("nobody holds slot 0");
    assert_eq!(runtime.metrics().rotations, 1);
    let fixed = crate::runtime("llama_plain", RuntimeOptions::new(2, 16));
    fixed
        .load(&["llama_plain", "llama_rslora"].map(|case| adapter(&fixed, case)))
        .expect("loads");
    assert!(matches!(
        fixed.rotate(1),
        Err(RuntimeError::Weights(
            WeightsError::RotationNotPermitted { .. }
        ))
    ));
}

#[test]
fn swap_changes_the_identity_of_the_slot_and_nothing_else() {
    let runtime = runtime("llama_plain", rotating());
    runtime
        .load(&["llama_plain", "llama_rslora"].map(|case| adapter(&runtime, case)))
        .expect("loads");
    let (first, second) = (runtime.adapter_id(0), runtime.adapter_id(1));
    let other_rows = routed_q(&runtime, &[1; 2]);
    runtime
        .swap(0, &adapter(&runtime, "llama_plain"))
        .expect("the same adapter again, as an RL step does");
    assert_ne!(runtime.adapter_id(0), first);
    assert_eq!(runtime.adapter_id(1), second);
    assert_eq!(runtime.adapter_id(BASE_SLOT), BASE_ADAPTER_ID);
    assert_eq!(routed_q(&runtime, &[1; 2]), other_rows);
    assert_eq!(runtime.metrics().swaps, 1);
}

#[test]
fn lora_toml_sets_up_a_whole_runtime() {
    let path = |case: &str| case_dir(case).join("adapter").display().to_string();
    let text = format!(
        "max_loras = 3\nmax_rank = 8\n[levers]\nrotate = true\n\
         [[adapters]]\nname = \"plain\"\npath = {:?}\n[[adapters]]\nname = \"rs\"\npath = {:?}\npinned = false\n",
        path("llama_plain"),
        path("llama_rslora"),
    );
    let config = RuntimeConfig::from_toml(&text).expect("valid");
    let runtime = LoraRuntime::from_config(&config, model("llama_plain")).expect("sets up");
    let report = runtime.report();
    let residents: Vec<(u32, &str, bool)> = report
        .adapters
        .iter()
        .map(|adapter| (adapter.slot, adapter.name.as_str(), adapter.pinned))
        .collect();
    assert_eq!(residents, [(0, "plain", true), (1, "rs", false)]);
    assert_eq!(
        (
            report.active,
            report.adapters[0].dense_pairs,
            report.adapters[0].applied
        ),
        (Some(0), 14, 28)
    );
    runtime.rotate(1).expect("the lever permits it");
}

#[test]
fn adapter_that_cannot_be_opened_is_named() {
    let runtime = runtime("llama_plain", RuntimeOptions::new(1, 16));
    let missing = runtime
        .adapter("gone", std::path::Path::new("/no/such/folder"))
        .expect_err("is not there");
    assert!(
        missing.to_string().contains("gone") && missing.to_string().contains("/no/such/folder"),
        "{missing}"
    );
    let refused = runtime
        .adapter("zero", &case_dir("bad_r_zero").join("adapter"))
        .expect_err("rank 0");
    assert!(
        refused.to_string().contains("zero") && refused.to_string().contains("config-r"),
        "{refused}"
    );
}

#[test]
fn a_training_step_in_memory_serves_as_its_file_does_and_replaces_the_step_before() {
    let lora = runtime("llama_plain", rotating());
    let file = adapter(&lora, "llama_plain");
    let step = |edit: &dyn Fn(&str, &mut Vec<u8>)| {
        let store = file.store();
        let tensors = store.tensors().iter().enumerate().map(|(at, meta)| {
            let mut bytes = store.tensor_bytes(TensorId(at)).to_vec();
            edit(&meta.name, &mut bytes);
            MemoryTensor::new(meta.name.clone(), meta.dtype, meta.shape.clone(), bytes)
        });
        let tensors: Vec<_> = tensors.collect();
        lora.adapter_in_memory("policy", store.config_json(), tensors)
            .expect("a good config")
    };
    lora.load(&[step(&|_, _| ())]).expect("loads");
    lora.promote(&file).expect("a slot is free");
    let rows = routed_q(&lora, &[0, 1]);
    assert_eq!(
        routed_q(&lora, &[0, 0])[0],
        rows[0],
        "rows depend on their adapter alone"
    );
    assert_eq!(
        routed_q(&lora, &[1, 0])[0],
        rows[0],
        "memory and file agree"
    );
    let key = lora.adapter_id(0);

    let negated = step(&|name, bytes| {
        if name.contains("lora_B") {
            // F32, little-endian: the sign is the highest bit of the last byte.
            bytes.chunks_exact_mut(4).for_each(|value| value[3] ^= 0x80);
        }
    });
    let slot = lora.swap(0, &negated).expect("nobody holds it");
    assert_eq!((slot.name(), slot.generation()), ("policy", 1));
    assert_ne!(lora.adapter_id(0), key);
    let stepped = routed_q(&lora, &[0, 1]);
    assert_ne!(stepped[0], rows[0]);
    assert_eq!(stepped[1], rows[1], "the other slot is as it was");

    let diverged = step(&|_, bytes| bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes()));
    let refused = lora.swap(0, &diverged).expect_err("a NaN in every tensor");
    assert!(
        matches!(&refused, RuntimeError::Weights(WeightsError::Refused { report, .. }) if report.errors().count() == 28),
        "{refused}"
    );
    assert_eq!(routed_q(&lora, &[0, 1]), stepped);
    assert_eq!(lora.adapter_id(0), slot.adapter_id());

    let cut = MemoryTensor::from_f32("x", [2, 3], &[0.0; 5]);
    let error = lora
        .adapter_in_memory("policy", "{}", [cut])
        .expect_err("five of six values");
    assert!(matches!(error, RuntimeError::Tensors { .. }), "{error}");
}
