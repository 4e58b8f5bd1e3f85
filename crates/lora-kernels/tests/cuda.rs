//! The test bodies of every backend on a GPU, and what only a GPU has: captured graphs. Without a GPU each test says that it was skipped, and why.

use half::bf16;
use lora_kernels::cuda::{CudaBackend, CudaError};
use lora_kernels::testing::{
    Batch, BatchShape, DeviceBatch, GpuTest, SiteShape, TestBackend, Via, bits, correctness,
    experts, overlay,
};
use lora_kernels::{Applied, LaunchOptions, Stream};
use std::ops::Range;
use std::sync::Arc;

/// The GPU, or `None` where there is none and none is required.
fn gpu(name: &str) -> Option<Arc<CudaBackend>> {
    let required = std::env::var("LORA_REQUIRE_CUDA").is_ok_and(|value| value == "1");
    GpuTest { name, required }.open()
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

/// Rows that a block groups, that a cluster does, and that its blocks take several rounds for.
const OF_A_BLOCK: Range<usize> = 0..1025;
const OF_A_CLUSTER: Range<usize> = 1025..10_000;
const OF_SEVERAL_ROUNDS: Range<usize> = 10_000..usize::MAX;

// Random shapes and groupings are cut up for sanitizers, which slow tests down a hundredfold but can take several at a time.
on_gpu! {
    random_shapes_match_the_reference_1 => |backend| correctness::random_shapes_match_the_reference(backend, 0..11);
    random_shapes_match_the_reference_2 => |backend| correctness::random_shapes_match_the_reference(backend, 11..22);
    random_shapes_match_the_reference_3 => |backend| correctness::random_shapes_match_the_reference(backend, 22..33);
    random_shapes_match_the_reference_4 => |backend| correctness::random_shapes_match_the_reference(backend, 33..correctness::RANDOM_SHAPES);
    long_batches_match_the_reference => correctness::long_batches_match_the_reference;
    many_sites_match_the_reference => correctness::many_sites_match_the_reference;
    base_rows_keep_their_bits => correctness::base_rows_keep_their_bits;
    empty_batches_launch_nothing => correctness::empty_batches_launch_nothing;
    wrong_results_are_caught => correctness::wrong_results_are_caught;
    a_row_alone_equals_itself_in_a_batch => bits::a_row_alone_equals_itself_in_a_batch;
    pair_equals_routed => bits::pair_equals_routed;
    small_tiles_equal_large_tiles => bits::small_tiles_equal_large_tiles;
    spread_rows_equal_others => bits::spread_rows_equal_others;
    few_spread_rows_do_not_depend_on_passes => bits::few_spread_rows_do_not_depend_on_passes;
    many_spread_rows_equal_others => bits::many_spread_rows_equal_others;
    tiles_of_several_blocks_equal_others => bits::tiles_of_several_blocks_equal_others;
    padded_rank_equals_true_rank => bits::padded_rank_equals_true_rank;
    a_thousand_runs_are_the_same => |backend| bits::every_run_is_the_same(backend, 1000);
    passes_do_not_change_bits => bits::passes_do_not_change_bits;
    groupings_of_a_block_agree_with_the_rule => |backend| bits::groupings_agree_with_the_rule(backend, OF_A_BLOCK);
    groupings_of_a_cluster_agree_with_the_rule => |backend| bits::groupings_agree_with_the_rule(backend, OF_A_CLUSTER);
    groupings_of_many_rows_agree_with_the_rule => |backend| bits::groupings_agree_with_the_rule(backend, OF_SEVERAL_ROUNDS);
    shared_x_rows_equal_copied_ones => bits::shared_x_rows_equal_copied_ones;
    experts_are_grouped_in_a_block_by_the_rule => |backend| experts::experts_are_grouped_by_the_rule(backend, OF_A_BLOCK);
    experts_are_grouped_in_a_cluster_by_the_rule => |backend| experts::experts_are_grouped_by_the_rule(backend, OF_A_CLUSTER);
    experts_of_many_rows_are_grouped_by_the_rule => |backend| experts::experts_are_grouped_by_the_rule(backend, OF_SEVERAL_ROUNDS);
    row_distances_are_exact => overlay::row_distances_are_exact;
    gathered_rows_are_copies => overlay::gathered_rows_are_copies;
    replaced_rows_are_copies => overlay::replaced_rows_are_copies;
    logits_match_the_reference => overlay::logits_match_the_reference;
    logits_do_not_depend_on_the_batch => overlay::logits_do_not_depend_on_the_batch;
    one_slot_for_all_rows_equals_rows_of_it => overlay::one_slot_for_all_rows_equals_rows_of_it;
    ids_past_the_vocabulary_are_skipped => overlay::ids_past_the_vocabulary_are_skipped;
    wrong_overlays_are_caught => overlay::wrong_overlays_are_caught;
}

/// One captured graph of grouping, embedding and head follows tokens, slots and overlays that change between replays.
#[test]
fn a_captured_graph_follows_swapped_overlays() {
    let Some(backend) = gpu("a_captured_graph_follows_swapped_overlays") else {
        return;
    };
    let shared: TestBackend = backend.clone();
    for rows in [3, 70] {
        overlay::replays_follow_swaps(&shared, rows, |enqueue| {
            let graph = backend.capture(|stream| {
                enqueue(stream);
                Ok(())
            });
            let graph = graph.expect("capture");
            let backend = backend.clone();
            Box::new(move || backend.replay(&graph).expect("replay"))
        });
    }
}

fn bits_of(outs: &[Vec<bf16>]) -> Vec<Vec<u16>> {
    outs.iter()
        .map(|out| out.iter().map(|v| v.to_bits()).collect())
        .collect()
}

/// What a batch gives when launched eagerly with these row slots.
fn eager(backend: &TestBackend, batch: &Batch) -> Vec<Vec<u16>> {
    bits_of(&batch.run(backend, Via::Routed, LaunchOptions::default()))
}

/// One captured graph, grouping included, serves whatever mix of adapters the slot buffer then names.
#[test]
fn a_captured_graph_serves_other_slots_with_the_bits_of_eager_launches() {
    let Some(backend) = gpu("a_captured_graph_serves_other_slots") else {
        return;
    };
    let shared: TestBackend = backend.clone();
    for rows in [1, 40, 700] {
        let shape = BatchShape {
            slots: 5,
            ranks: vec![16, 4, 24],
            sites: vec![
                SiteShape {
                    n_out: 700,
                    gap: 12,
                    max_rank: 32,
                },
                SiteShape {
                    n_out: 64,
                    gap: 0,
                    max_rank: 32,
                },
            ],
            ..BatchShape::single(7, 16, (2304, 64))
        };
        let slots = |step: i32| {
            (0..rows)
                .map(|row| (row * step) % 6 - 1)
                .collect::<Vec<_>>()
        };
        let batch = Batch::random(&shape, &slots(1));
        let mut device = DeviceBatch::new(&shared, &batch, Via::Routed, LaunchOptions::default());
        device.group(Stream::OWN);
        let launched = Applied::Launched { launches: 1 };
        assert_eq!(device.launch(Stream::OWN), launched);
        shared.synchronize(Stream::OWN).expect("synchronize"); // uploads have a stream of their own
        device.reset();
        let graph = backend
            .capture(|stream| {
                device.group(stream);
                assert_eq!(device.launch(stream), launched);
                Ok(())
            })
            .expect("capture");
        for step in [1, 5, 2] {
            let mut expected = batch.clone();
            expected.row_slots = slots(step);
            device.reset();
            device.set_row_slots(&expected.row_slots);
            backend.replay(&graph).expect("replay");
            shared.synchronize(Stream::OWN).expect("synchronize");
            assert_eq!(
                bits_of(&device.outs()),
                eager(&shared, &expected),
                "{rows} rows, step {step}"
            );
        }
    }
}

/// Launches from many threads, each on memory of its own, do not disturb one another.
#[test]
fn threads_share_a_backend() {
    let Some(backend) = gpu("threads_share_a_backend") else {
        return;
    };
    let shared: TestBackend = backend;
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let shared = &shared;
            scope.spawn(move || {
                let batch = Batch::random(&BatchShape::single(seed, 16, (1024, 256)), &[0; 30]);
                for _ in 0..20 {
                    batch.assert_correct(shared, Via::Routed);
                }
            });
        }
    });
}

#[test]
fn a_device_that_does_not_exist_is_refused_by_number() {
    let error = CudaBackend::new(1000)
        .err()
        .expect("there are not that many devices");
    match error {
        CudaError::NoDriver => assert!(error.to_string().contains("host backend")),
        _ => assert!(error.to_string().contains("device 1000"), "{error}"),
    }
}
