//! Named shapes: a layer's projections, and the batches that go through them.

use crate::{BytesMoved, Problem, bytes_moved};
use lora_weights::padded_rank;
use std::fmt;

/// Projections of a layer that read the same x and go in one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSite {
    /// Name.
    pub name: &'static str,
    /// Width of x.
    pub k_in: u32,
    /// Width of each out.
    pub n_outs: &'static [u32],
}

const fn site(name: &'static str, k_in: u32, n_outs: &'static [u32]) -> LayerSite {
    LayerSite { name, k_in, n_outs }
}

/// A layer of a Llama of 8 billion parameters.
pub const LLAMA_8B_LAYER: [LayerSite; 4] = [
    site("qkv", 4096, &[4096, 1024, 1024]),
    site("o", 4096, &[4096]),
    site("gate_up", 4096, &[14336, 14336]),
    site("down", 14336, &[4096]),
];

/// The same at a size that takes no time: whether everything runs, not how fast.
pub const TINY_LAYER: [LayerSite; 4] = [
    site("qkv", 256, &[256, 64, 64]),
    site("o", 256, &[256]),
    site("gate_up", 256, &[512, 512]),
    site("down", 512, &[256]),
];

/// What a shape should take on an H200, microseconds a layer of [`LLAMA_8B_LAYER`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeGoal {
    /// At most.
    pub reach: f64,
    /// What to aim for.
    pub aim: f64,
}

/// A batch: rows shared evenly by adapters of one rank, row i having adapter `i % adapters`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaShape {
    /// True rank of every adapter.
    pub rank: u32,
    /// Largest rank that the pool has room for, before padding.
    pub pool_rank: u32,
    /// Rows.
    pub rows: u32,
    /// Adapters, as many as the tables have slots.
    pub adapters: u32,
    /// What to reach, where that is known.
    pub goal: Option<TimeGoal>,
}

impl DeltaShape {
    /// `rows` rows of `adapters` adapters of rank `rank`, in a pool of that rank.
    pub const fn new(rank: u32, rows: u32, adapters: u32) -> Self {
        Self {
            rank,
            pool_rank: rank,
            rows,
            adapters,
            goal: None,
        }
    }

    const fn goal(self, reach: f64, aim: f64) -> Self {
        let goal = Some(TimeGoal { reach, aim });
        Self { goal, ..self }
    }

    /// Its cost at a site of a layer.
    pub fn problem(&self, site: &LayerSite) -> Problem {
        let widths = (site.k_in, site.n_outs);
        let mut problem = Problem::uniform(self.rows, self.adapters, self.rank, widths);
        for site in &mut problem.sites {
            site.max_rank = padded_rank(self.pool_rank);
        }
        problem
    }

    /// Bytes of all sites of `layer` together.
    pub fn bytes(&self, layer: &[LayerSite]) -> BytesMoved {
        layer
            .iter()
            .map(|site| bytes_moved(&self.problem(site)))
            .sum()
    }
}

impl fmt::Display for DeltaShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        if self.pool_rank != self.rank {
            write!(f, " of {}", self.pool_rank)?;
        }
        write!(f, ", {} rows, {} adapters", self.rows, self.adapters)
    }
}

/// What an H200 is measured by.
pub const H200_SHAPES: [DeltaShape; 16] = [
    DeltaShape::new(16, 1, 1).goal(15.0, 10.0),
    DeltaShape::new(16, 8, 8).goal(20.0, 14.0),
    DeltaShape::new(16, 32, 8).goal(21.0, 16.0),
    DeltaShape::new(16, 32, 32).goal(38.0, 30.0),
    DeltaShape::new(16, 64, 64).goal(64.0, 53.0),
    DeltaShape::new(16, 256, 64).goal(70.0, 62.0),
    DeltaShape::new(64, 1, 1).goal(16.0, 11.0),
    DeltaShape::new(64, 8, 8).goal(34.0, 28.0),
    DeltaShape::new(64, 32, 32).goal(98.0, 90.0),
    DeltaShape::new(64, 64, 64).goal(185.0, 175.0),
    DeltaShape::new(64, 256, 64).goal(200.0, 185.0),
    DeltaShape::new(16, 4096, 1).goal(290.0, 240.0),
    DeltaShape::new(16, 4096, 4).goal(290.0, 240.0),
    DeltaShape::new(64, 4096, 1).goal(340.0, 260.0),
    DeltaShape::new(64, 4096, 4).goal(340.0, 260.0),
    DeltaShape {
        pool_rank: 64,
        ..DeltaShape::new(16, 64, 64)
    },
];

/// What a host is measured by: a lone row, a few rows, many rows, with one adapter and with several.
pub const HOST_SHAPES: [DeltaShape; 10] = [
    DeltaShape::new(16, 1, 1),
    DeltaShape::new(16, 8, 1),
    DeltaShape::new(16, 8, 8),
    DeltaShape::new(16, 64, 1),
    DeltaShape::new(16, 64, 8),
    DeltaShape::new(64, 1, 1),
    DeltaShape::new(64, 8, 1),
    DeltaShape::new(64, 8, 8),
    DeltaShape::new(64, 64, 1),
    DeltaShape::new(64, 64, 8),
];

/// For [`TINY_LAYER`]: decode, small and large tiles, a pool of a larger rank.
pub const TINY_SHAPES: [DeltaShape; 3] = [
    DeltaShape::new(16, 1, 1),
    DeltaShape::new(8, 300, 2),
    DeltaShape {
        pool_rank: 24,
        ..DeltaShape::new(4, 6, 3)
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernels move stays near what nothing can go below, even where every partial sum goes to memory and back.
    #[test]
    fn every_shape_moves_at_most_a_tenth_more_than_its_floor() {
        for shape in H200_SHAPES {
            let bytes = shape.bytes(&LLAMA_8B_LAYER);
            let ratio = bytes.total() as f64 / bytes.floor() as f64;
            assert!(ratio <= 1.1, "{shape}: {ratio:.3}");
        }
    }

    #[test]
    fn a_launch_of_decode_moves_at_most_a_tenth_more_than_its_floor() {
        for shape in H200_SHAPES.into_iter().filter(|shape| shape.rows <= 256) {
            for site in &LLAMA_8B_LAYER {
                let bytes = bytes_moved(&shape.problem(site));
                let ratio = bytes.total() as f64 / bytes.floor() as f64;
                assert!(ratio <= 1.1, "{shape} {}: {ratio:.3}", site.name);
            }
        }
    }

    #[test]
    fn the_pool_rank_costs_no_bytes() {
        let [.., in_pool] = H200_SHAPES;
        let alone = DeltaShape::new(16, 64, 64);
        assert_eq!(in_pool.bytes(&LLAMA_8B_LAYER), alone.bytes(&LLAMA_8B_LAYER));
        assert_eq!(in_pool.to_string(), "rank 16 of 64, 64 rows, 64 adapters");
    }
}
