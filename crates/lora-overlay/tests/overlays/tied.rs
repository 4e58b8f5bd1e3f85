//! What the LM head takes its rows from.

use crate::expected::{Overridden, Rows, held, rows};
use crate::world::{EMBED, HEAD, Parts, Table, World};
use lora_kernels::host::HostBackend;
use lora_kernels::testing::TestBackend;
use lora_overlay::{HeadOverlay, ServedTable, ServedTables};
use std::sync::Arc;

fn world(tied: bool) -> World {
    let backend: TestBackend = Arc::new(HostBackend::new());
    World::new(&backend, (48, 16), tied)
}

fn own(ids: &[usize], table: &Table) -> Rows {
    rows(ids.iter().map(|&id| (id as u32, id)), table)
}

/// An adapter with a full embedding of which rows 1 and 4 were trained.
fn full_embedding(world: &World, fields: &str) -> (Parts, Rows) {
    let table = world.embed.moved(&[1, 4], 0.5);
    let parts = Parts::new(fields, [table.tensor(format!("{EMBED}.weight"))]);
    (parts, own(&[1, 4], &table))
}

#[test]
fn trained_rows_of_the_embedding_serve_a_tied_head_and_no_other() {
    let trained = Table::random(2, 16, 9);
    let by_id = rows([(30, 0), (2, 1)], &trained);
    for tied in [true, false] {
        let overlay = world(tied).overlay(Parts::tokens(&[30, 2], &trained));
        let head = if tied { by_id.clone() } else { Rows::new() };
        let wanted = Overridden {
            embed: by_id.clone(),
            head,
        };
        assert_eq!(held(&overlay), wanted);
        assert_eq!(matches!(overlay.lmhead, HeadOverlay::Embed), tied);
    }
}

/// A re-saved or resized table is written over the parameter that a tied pair shares; `modules_to_save` puts a copy beside it.
#[test]
fn a_saved_embedding_changes_a_tied_head_unless_peft_put_it_beside_the_original() {
    let saved = r#""modules_to_save": ["embed_tokens"]"#;
    let kept_tied = r#""modules_to_save": ["embed_tokens"], "ensure_weight_tying": true"#;
    for (fields, follows) in [("", true), (saved, false), (kept_tied, true)] {
        let world = world(true);
        let (parts, embed) = full_embedding(&world, fields);
        let head = if follows { embed.clone() } else { Rows::new() };
        assert_eq!(
            held(&world.overlay(parts)),
            Overridden { embed, head },
            "{fields}"
        );
    }
}

#[test]
fn head_tables_alone_overlay_the_head_alone() {
    for tied in [true, false] {
        let world = world(tied);
        let table = world.head.moved(&[3, 47], 0.5);
        let parts = Parts::new("", [table.tensor(format!("{HEAD}.weight"))]);
        let overlay = world.overlay(parts);
        assert_eq!(overlay.n_override, 0);
        let head = own(&[3, 47], &table);
        let embed = Rows::new();
        assert_eq!(held(&overlay), Overridden { embed, head });
    }
}

#[test]
fn a_tied_head_takes_its_own_table_and_the_embeddings_trained_rows() {
    let world = world(true);
    let trained = Table::random(1, 16, 9);
    let table = world.head.moved(&[3], 0.5);
    let mut parts = Parts::tokens(&[7], &trained);
    parts.tensors.push(table.tensor(format!("{HEAD}.weight")));
    let mut head = own(&[3], &table);
    head.extend(rows([(7, 0)], &trained));
    let embed = rows([(7, 0)], &trained);
    assert_eq!(held(&world.overlay(parts)), Overridden { embed, head });
}

#[test]
fn a_head_with_ids_of_its_own_takes_its_own_rows() {
    let (embed_rows, head_rows) = (Table::random(2, 16, 9), Table::random(1, 16, 10));
    for tied in [true, false] {
        let fields = r#""trainable_token_indices": {"embed_tokens": [5, 3], "lm_head": [40]}"#;
        let parts = Parts::new(
            fields,
            [(EMBED, &embed_rows), (HEAD, &head_rows)].map(|(table, rows)| {
                rows.tensor(format!("{table}.token_adapter.trainable_tokens_delta"))
            }),
        );
        let wanted = Overridden {
            embed: rows([(5, 0), (3, 1)], &embed_rows),
            head: rows([(40, 0)], &head_rows),
        };
        assert_eq!(held(&world(tied).overlay(parts)), wanted);
    }
}

#[test]
fn rows_of_a_tied_pair_that_the_config_names_twice_are_saved_once() {
    let trained = Table::random(2, 16, 9);
    let fields = r#""trainable_token_indices": {"embed_tokens": [5, 3], "lm_head": [5, 3]}"#;
    let mut parts = Parts::tokens(&[5, 3], &trained);
    parts.fields = fields.to_owned();
    let overlay = world(true).overlay(parts);
    assert!(matches!(overlay.lmhead, HeadOverlay::Embed));
}

/// Of a table that cannot be read, every row differs.
#[test]
fn every_row_of_a_table_replaces_that_of_a_quantised_head() {
    let world = world(false);
    let embed = world.embed.clone();
    let head = Table::random(50, 16, 8);
    let parts = Parts::new(
        "",
        [
            embed.tensor(format!("{EMBED}.weight")),
            head.tensor(format!("{HEAD}.weight")),
        ],
    );
    let served = world.served();
    let embed = served.table(lora_config::TokenTable::Embed).clone();
    let served = ServedTables::untied(embed, ServedTable::opaque(48));
    let overlay = world
        .build_against(parts, &served)
        .expect("builds")
        .expect("overrides");
    let all: Vec<usize> = (0..48).collect();
    let wanted = Overridden {
        embed: Rows::new(),
        head: own(&all, &head),
    };
    assert_eq!(held(&overlay), wanted);
    assert_eq!(overlay.extension_counts(), (0, 2));
}

#[test]
fn a_table_equal_to_the_served_one_overrides_nothing() {
    let world = world(false);
    let parts = Parts::new("", [world.embed.tensor(format!("{EMBED}.weight"))]);
    assert!(world.build(parts).expect("builds").is_none());
}
