//! The test bodies on a GPU, and captured graphs. Without a GPU each test says that it was skipped, and why.

use crate::bodies;
use crate::expected::{Overridden, held};
use crate::world::{Parts, Table, World, bits};
use lora_kernels::cuda::CudaBackend;
use lora_kernels::overlay::{HeadRows, LogitsMut, OverlayTokens, SlotOfRow};
use lora_kernels::testing::{GpuTest, TestBackend};
use lora_kernels::{DeviceBuffer, Stream};
use lora_overlay::TokenOverlaySet;
use std::sync::Arc;

/// The GPU, or `None` where there is none and none is required.
fn gpu(name: &str) -> Option<Arc<CudaBackend>> {
    let required = std::env::var("LORA_REQUIRE_CUDA").is_ok_and(|value| value == "1");
    GpuTest { name, required }.open()
}

fn on_gpu(name: &str, body: fn(&TestBackend)) {
    if let Some(backend) = gpu(name) {
        let backend: TestBackend = backend;
        body(&backend);
    }
}

#[test]
fn slots_of_a_batch_follow_their_own_overlays_on_a_gpu() {
    on_gpu(
        "slots_of_a_batch_follow_their_own_overlays_on_a_gpu",
        bodies::slots_of_a_batch_follow_their_own_overlays,
    );
}

#[test]
fn rows_past_the_vocabulary_are_offered_on_a_gpu() {
    on_gpu(
        "rows_past_the_vocabulary_are_offered_on_a_gpu",
        bodies::rows_past_the_vocabulary_are_offered,
    );
}

#[test]
fn rows_under_the_threshold_are_counted_on_a_gpu() {
    on_gpu(
        "rows_under_the_threshold_are_counted_on_a_gpu",
        bodies::rows_under_the_threshold_are_counted,
    );
}

#[test]
fn a_slot_gives_its_place_to_the_next_overlay_on_a_gpu() {
    on_gpu(
        "a_slot_gives_its_place_to_the_next_overlay_on_a_gpu",
        bodies::a_slot_gives_its_place_to_the_next_overlay,
    );
}

/// One captured graph applies whatever overlays its slots have when it is replayed.
#[test]
fn a_captured_graph_follows_overlays_that_come_later() {
    let Some(cuda) = gpu("a_captured_graph_follows_overlays_that_come_later") else {
        return;
    };
    let backend: TestBackend = cuda.clone();
    let world = World::new(&backend, (96, 256), true);
    let shape = world.served().shape(256).expect("tables");
    let set = TokenOverlaySet::from_slots(world.memory(), shape, [None, None]).expect("tables");
    let base = Table::random(2, 256, 3);
    let upload =
        |values: &[i32]| DeviceBuffer::from_slice(backend.clone(), values).expect("memory");
    let (ids, slots) = (upload(&[7, 7]), upload(&[-1, 1]));
    let mut out = DeviceBuffer::from_slice(backend.clone(), &base.values).expect("memory");
    let hidden = DeviceBuffer::from_slice(backend.clone(), &base.values).expect("memory");
    let mut logits = DeviceBuffer::zeroed(world.memory(), 2 * 96 * 4).expect("memory");
    let graph = cuda
        .capture(|stream| {
            let on = (&world.kernels, stream);
            let tokens = OverlayTokens {
                ids: ids.token_ids(2)?,
                slots: SlotOfRow::Each(slots.row_slots(2)?),
            };
            let applied = set.apply_embeddings(on, tokens, out.mat_mut(2, 256, 256)?);
            let _ = applied.expect("enqueues");
            let logits = LogitsMut::F32(logits.f32_mat_mut(2, 96, 96)?);
            let x = hidden.mat(2, 256, 256)?;
            let _ = set
                .apply_logits(on, x, HeadRows::All(1), logits)
                .expect("enqueues");
            Ok(())
        })
        .expect("captures");
    let replayed = |out: &mut DeviceBuffer, logits: &mut DeviceBuffer| {
        out.upload(0, &base.values).expect("writes");
        logits.upload(0, &[0.0f32; 192]).expect("writes");
        cuda.replay(&graph).expect("replays");
        backend.synchronize(Stream::OWN).expect("done");
        let rows: Vec<half::bf16> = out.download(0, 512).expect("reads back");
        let logits: Vec<f32> = logits.download(0, 192).expect("reads back");
        let touched = (0..96_u32).filter(|id| logits[96 + *id as usize] != 0.0);
        (rows, touched.collect::<Vec<_>>())
    };
    for trained in [
        vec![],
        vec![7, 3],
        (0..60).rev().collect::<Vec<u32>>(),
        vec![],
    ] {
        let mut wanted = Overridden::default();
        let table = Table::random(trained.len(), 256, 11);
        let overlay = (!trained.is_empty()).then(|| {
            let overlay = world.overlay(Parts::tokens(&trained, &table));
            wanted = held(&overlay);
            Arc::new(overlay)
        });
        set.install(1, overlay).expect("installs");
        let (rows, touched) = replayed(&mut out, &mut logits);
        let own = wanted.embed.get(&7).map_or(base.row(1), Vec::as_slice);
        assert_eq!(bits(&rows[..256]), bits(base.row(0)), "the base row");
        assert_eq!(bits(&rows[256..]), bits(own), "{trained:?}");
        assert_eq!(touched, wanted.head.keys().copied().collect::<Vec<_>>());
    }
}
