//! The test bodies of every backend on a GPU, and what only a GPU has: captured graphs. Without a GPU each test says that it was skipped, and why.

use half::bf16;
use lora_kernels::cuda::{CudaBackend, CudaError};
use lora_kernels::testing::{
    Batch, BatchShape, DeviceBatch, SiteShape, TestBackend, Via, bits, correctness,
};
use lora_kernels::{LaunchOptions, Stream};
use std::sync::Arc;

/// The GPU, or `None` where there is none; any other failure is a failure.
fn gpu(test: &str) -> Option<Arc<CudaBackend>> {
    match CudaBackend::new(0) {
        Ok(backend) => Some(Arc::new(backend)),
        Err(error @ (CudaError::NoDriver | CudaError::NoDevice { .. })) => {
            eprintln!("{test}: skipped: {error}");
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

macro_rules! on_gpu {
    ($($name:ident => $body:expr;)*) => {
        $(
            #[test]
            fn $name() {
                if let Some(backend) = gpu(stringify!($name)) {
                    let backend: TestBackend = backend;
                    let body: fn(&TestBackend) = $body;
                    body(&backend);
                }
            }
        )*
    };
}

on_gpu! {
    random_shapes_match_the_reference => correctness::random_shapes_match_the_reference;
    long_batches_match_the_reference => correctness::long_batches_match_the_reference;
    many_sites_match_the_reference => correctness::many_sites_match_the_reference;
    base_rows_keep_their_bits => correctness::base_rows_keep_their_bits;
    empty_batches_launch_nothing => correctness::empty_batches_launch_nothing;
    wrong_results_are_caught => correctness::wrong_results_are_caught;
    a_row_alone_equals_itself_in_a_batch => bits::a_row_alone_equals_itself_in_a_batch;
    pair_equals_routed => bits::pair_equals_routed;
    small_tiles_equal_large_tiles => bits::small_tiles_equal_large_tiles;
    padded_rank_equals_true_rank => bits::padded_rank_equals_true_rank;
    a_thousand_runs_are_the_same => |backend| bits::every_run_is_the_same(backend, 1000);
    passes_do_not_change_bits => bits::passes_do_not_change_bits;
    groupings_agree_with_the_rule => bits::groupings_agree_with_the_rule;
    shared_x_rows_equal_copied_ones => bits::shared_x_rows_equal_copied_ones;
}
