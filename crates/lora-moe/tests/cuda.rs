//! The test bodies on a GPU, and captured graphs. Without a GPU each test says that it was skipped, and why.

use lora_kernels::Stream;
use lora_kernels::cuda::CudaBackend;
use lora_kernels::testing::{GpuTest, TestBackend};
use lora_moe::testing::{
    DeviceMoe, MoeCase, SHAPES, all_folds_agree, assert_same, router_folds_agree,
    tables_follow_their_slots,
};
use std::sync::Arc;

/// The GPU, or `None` where there is none and none is required.
fn gpu(name: &str) -> Option<Arc<CudaBackend>> {
    let required = std::env::var("LORA_REQUIRE_CUDA").is_ok_and(|value| value == "1");
    GpuTest { name, required }.open()
}

#[test]
fn folds_agree_to_the_bit() {
    if let Some(backend) = gpu("folds_agree_to_the_bit") {
        let backend: TestBackend = backend;
        all_folds_agree(&backend);
    }
}

#[test]
fn router_folds_agree_to_the_bit() {
    if let Some(backend) = gpu("router_folds_agree_to_the_bit") {
        let backend: TestBackend = backend;
        router_folds_agree(&backend);
    }
}

#[test]
fn a_slot_and_its_tables_come_and_go_together() {
    if let Some(backend) = gpu("a_slot_and_its_tables_come_and_go_together") {
        let backend: TestBackend = backend;
        tables_follow_their_slots(&backend);
    }
}

/// One captured graph, entries and grouping included, follows whatever the router chooses and whichever adapters the tokens then have.
#[test]
fn a_captured_graph_follows_the_router() {
    let Some(backend) = gpu("a_captured_graph_follows_the_router") else {
        return;
    };
    let shared: TestBackend = backend.clone();
    for shape in SHAPES {
        let case = MoeCase::random(shape);
        let mut device = DeviceMoe::new(&shared, &case);
        let graph = backend
            .capture(|stream| {
                device.enqueue_unsorted(&case, stream);
                Ok(())
            })
            .expect("capture");
        for by in [0, 1, 5] {
            let rerouted = case.rerouted(by);
            device.reset(&rerouted);
            backend.replay(&graph).expect("replay");
            let replayed = device.outs();
            let eager = DeviceMoe::new(&shared, &rerouted).unsorted(&rerouted);
            assert_same(&rerouted, "replayed", &eager, &replayed);
            rerouted.assert_near_reference(&replayed);
        }
    }
    shared.synchronize(Stream::OWN).expect("synchronize");
}
