//! Bodies that compare a backend with the naive reference.

use super::batch::same_bits;
use super::{Batch, BatchShape, DeviceBatch, Fill, Rng, SiteShape, TestAdapter, TestBackend, Via};
use crate::{Applied, LaunchOptions, Skip, Stream};
use half::bf16;
use std::ops::Range;

/// How the rows of a batch share slots out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routing {
    /// All rows one slot.
    Same,
    /// Neighbouring rows in different slots.
    Distinct,
    /// Most rows one slot, the rest anywhere, some base.
    Skewed,
    /// Anywhere, with base rows and slots past the table.
    Anywhere,
    /// No row has an adapter.
    Base,
}

impl Routing {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Same,
        Self::Distinct,
        Self::Skewed,
        Self::Anywhere,
        Self::Base,
    ];

    /// The slots of `rows` rows over tables of `slots` entries.
    pub fn row_slots(self, rng: &mut Rng, rows: usize, slots: u32) -> Vec<i32> {
        let last = slots as i32 - 1;
        let slot = |row: usize| -> i32 {
            match self {
                Self::Same => last,
                Self::Distinct => (row % slots as usize) as i32,
                Self::Skewed if !rng.one_in(5) => last,
                Self::Skewed | Self::Anywhere if rng.one_in(4) => -1,
                Self::Anywhere if rng.one_in(9) => [last + 1, i32::MAX, i32::MIN][rng.below(0..3)],
                Self::Skewed | Self::Anywhere => rng.below(0..slots as usize) as i32,
                Self::Base => -1,
            }
        };
        (0..rows).map(slot).collect()
    }
}

/// How many shapes [`random_shapes_match_the_reference`] has.
pub const RANDOM_SHAPES: usize = 44;

/// Ranks, widths and row counts on and off every boundary of the kernels, one to four sites, gaps in x and out: the given ones of [`RANDOM_SHAPES`].
pub fn random_shapes_match_the_reference(backend: &TestBackend, shapes: Range<usize>) {
    const RANKS: [u32; 11] = [1, 4, 8, 12, 16, 24, 48, 64, 128, 256, 512];
    const DIMS: [(u32, u32); 9] = [
        (1024, 64),
        (1000, 33),
        (4097, 130),
        (257, 1),
        (33, 1023),
        (2050, 257),
        (7, 65),
        (1, 3),
        (3072, 512),
    ];
    const ROWS: [usize; 8] = [1, 7, 8, 9, 33, 48, 49, 257];
    const SLOTS: [u32; 6] = [1, 2, 3, 8, 64, 512];
    for index in shapes {
        let mut rng = Rng::new(17 + index as u64);
        let rank = RANKS[index % RANKS.len()];
        // Large ranks with many slots would spend the time in making data.
        let slots = SLOTS[index % SLOTS.len()].min(4096 / rank);
        let (k_in, n_out) = DIMS[index % DIMS.len()];
        let rows = ROWS[index % ROWS.len()].min(64 * 512 / rank as usize);
        let sites = (0..1 + index % 4).map(|site| SiteShape {
            n_out: n_out + 16 * site as u32,
            gap: [0, 8, 5][(index + site) % 3],
            max_rank: rank,
        });
        let shape = BatchShape {
            seed: index as u64,
            fill: [Fill::Signed, Fill::Coherent][index % 2],
            k_in,
            x_gap: [0, 3, 8][index % 3],
            slots,
            ranks: vec![rank, rank.div_ceil(2), rank],
            sites: sites.collect(),
        };
        let routing = Routing::ALL[index % Routing::ALL.len()];
        let slots = routing.row_slots(&mut rng, rows, slots);
        let batch = Batch::random(&shape, &slots);
        batch.assert_correct(backend, Via::Routed);
        batch.assert_correct(backend, Via::Pair);
    }
}

/// Prefill: thousands of rows, of one adapter and of four.
pub fn long_batches_match_the_reference(backend: &TestBackend) {
    let mut rng = Rng::new(5);
    for (slots, routing) in [(1, Routing::Same), (4, Routing::Anywhere)] {
        let shape = BatchShape {
            slots,
            ranks: vec![16, 8, 3],
            ..BatchShape::single(3, 16, (1100, 72))
        };
        let slots = routing.row_slots(&mut rng, 5000, slots);
        let batch = Batch::random(&shape, &slots);
        batch.assert_correct(backend, Via::Routed);
        batch.assert_correct(backend, Via::Pair);
    }
}

/// More sites than one launch serves.
pub fn many_sites_match_the_reference(backend: &TestBackend) {
    let site = |n_out| SiteShape {
        n_out,
        gap: 0,
        max_rank: 16,
    };
    let shape = BatchShape {
        sites: (1..=9).map(|i| site(i * 24)).collect(),
        slots: 3,
        ranks: vec![16, 7],
        ..BatchShape::single(8, 16, (640, 0))
    };
    let batch = Batch::random(&shape, &[0, 2, 1, -1, 2, 0]);
    batch.assert_correct(backend, Via::Routed);
    batch.assert_correct(backend, Via::Pair);
}

/// Rows without an adapter keep every bit, NaN payloads and negative zeros included; so do rows whose slot lies past the table, and rows
/// whose slot adapts another site but not this one.
pub fn base_rows_keep_their_bits(backend: &TestBackend) {
    let odd = [
        0x7f81, 0xffc1, 0x7fff, 0x8000, 0x0001, 0x7f80, 0xff80, 0x0000,
    ]
    .map(bf16::from_bits);
    let mut shape = BatchShape::single(4, 16, (300, 40));
    shape.slots = 2;
    let mut batch = Batch::random(&shape, &[-1, 0, 2, i32::MIN, 1, i32::MAX, -7]);
    batch.adapters[0][1] = None;
    for row in [0, 2, 3, 4, 5, 6] {
        for (column, value) in odd.iter().cycle().take(40).enumerate() {
            batch.base[0][row * 40 + column] = *value;
        }
    }
    let outs = batch.run(backend, Via::Routed, LaunchOptions::default());
    // Base rows are compared by bits there.
    assert!(batch.judge(Via::Routed, &outs).passes());
    let all_base = batch.select(&[0, 2, 3, 4, 5, 6]);
    let outs = all_base.run(backend, Via::Routed, LaunchOptions::default());
    assert!(all_base.judge(Via::Routed, &outs).passes());
}

/// No rows, no sites and levers: nothing is launched, and it says so.
pub fn empty_batches_launch_nothing(backend: &TestBackend) {
    let shape = BatchShape::single(1, 16, (64, 64));
    let apply = |batch: &Batch, options| {
        [Via::Pair, Via::Routed, Via::RoutedByHost].map(|via| {
            let mut device = DeviceBatch::new(backend, batch, via, options);
            device.group(Stream::OWN);
            device.launch(Stream::OWN)
        })
    };
    let none = Batch::random(&shape, &[]);
    assert_eq!(apply(&none, LaunchOptions::default()), [Applied::Empty; 3]);
    let no_sites = BatchShape {
        sites: Vec::new(),
        ..shape.clone()
    };
    let batch = Batch::random(&no_sites, &[0, 0]);
    assert_eq!(apply(&batch, LaunchOptions::default()), [Applied::Empty; 3]);
    let no_apply = LaunchOptions {
        no_apply: true,
        ..LaunchOptions::default()
    };
    let batch = Batch::random(&shape, &[0, 0]);
    assert_eq!(
        apply(&batch, no_apply),
        [Applied::Skipped(Skip::NoApply); 3]
    );
    let outs = batch.run(backend, Via::Pair, no_apply);
    assert!(same_bits(&outs[0], &batch.base[0]));
}

/// The check itself: a scale that is 5 % off, a chunk of k dropped, two rows swapped must each fail it, on data that cancels and on data that
/// does not.
pub fn wrong_results_are_caught(backend: &TestBackend) {
    for fill in [Fill::Signed, Fill::Coherent] {
        let shape = BatchShape {
            fill,
            slots: 2,
            ..BatchShape::single(6, 16, (2048, 192))
        };
        let batch = Batch::random(&shape, &[0, 1, 1, 0, 0, 1, 0, 1, 1, 1]);
        let fails = |what: &str, wrong: &Batch| {
            for via in [Via::Pair, Via::Routed] {
                let outs = wrong.run(backend, via, LaunchOptions::default());
                let verdict = batch.judge(via, &outs);
                assert!(
                    !verdict.passes(),
                    "{what} passes {via:?} with {fill:?} data: {verdict:?}"
                );
            }
        };
        batch.assert_correct(backend, Via::Routed);
        batch.assert_correct(backend, Via::Pair);

        let of_each = |change: &dyn Fn(&mut TestAdapter)| {
            let mut wrong = batch.clone();
            wrong.adapters[0].iter_mut().flatten().for_each(change);
            wrong
        };
        fails(
            "a scale off by 5 %",
            &of_each(&|adapter| adapter.scale *= 1.05),
        );
        fails(
            "a dropped chunk of k",
            &of_each(&|adapter| {
                for row in adapter.a.chunks_mut(2048) {
                    row[1024..1024 + 128].fill(bf16::ZERO);
                }
            }),
        );
        let mut swapped = batch.clone();
        let stride = batch.x_stride();
        for column in 0..stride {
            swapped.x.swap(2 * stride + column, 5 * stride + column);
        }
        fails("two swapped rows", &swapped);
    }
}
