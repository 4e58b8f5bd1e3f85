use super::*;
use crate::testing::{TestBackend, bits, correctness};

fn backend() -> TestBackend {
    Arc::new(HostBackend::new())
}

#[test]
fn random_shapes_match_the_reference() {
    correctness::random_shapes_match_the_reference(&backend());
}

#[test]
fn long_batches_match_the_reference() {
    correctness::long_batches_match_the_reference(&backend());
}

#[test]
fn many_sites_match_the_reference() {
    correctness::many_sites_match_the_reference(&backend());
}

#[test]
fn base_rows_keep_their_bits() {
    correctness::base_rows_keep_their_bits(&backend());
}

#[test]
fn empty_batches_launch_nothing() {
    correctness::empty_batches_launch_nothing(&backend());
}

#[test]
fn wrong_results_are_caught() {
    correctness::wrong_results_are_caught(&backend());
}

#[test]
fn a_row_alone_equals_itself_in_a_batch() {
    bits::a_row_alone_equals_itself_in_a_batch(&backend());
}

#[test]
fn pair_equals_routed() {
    bits::pair_equals_routed(&backend());
}

#[test]
fn small_tiles_equal_large_tiles() {
    bits::small_tiles_equal_large_tiles(&backend());
}

#[test]
fn padded_rank_equals_true_rank() {
    bits::padded_rank_equals_true_rank(&backend());
}

#[test]
fn every_run_is_the_same() {
    bits::every_run_is_the_same(&backend(), 50);
}

#[test]
fn passes_do_not_change_bits() {
    bits::passes_do_not_change_bits(&backend());
}

#[test]
fn groupings_agree_with_the_rule() {
    bits::groupings_agree_with_the_rule(&backend());
}

#[test]
fn shared_x_rows_equal_copied_ones() {
    bits::shared_x_rows_equal_copied_ones(&backend());
}
