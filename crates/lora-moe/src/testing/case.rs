//! A routed batch with everything in it.

use half::bf16;
use lora_kernels::testing::{Fill, Rng, TestAdapter, naive_delta};
use lora_weights::ExpertProj;
use std::collections::BTreeMap;

/// gate, up and down, row by row in unsorted order.
pub type Outs = [Vec<bf16>; 3];

/// Which experts a router chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Distinct ones for each token, at random; some have no rows.
    Spread,
    /// One for all.
    OneExpert,
    /// Some are negative or past the table.
    PastTheTable,
}

/// Sizes of a [`MoeCase`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeShape {
    /// Tokens.
    pub tokens: usize,
    /// Experts a token.
    pub top_k: usize,
    /// Experts of the block.
    pub num_experts: usize,
    /// What the router chose.
    pub choice: Choice,
}

/// Tokens of several adapters, routed to experts, with what the block's projections read and hold before.
#[derive(Debug, Clone)]
pub struct MoeCase {
    shape: MoeShape,
    /// `[tokens]`.
    pub(super) token_slots: Vec<i32>,
    /// `[tokens x top_k]`.
    pub(super) experts: Vec<i32>,
    /// `[tokens, HIDDEN]`.
    pub(super) x: Vec<bf16>,
    /// `[rows, WIDTH]`: x of down.
    pub(super) activations: Vec<bf16>,
    pub(super) base: Outs,
    /// By slot, expert and projection.
    pub(super) adapters: BTreeMap<(u32, usize, ExpertProj), TestAdapter>,
}

impl MoeCase {
    /// Width of gate's and up's x.
    pub const HIDDEN: u32 = 72;
    /// Width of down's x.
    pub const WIDTH: u32 = 40;
    /// Slots of the pool; slot 2 adapts no expert, slot 4 is a placeholder.
    pub const SLOTS: u32 = 5;
    /// Slots with experts.
    pub const RESIDENT_SLOTS: [u32; 3] = [0, 1, 3];
    /// Padded rank.
    pub const MAX_RANK: u32 = 16;

    /// A batch of `shape`: slot 0 adapts every third expert, slot 1 every expert but up, slot 3 up of odd experts alone; some tokens follow no
    /// adapter, one without experts, or a slot past the pool.
    pub fn random(shape: MoeShape) -> Self {
        let mut rng = Rng::new(shape.num_experts as u64 * 31 + shape.tokens as u64);
        let rows = shape.tokens * shape.top_k;
        let mut values =
            |rows: usize, width: u32| rng.values(rows * width as usize, Fill::Signed, 1.0);
        let x = values(shape.tokens, Self::HIDDEN);
        let activations = values(rows, Self::WIDTH);
        let base = [Self::WIDTH, Self::WIDTH, Self::HIDDEN].map(|width| values(rows, width));
        let token_slots = (0..shape.tokens)
            .map(|token| match token {
                0 => 1,
                _ => rng.below(0..Self::SLOTS as usize + 2) as i32 - 1,
            })
            .collect();
        let experts = (0..shape.tokens)
            .flat_map(|token| choose(&mut rng, shape, token))
            .collect();
        Self {
            shape,
            token_slots,
            experts,
            x,
            activations,
            base,
            adapters: random_adapters(&mut rng, shape.num_experts),
        }
    }

    /// Its sizes.
    pub fn shape(&self) -> MoeShape {
        self.shape
    }

    /// Rows: tokens times top-k.
    pub fn rows(&self) -> usize {
        self.experts.len()
    }

    /// `(k_in, n_out)` of a projection.
    pub fn dims(proj: ExpertProj) -> (u32, u32) {
        match proj {
            ExpertProj::Gate | ExpertProj::Up => (Self::HIDDEN, Self::WIDTH),
            ExpertProj::Down => (Self::WIDTH, Self::HIDDEN),
        }
    }

    /// The same batch of its first tokens alone.
    pub fn first_tokens(&self, tokens: usize) -> Self {
        let rows = tokens * self.shape.top_k;
        let mut part = self.clone();
        part.shape.tokens = tokens;
        part.token_slots.truncate(tokens);
        part.experts.truncate(rows);
        part.x.truncate(tokens * Self::HIDDEN as usize);
        part.activations.truncate(rows * Self::WIDTH as usize);
        for (base, proj) in part.base.iter_mut().zip(ExpertProj::ALL) {
            base.truncate(rows * Self::dims(proj).1 as usize);
        }
        part
    }

    /// The same batch with a placeholder in `slot`.
    pub fn without_slot(&self, slot: u32) -> Self {
        let mut case = self.clone();
        case.adapters.retain(|(other, ..), _| *other != slot);
        case
    }

    /// The same batch routed to other experts.
    pub fn rerouted(&self, by: usize) -> Self {
        let mut case = self.clone();
        case.experts.rotate_left(by % self.rows().max(1));
        case.token_slots.rotate_left(by % self.shape.tokens.max(1));
        case
    }

    /// The slot of each row that takes part in host-driven folds, or `None`.
    pub(super) fn slot_of_row(&self, row: usize) -> Option<u32> {
        u32::try_from(self.token_slots[row / self.shape.top_k]).ok()
    }

    /// Rows in the order of a sorted batch, and the bounds of each expert; rows of no expert come last.
    pub(super) fn sorted_rows(&self) -> (Vec<usize>, Vec<u32>) {
        let experts = self.shape.num_experts;
        let key = |row: &usize| {
            usize::try_from(self.experts[*row]).map_or(experts, |expert| expert.min(experts))
        };
        let mut rows: Vec<usize> = (0..self.rows()).collect();
        rows.sort_by_key(key);
        let offsets =
            (0..=experts).map(|expert| rows.partition_point(|row| key(row) < expert) as u32);
        let offsets = offsets.collect();
        (rows, offsets)
    }

    /// Asserts that every element lies where two loops in f64 say, within what three roundings to BF16 may cost, and that rows without a fold
    /// kept their bits.
    pub fn assert_near_reference(&self, outs: &Outs) {
        for (proj, out) in ExpertProj::ALL.into_iter().zip(outs) {
            let (k_in, n_out) = Self::dims(proj);
            let (k_in, n_out) = (k_in as usize, n_out as usize);
            for row in 0..self.rows() {
                let base = &self.base[proj as usize][row * n_out..][..n_out];
                let out = &out[row * n_out..][..n_out];
                let Some(adapter) = self.adapter(row, proj) else {
                    assert!(
                        out == base,
                        "{:?}: {proj:?}: base row {row} changed",
                        self.shape
                    );
                    continue;
                };
                let x = match proj {
                    ExpertProj::Down => &self.activations[row * k_in..][..k_in],
                    _ => &self.x[row / self.shape.top_k * k_in..][..k_in],
                };
                let expected = naive_delta(x, adapter);
                for (column, (base, out)) in base.iter().zip(out).enumerate() {
                    let (base, out) = (base.to_f64(), out.to_f64());
                    let error = (out - base - expected.delta[column]).abs();
                    let allowed =
                        2.0 / 256.0 * (base.abs() + out.abs() + expected.magnitude[column]);
                    assert!(
                        error <= allowed,
                        "{:?}: {proj:?}: row {row}, {column}",
                        self.shape
                    );
                }
            }
        }
    }

    fn adapter(&self, row: usize, proj: ExpertProj) -> Option<&TestAdapter> {
        let expert = usize::try_from(self.experts[row]).ok()?;
        self.adapters.get(&(self.slot_of_row(row)?, expert, proj))
    }
}

/// The experts of one token.
fn choose(rng: &mut Rng, shape: MoeShape, token: usize) -> Vec<i32> {
    let experts = shape.num_experts;
    match shape.choice {
        Choice::OneExpert => vec![experts as i32 / 2; shape.top_k],
        Choice::PastTheTable => (0..shape.top_k)
            .map(|at| match (token + at) % 3 {
                0 => [-1, i32::MIN, experts as i32, i32::MAX][rng.below(0..4)],
                _ => rng.below(0..experts) as i32,
            })
            .collect(),
        Choice::Spread => {
            let first = rng.below(0..experts);
            // Odd steps are distinct for as many as a power of two; others repeat, which is legal too.
            let step = 2 * rng.below(0..experts.div_ceil(2)) + 1;
            (0..shape.top_k)
                .map(|at| ((first + at * step) % experts) as i32)
                .collect()
        }
    }
}

fn random_adapters(
    rng: &mut Rng,
    num_experts: usize,
) -> BTreeMap<(u32, usize, ExpertProj), TestAdapter> {
    let mut adapters = BTreeMap::new();
    for slot in MoeCase::RESIDENT_SLOTS {
        for expert in 0..num_experts {
            for proj in ExpertProj::ALL {
                let adapted = match slot {
                    0 => expert % 3 == 0,
                    1 => proj != ExpertProj::Up,
                    _ => proj == ExpertProj::Up && expert % 2 == 1,
                };
                if adapted {
                    let rank = [4, 16, 1][(expert + proj as usize) % 3];
                    let dims = MoeCase::dims(proj);
                    let adapter = TestAdapter::random(rng, Fill::Signed, rank, dims);
                    adapters.insert((slot, expert, proj), adapter);
                }
            }
        }
    }
    adapters
}
