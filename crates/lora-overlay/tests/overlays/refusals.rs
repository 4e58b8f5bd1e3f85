//! What is refused, with the numbers, and nothing left behind.

use crate::faulty::faulty;
use crate::world::{EMBED, HEAD, Parts, Table, World};
use lora_kernels::host::{HostBackend, HostOptions};
use lora_kernels::testing::TestBackend;
use lora_overlay::{EmbedOverlay, OverlayError, ServedTable, ServedTables, TokenOverlaySet};
use std::sync::Arc;

/// A world on a host of 16 MiB, so that what is taken can be told from what is free.
fn world((vocab, hidden): (usize, usize)) -> World {
    let options = HostOptions {
        memory_limit: Some(16 << 20),
        ..HostOptions::default()
    };
    let backend: TestBackend = Arc::new(HostBackend::with_options(options).expect("a host"));
    World::new(&backend, (vocab, hidden), false)
}

fn free(world: &World) -> u64 {
    world.backend.memory_info().expect("counts").free
}

fn refusal(parts: impl FnOnce(&World) -> Parts) -> OverlayError {
    let world = world((48, 16));
    let before = free(&world);
    let built = world.build(parts(&world));
    assert_eq!(free(&world), before, "something is left allocated");
    built.expect_err("refused")
}

#[test]
fn a_token_that_nobody_has_is_refused() {
    let error = refusal(|_| Parts::tokens(&[3, 48], &Table::random(2, 16, 1)));
    let expected = OverlayError::TokenBeyondVocab {
        id: 48,
        vocab: 48,
        base_rows: 0,
    };
    assert_eq!(error, expected);
}

#[test]
fn trained_ids_without_rows_are_refused() {
    let error = refusal(|world| {
        let base = world.embed.tensor(format!("{EMBED}.weight"));
        Parts::new(r#""trainable_token_indices": [3, 4]"#, [base])
    });
    assert!(
        error
            .to_string()
            .starts_with("REJECT[overlay-delta-missing]: 2 trained tokens of embed_tokens"),
        "{error}"
    );
}

#[test]
fn as_many_rows_as_ids_are_needed() {
    let error = refusal(|_| Parts::tokens(&[3, 4], &Table::random(3, 16, 1)));
    assert!(error.to_string().contains("3 trained rows"), "{error}");
    let error = refusal(|_| {
        let rows = Table::random(3, 16, 1);
        Parts::new(
            "",
            [rows.tensor(format!("{HEAD}.token_adapter.trainable_tokens_delta"))],
        )
    });
    assert!(error.to_string().contains("names 0 ids"), "{error}");
}

#[test]
fn tables_of_another_width_are_refused_with_both_numbers() {
    let error = refusal(|_| Parts::tokens(&[3], &Table::random(1, 17, 1)));
    assert!(
        error.to_string().starts_with("REJECT[overlay-shape]")
            && error.to_string().contains("[1, 17]")
            && error.to_string().contains("[rows, 16]"),
        "{error}"
    );
    let world = world((48, 16));
    let narrow = ServedTables::tied(ServedTable::opaque(48));
    assert!(narrow.shape(16).is_ok());
    let served = world.served();
    assert!(matches!(served.shape(17), Err(OverlayError::Shape { .. })));
    assert!(
        ServedTables::tied(ServedTable::opaque(0))
            .shape(16)
            .is_err()
    );
}

#[test]
fn memory_that_is_not_there_leaves_nothing_behind() {
    let world = world((48, 16));
    let before = free(&world);
    // Staged, it fits; compact rows of all of it do not.
    let table = Table::random(3 << 17, 16, 3);
    let parts = Parts::new("", [table.tensor(format!("{EMBED}.weight"))]);
    let error = world.build(parts).expect_err("12 MiB and as many again");
    assert!(error.to_string().contains("bytes asked for"), "{error}");
    assert_eq!(free(&world), before);
}

#[test]
fn wherever_building_fails_what_was_launched_is_waited_for_before_memory_is_freed() {
    for call in 1.. {
        let host = faulty(16 << 20);
        let backend: TestBackend = host.clone();
        let faults = host.hooks();
        let world = World::new(&backend, (48, 16), true);
        // Rows to compare, to copy and to offer.
        let table = world.embed.moved(&[3, 7], 1.0).longer(4, 9);
        let parts = Parts::new("", [table.tensor(format!("{EMBED}.weight"))]);
        let before = free(&world);
        faults.fail_call(call);
        let built = world.build(parts);
        faults.fail_call(0);
        assert_eq!(faults.freed_early(), 0, "call {call}");
        if built.is_ok() {
            assert!(call > 10, "calls that could fail: {call}");
            return;
        }
        assert_eq!(free(&world), before, "call {call}");
    }
}

#[test]
fn adapters_without_rows_and_with_low_rank_tables_stage_nothing() {
    let world = world((48, 16));
    let before = free(&world);
    assert!(world.stage(Parts::new("", [])).expect("stages").is_none());
    let low_rank = Table::random(2, 48, 1).tensor(format!("{EMBED}.lora_embedding_A"));
    let mut parts = Parts::tokens(&[3], &Table::random(1, 16, 1));
    parts.tensors.push(low_rank);
    assert!(world.stage(parts).expect("stages").is_none());
    assert_eq!(free(&world), before);
}

#[test]
fn overlays_of_another_vocabulary_have_no_place_in_a_set() {
    let (world, other) = (world((48, 16)), world((49, 16)));
    let overlay = |world: &World| -> Arc<EmbedOverlay> {
        Arc::new(world.overlay(Parts::tokens(&[3], &Table::random(1, 16, 1))))
    };
    let shape = world.served().shape(16).expect("tables");
    let set = TokenOverlaySet::from_slots(world.memory(), shape, [None]).expect("tables");
    let error = set.install(0, Some(overlay(&other))).expect_err("refused");
    assert_eq!(
        error,
        OverlayError::Mismatch {
            slot: 0,
            quantity: "vocabulary",
            found: 49,
            expected: 48
        }
    );
    assert!(set.overlay(0).is_none());
    let error = set.install(1, Some(overlay(&world))).expect_err("refused");
    assert_eq!(error, OverlayError::SlotOutOfRange { slot: 1, slots: 1 });
    let slots = [Some(overlay(&world)), Some(overlay(&other))];
    assert!(TokenOverlaySet::from_slots(world.memory(), shape, slots).is_err());
}
