//! Device and staging memory: what is taken, refused, used again and given back.

mod common;

use common::{
    Adapter, GIB, Geometry, TestMemory, World, assert_serves, moe_model, pool, tiny_model,
};
use lora_weights::{ExpertPoolSpec, LoraWeights, PoolSpec, WeightsError};

#[test]
fn a_pool_that_leaves_less_than_it_takes_is_refused_with_both_numbers() {
    let model = tiny_model();
    let spec = PoolSpec::new(4, 8);
    let needed = lora_weights::PoolLayout::new(&model, &spec)
        .unwrap()
        .bytes()
        .total();
    let memory = TestMemory::new(2 * needed - 1);
    match LoraWeights::new(memory.clone(), model.clone(), spec) {
        Err(WeightsError::InsufficientMemory { required, free, .. }) => {
            assert_eq!((required, free), (needed, 2 * needed - 1));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(memory.totals().allocations, 0);
    LoraWeights::new(TestMemory::new(2 * needed), model, spec).unwrap();
}

#[test]
fn nothing_is_leaked_by_failed_allocations_or_the_last_handle() {
    for allocation in 1..=3 {
        let memory = TestMemory::new(GIB);
        memory.fail_allocation(allocation);
        let made = LoraWeights::new(memory.clone(), moe_model(), pool(2));
        assert!(matches!(made, Err(WeightsError::Memory(_))));
        assert_eq!(memory.totals().used, 0);
    }
    let World(memory, weights, ..) = World::new();
    let lease = weights.lease(1).unwrap();
    drop(weights);
    assert!(memory.totals().used > 0, "the lease holds the pool");
    drop(lease);
    let left = memory.totals();
    assert_eq!(
        (left.allocations, left.used, left.staging_buffers),
        (0, 0, 0)
    );
}

#[test]
fn staging_memory_is_used_again() {
    let World(memory, weights, _, fresh) = &World::new();
    weights.swap(1, &fresh.input()).unwrap();
    let made = memory.totals().stagings;
    for _ in 0..5 {
        weights.swap(1, &fresh.input()).unwrap();
    }
    assert_eq!(memory.totals().stagings, made);
    weights.trim_staging();
    assert_eq!(memory.totals().staging_buffers, 0);
}

#[test]
fn an_adapter_with_more_experts_than_units_are_free_is_refused_and_the_old_one_stays() {
    let model = moe_model();
    let small = Adapter::new("s", &Geometry::dense(&model, 4).with_experts(&[0]), 1.0);
    let large = Adapter::new(
        "l",
        &Geometry::dense(&model, 4).with_experts(&[0, 1, 2]),
        2.0,
    );
    let memory = TestMemory::new(GIB);
    let mut spec = pool(2);
    // Two layers of a router and three projections an expert: 8 units for one expert, 20 for three.
    spec.experts = Some(ExpertPoolSpec {
        max_rank: 4,
        units: 20,
    });
    let weights = LoraWeights::new(memory.clone(), model, spec).unwrap();
    weights.load(&[small.input()]).unwrap();
    assert_eq!(weights.expert_units(), (12, 20));
    assert!(matches!(
        weights.swap(1, &large.input()),
        Err(WeightsError::ExpertRegionFull {
            needed: 20,
            free: 12,
            total: 20
        })
    ));
    assert_serves(&weights, &memory, 0, &small);
    weights
        .swap(0, &large.input())
        .expect("its own units count as free");
    assert_serves(&weights, &memory, 0, &large);
    assert_eq!(weights.expert_units(), (0, 20));
    weights.unload(0).unwrap();
    assert_eq!(weights.expert_units(), (20, 20));
}

#[test]
fn units_that_come_back_in_pieces_serve_the_next_adapter_whole() {
    let model = moe_model();
    let one = Geometry::dense(&model, 4).with_experts(&[0]);
    let adapters: Vec<_> = (0..4)
        .map(|n| Adapter::new(&format!("s{n}"), &one, 1.0 + n as f32))
        .collect();
    let all = Adapter::new(
        "l",
        &Geometry::dense(&model, 2).with_experts(&[0, 1, 2]),
        9.0,
    );
    let memory = TestMemory::new(GIB);
    let mut spec = pool(5);
    spec.experts = Some(ExpertPoolSpec {
        max_rank: 4,
        units: 36,
    });
    let weights = LoraWeights::new(memory.clone(), model, spec).unwrap();
    let inputs: Vec<_> = adapters.iter().map(Adapter::input).collect();
    weights.load(&inputs).unwrap();
    // Two holes of 8 and the last 4: 20 units, nowhere together.
    weights.unload(0).unwrap();
    weights.unload(2).unwrap();
    weights.swap(4, &all.input()).unwrap();
    assert_eq!(weights.expert_units(), (0, 36));
    assert_serves(&weights, &memory, 4, &all);
    assert_serves(&weights, &memory, 1, &adapters[1]);
    assert_serves(&weights, &memory, 3, &adapters[3]);
}
