//! Rows of MoE blocks are grouped by the rule, on any backend.

use super::TestBackend;
use super::data::Rng;
use crate::{
    DeviceBuffer, ExpertRouting, ExpertSpace, Grouping, LoraBackend, RowGroups, RowGroupsSpec,
    Stream,
};
use lora_weights::device::DeviceMemory;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

/// Slots of the pool: more than the threads of the smallest block, fewer than those of others.
const SLOTS: usize = 40;
/// Adapters that the tables have room for.
const RESIDENTS: u32 = 30;

/// (tokens, top-k, experts): rows that are sorted and rows that are counted, in one round of a block's threads and in several, entries that are counted in one pass and
/// in more, bounds that are kept and bounds that are not.
const SHAPES: [(usize, usize, u32); 10] = [
    (1, 1, 1),
    (1, 8, 128),
    (3, 8, 512),
    (40, 2, 5),
    (64, 8, 128),
    (128, 8, 16),
    (300, 22, 64),
    (1024, 8, 128),
    (2500, 8, 32),
    (130, 8, 4096),
];

/// A block's routing, with numbers past every limit in it.
struct Case {
    tokens: usize,
    top_k: usize,
    num_experts: u32,
    experts: Vec<i32>,
    adapters: Vec<i32>,
    residents: Vec<i32>,
    offsets: Vec<u32>,
    token_of_row: Vec<u32>,
}

impl Case {
    fn random(rng: &mut Rng, (tokens, top_k, num_experts): (usize, usize, u32)) -> Self {
        let rows = tokens * top_k;
        let below = |rng: &mut Rng, limit: usize| rng.below(0..limit + 3) as i32 - 1;
        let bounds = (0..=num_experts).map(|_| rng.below(0..rows + 2) as u32);
        let mut offsets: Vec<u32> = bounds.collect();
        offsets.sort_unstable();
        Self {
            tokens,
            top_k,
            num_experts,
            experts: (0..rows)
                .map(|_| below(rng, num_experts as usize))
                .collect(),
            adapters: (0..tokens).map(|_| below(rng, SLOTS)).collect(),
            residents: (0..SLOTS).map(|_| below(rng, RESIDENTS as usize)).collect(),
            token_of_row: (0..rows).map(|_| rng.below(0..tokens + 2) as u32).collect(),
            offsets,
        }
    }

    /// Every row of one expert of one adapter.
    fn one_entry(shape: (usize, usize, u32)) -> Self {
        let mut case = Self::random(&mut Rng::new(3), shape);
        case.experts.fill(0);
        case.adapters.fill(2);
        case.residents[2] = 3;
        case
    }

    fn entry(&self, token: usize, expert: i64) -> i32 {
        let at = |list: &[i32], index: i32| {
            let index = usize::try_from(index).ok();
            index
                .and_then(|index| list.get(index).copied())
                .unwrap_or(-1)
        };
        let slot = self.adapters.get(token).map_or(-1, |slot| *slot);
        let resident = at(&self.residents, slot);
        let experts = 0..i64::from(self.num_experts);
        if (0..RESIDENTS as i32).contains(&resident) && experts.contains(&expert) {
            resident * self.num_experts as i32 + expert as i32
        } else {
            -1
        }
    }

    fn unsorted_entries(&self) -> Vec<i32> {
        let rows = self.experts.iter().enumerate();
        rows.map(|(row, expert)| self.entry(row / self.top_k, i64::from(*expert)))
            .collect()
    }

    fn sorted_entries(&self) -> Vec<i32> {
        let expert_of = |row: usize| {
            let holds = |bounds: &[u32]| (bounds[0] as usize..bounds[1] as usize).contains(&row);
            let found = self.offsets.windows(2).position(holds);
            found.map_or(-1, |expert| expert as i64)
        };
        let rows = self.token_of_row.iter().enumerate();
        rows.map(|(row, token)| self.entry(*token as usize, expert_of(row)))
            .collect()
    }

    /// Groups on the device, unsorted and sorted, and compares with the rule.
    fn check(&self, backend: &TestBackend, small_max: u32) {
        let memory = || Arc::clone(backend) as Arc<dyn DeviceMemory>;
        let ints = |values: &[i32]| DeviceBuffer::from_slice(memory(), values).expect("upload");
        let numbers = |values: &[u32]| DeviceBuffer::from_slice(memory(), values).expect("upload");
        let (rows, experts) = (self.experts.len(), self.num_experts as usize);
        let [chosen, adapters, residents] =
            [&self.experts, &self.adapters, &self.residents].map(|values| ints(values));
        let [offsets, tokens] = [&self.offsets, &self.token_of_row].map(|values| numbers(values));
        let space = ExpertSpace {
            resident_of_slot: residents.resident_of_slot(SLOTS).expect("view"),
            residents: RESIDENTS,
            num_experts: self.num_experts,
        };
        let unsorted = ExpertRouting::Unsorted {
            experts: chosen.expert_ids(rows).expect("view"),
            top_k: NonZeroU32::new(self.top_k as u32).expect("not zero"),
        };
        let sorted = ExpertRouting::Sorted {
            offsets: offsets.row_indices(experts + 1).expect("view"),
            tokens: tokens.row_indices(rows).expect("view"),
        };
        let spec = RowGroupsSpec::new(rows as u32, space.entries().expect("in range"), small_max);
        let mut groups = RowGroups::new(memory(), spec).expect("groups");
        for (routing, entries) in [
            (unsorted, self.unsorted_entries()),
            (sorted, self.sorted_entries()),
        ] {
            let view = adapters.token_adapters(self.tokens).expect("view");
            let queue = (&**backend as &dyn LoraBackend, Stream::OWN);
            let built = groups.build_experts(queue, routing, view, space);
            built.expect("build");
            backend.synchronize(Stream::OWN).expect("synchronize");
            let rule = Grouping::of_rows(&entries, spec.entries, spec.small_max_of(rows as u32));
            assert!(
                groups.download().expect("download") == rule,
                "{} tokens, top-{} of {experts}, small_max {small_max}, {routing:?}",
                self.tokens,
                self.top_k
            );
        }
    }
}

/// Device and host group the rows of MoE blocks alike, unsorted and sorted, with everything past a limit in them; blocks of so many rows as are in `of_rows`.
pub fn experts_are_grouped_by_the_rule(backend: &TestBackend, of_rows: Range<usize>) {
    let mut rng = Rng::new(9);
    for shape in SHAPES {
        // Drawn for all shapes, so that a shape's cases do not depend on which are wanted.
        let cases = [0, 8, 48].map(|small_max| (small_max, Case::random(&mut rng, shape)));
        let (tokens, top_k, _) = shape;
        if !of_rows.contains(&(tokens * top_k)) {
            continue;
        }
        for (small_max, case) in cases {
            case.check(backend, small_max);
        }
        Case::one_entry(shape).check(backend, 48);
    }
}
