use super::adapters::{Adapter, Geometry, moe_model};
use super::memory::TestMemory;
use lora_weights::{ExpertPoolSpec, LoadPolicy, LoraWeights, PoolSpec};
use std::sync::Arc;

pub const GIB: u64 = 1 << 30;

/// A pool of rank 8 with 80 units of expert rank 4 and rotation permitted.
pub fn pool(slots: u32) -> PoolSpec {
    PoolSpec {
        experts: Some(ExpertPoolSpec {
            max_rank: 4,
            units: 80,
        }),
        policy: LoadPolicy {
            allow_rotation: true,
            ..LoadPolicy::default()
        },
        ..PoolSpec::new(slots, 8)
    }
}

/// Memory, a pool of four slots in it, the three MoE adapters that are resident, and one more.
pub struct World(
    pub Arc<TestMemory>,
    pub LoraWeights,
    pub Vec<Adapter>,
    pub Adapter,
);

impl World {
    pub fn new() -> Self {
        let model = moe_model();
        let geometry = Geometry::dense(&model, 4).with_experts(&[0, 2]);
        let resident: Vec<_> = [("a", 1.0), ("b", 2.0), ("c", 3.0)]
            .into_iter()
            .map(|(name, mark)| Adapter::new(name, &geometry, mark))
            .collect();
        let fresh = Adapter::new("d", &Geometry::dense(&model, 3).with_experts(&[1]), 4.0);
        let memory = TestMemory::new(GIB);
        let weights = LoraWeights::new(memory.clone(), model, pool(4)).unwrap();
        let inputs: Vec<_> = resident.iter().map(Adapter::input).collect();
        weights.load(&inputs).unwrap();
        Self(memory, weights, resident, fresh)
    }
}
