//! Test bodies that run on any backend.

use crate::expected::{
    Batch, Overridden, Rows, embeddings_are_exact, held, logits_are_right, rows,
};
use crate::world::{EMBED, HEAD, Parts, Table, World, table_of};
use lora_kernels::testing::TestBackend;
use lora_overlay::{EmbedOverlay, TokenOverlaySet};
use std::sync::Arc;

/// (vocabulary, hidden size) of the models: one of tiny odd sizes, one of tiles and chunks.
const SIZES: [(usize, usize); 2] = [(48, 33), (700, 1152)];

/// A full table, and both of them, of which some rows were trained.
fn saved(world: &World, with_head: bool) -> (Parts, Overridden) {
    let embed_rows = [0, 3, 7, world.embed.rows - 1];
    let embed = world.embed.moved(&embed_rows, 0.5);
    let head = world.head.moved(&[2, 3, 40], 1.0);
    let mut tensors = vec![embed.tensor(format!("{EMBED}.weight"))];
    let mut wanted = Overridden {
        embed: own_rows(&embed_rows, &embed),
        head: Rows::new(),
    };
    if with_head {
        tensors.push(head.tensor(format!("{HEAD}.weight")));
        wanted.head = own_rows(&[2, 3, 40], &head);
    }
    (Parts::new("", tensors), wanted)
}

fn own_rows(ids: &[usize], table: &Table) -> Rows {
    rows(ids.iter().map(|&id| (id as u32, id)), table)
}

/// Slots with, without and with different overlays, in one batch with base rows: copied rows are exact, logits right, everything else is untouched.
pub(crate) fn slots_of_a_batch_follow_their_own_overlays(backend: &TestBackend) {
    for size in SIZES {
        for tied in [false, true] {
            mixed_slots(&World::new(backend, size, tied), tied);
        }
    }
}

fn mixed_slots(world: &World, tied: bool) {
    let ids = [40, 2, 31, 3];
    let trained = Table::random(ids.len(), world.hidden(), 9);
    let by_id = rows(ids.into_iter().zip(0..), &trained);
    let tokens = Overridden {
        head: if tied { by_id.clone() } else { Rows::new() },
        embed: by_id,
    };
    let (both, of_both) = saved(world, true);
    let slots = [
        (None, Overridden::default()),
        (Some(Parts::tokens(&ids, &trained)), tokens),
        (Some(both), of_both),
        (None, Overridden::default()),
    ];
    let mut overlays = Vec::new();
    let mut wanted = Vec::new();
    for (parts, of_slot) in slots {
        let overlay = parts.map(|parts| Arc::new(world.overlay(parts)));
        if let Some(overlay) = &overlay {
            assert_eq!(held(overlay), of_slot);
        }
        overlays.push(overlay);
        wanted.push(of_slot);
    }
    let shape = world.served().shape(world.hidden()).expect("tables");
    let set = TokenOverlaySet::from_slots(world.memory(), shape, overlays).expect("installs");
    assert!(set.any_active());
    for count in [0, 1, 70, 300] {
        let batch = Batch::mixed(count, 4, world.embed.rows as i32);
        embeddings_are_exact(world, &set, &wanted, &batch);
        logits_are_right(world, &set, &wanted, &batch);
    }
}

/// A longer table of the adapter's own: rows that the served one has are compared, those past it offered, trained rows among them in their places.
pub(crate) fn rows_past_the_vocabulary_are_offered(backend: &TestBackend) {
    for size in SIZES {
        let world = World::new(backend, size, false);
        let vocab = world.embed.rows;
        let longer = world.embed.moved(&[5], 0.5).longer(3, 4);
        let trained = Table::random(2, world.hidden(), 9);
        let ids = [vocab as u32 + 1, 7];
        let mut parts = Parts::tokens(&ids, &trained);
        parts
            .tensors
            .push(longer.tensor(format!("{EMBED}.token_adapter.base_layer.weight")));
        let overlay = world.overlay(parts);
        let mut wanted = own_rows(&[5], &longer);
        wanted.insert(7, trained.row(1).to_vec());
        assert_eq!(held(&overlay).embed, wanted);
        assert_eq!(overlay.extension_counts(), (3, 0));
        assert!(overlay.head_extension_rows().expect("fits").is_none());
        let offered = overlay.extension_rows().expect("fits").expect("three rows");
        assert_eq!(offered.first_id, vocab as u32);
        let (copy, width) = (offered.rows.rows(), world.hidden());
        let mut values = vec![half::bf16::ZERO; copy * width];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        world
            .memory()
            .download(offered.rows.ptr(), bytes)
            .expect("reads back");
        let mut expected = longer.values[vocab * width..].to_vec();
        expected[width..2 * width].copy_from_slice(trained.row(0));
        assert_eq!(values, expected);
    }
}

/// Rows that differ by no more than the threshold are left to the base model and counted; a threshold of 0 loses none.
pub(crate) fn rows_under_the_threshold_are_counted(backend: &TestBackend) {
    let mut world = World::new(backend, (48, 64), false);
    let table = world.embed.moved(&[1, 2, 9], 0.5).moved(&[4, 30], 0.0625);
    let parts = || Parts::new("", [table.tensor(format!("{EMBED}.weight"))]);
    let overlay = world.overlay(parts());
    assert_eq!(held(&overlay).embed, own_rows(&[1, 2, 9], &table));
    assert_eq!(
        (overlay.difference.over, overlay.rows_under_threshold()),
        (3, 2)
    );
    world.threshold = 0.0;
    let overlay = world.overlay(parts());
    assert_eq!(held(&overlay).embed, own_rows(&[1, 2, 4, 9, 30], &table));
    assert_eq!(overlay.rows_under_threshold(), 0);
}

/// Another overlay in a slot, then none: what a batch then reads is the new one, and the served table.
pub(crate) fn a_slot_gives_its_place_to_the_next_overlay(backend: &TestBackend) {
    let world = World::new(backend, (60, 64), true);
    let first = Table::random(2, world.hidden(), 9);
    let second = Table::random(3, world.hidden(), 10);
    let build = |ids: &[u32], table: &Table| -> (Arc<EmbedOverlay>, Overridden) {
        let overlay = world.overlay(Parts::tokens(ids, table));
        let wanted = held(&overlay);
        (Arc::new(overlay), wanted)
    };
    let shape = world.served().shape(world.hidden()).expect("tables");
    let set = TokenOverlaySet::from_slots(world.memory(), shape, [None, None]).expect("tables");
    assert!(!set.any_active());
    let batch = Batch::mixed(200, 2, 60);
    let check = |wanted: [Overridden; 2]| {
        embeddings_are_exact(&world, &set, &wanted, &batch);
        logits_are_right(&world, &set, &wanted, &batch);
    };
    check(Default::default());
    let (overlay, wanted) = build(&[9, 4], &first);
    set.install(1, Some(overlay)).expect("installs");
    check([Overridden::default(), wanted]);
    let (overlay, wanted) = build(&[4, 50, 1], &second);
    set.install(1, Some(overlay)).expect("installs");
    check([Overridden::default(), wanted]);
    assert_eq!(
        table_of(&set.overlay(1).expect("there").rows, 3, 64).rows,
        3
    );
    set.remove(1).expect("removes");
    assert!(!set.any_active() && set.overlay(1).is_none());
    check(Default::default());
}
