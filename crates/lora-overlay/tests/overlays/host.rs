//! The test bodies on the host backend.

use crate::bodies;
use lora_kernels::host::HostBackend;
use lora_kernels::testing::TestBackend;
use std::sync::Arc;

fn backend() -> TestBackend {
    Arc::new(HostBackend::new())
}

#[test]
fn slots_of_a_batch_follow_their_own_overlays() {
    bodies::slots_of_a_batch_follow_their_own_overlays(&backend());
}

#[test]
fn rows_past_the_vocabulary_are_offered() {
    bodies::rows_past_the_vocabulary_are_offered(&backend());
}

#[test]
fn rows_under_the_threshold_are_counted() {
    bodies::rows_under_the_threshold_are_counted(&backend());
}

#[test]
fn a_slot_gives_its_place_to_the_next_overlay() {
    bodies::a_slot_gives_its_place_to_the_next_overlay(&backend());
}
