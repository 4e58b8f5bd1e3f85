//! Bodies that compare a backend with itself, bit for bit: what makes a row's result depend on nothing but the row.

use super::batch::same_bits;
use super::correctness::Routing;
use super::{Batch, BatchShape, DeviceBatch, Fill, Rng, SiteShape, TestBackend, Via};
use crate::{
    Applied, DeviceBuffer, Grouping, LaunchOptions, RoutedX, RowGroups, RowGroupsSpec, ScratchSpec,
    Stream,
};
use half::bf16;
use lora_weights::device::DeviceMemory;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

/// Sizes off every boundary: a k tail, two k blocks and a bit, odd widths, gaps.
fn mixed_shape(seed: u64) -> BatchShape {
    let site = |n_out, gap| SiteShape {
        n_out,
        gap,
        max_rank: 24,
    };
    BatchShape {
        seed,
        fill: Fill::Signed,
        k_in: 2100,
        x_gap: 4,
        slots: 5,
        ranks: vec![24, 7, 16],
        sites: vec![site(200, 0), site(71, 9)],
    }
}

/// Rows of x that are 16-byte aligned, and so many ranks as `sites` sites of 64 have.
fn aligned_shape(seed: u64, sites: usize) -> BatchShape {
    let site = SiteShape {
        n_out: 72,
        gap: 0,
        max_rank: 64,
    };
    BatchShape {
        k_in: 2104,
        x_gap: 8,
        ranks: vec![64, 24, 40],
        sites: vec![site; sites],
        ..mixed_shape(seed)
    }
}

fn assert_same(what: &str, batch: &Batch, a: &[Vec<bf16>], b: &[Vec<bf16>]) {
    for (site, (a, b)) in a.iter().zip(b).enumerate() {
        for row in 0..batch.rows() {
            let rows = (batch.row_of(site, a, row), batch.row_of(site, b, row));
            assert!(
                same_bits(rows.0, rows.1),
                "{what}: site {site}, row {row} differs"
            );
        }
    }
}

fn options(gemv_max_m: u32) -> LaunchOptions {
    LaunchOptions {
        gemv_max_m,
        ..LaunchOptions::default()
    }
}

/// Each row alone, and at other positions among other rows.
pub fn a_row_alone_equals_itself_in_a_batch(backend: &TestBackend) {
    let mut rng = Rng::new(1);
    let slots = Routing::Anywhere.row_slots(&mut rng, 133, 5);
    let batch = Batch::random(&mixed_shape(1), &slots);
    let whole = batch.run(backend, Via::Routed, options(48));
    let reversed: Vec<usize> = (0..133).rev().collect();
    let odd: Vec<usize> = (1..133).step_by(2).collect();
    let alone = (0..133).step_by(11).map(|row| vec![row]);
    for rows in alone.chain([reversed, odd, vec![3, 3 + 64, 3, 5]]) {
        let part = batch.select(&rows);
        let outs = part.run(backend, Via::Routed, options(48));
        for (site, (out, whole)) in outs.iter().zip(&whole).enumerate() {
            for (at, &row) in rows.iter().enumerate() {
                let same = same_bits(part.row_of(site, out, at), batch.row_of(site, whole, row));
                assert!(
                    same,
                    "site {site}: row {row} differs as row {at} of {}",
                    rows.len()
                );
            }
        }
    }
}

/// One adapter for all rows, as a pair and through tables.
pub fn pair_equals_routed(backend: &TestBackend) {
    for rows in [1, 8, 21, 100] {
        let batch = Batch::random(&mixed_shape(2), &vec![0; rows]);
        let pair = batch.run(backend, Via::Pair, options(48));
        let routed = batch.run(backend, Via::Routed, options(48));
        let by_host = batch.run(backend, Via::RoutedByHost, options(48));
        assert_same("pair and routed", &batch, &pair, &routed);
        assert_same("grouped on device and host", &batch, &routed, &by_host);
    }
}

/// The same rows through small and large tiles.
pub fn small_tiles_equal_large_tiles(backend: &TestBackend) {
    let mut rng = Rng::new(3);
    for (rows, routing) in [
        (1, Routing::Same),
        (100, Routing::Skewed),
        (130, Routing::Same),
        (300, Routing::Skewed),
    ] {
        let slots = routing.row_slots(&mut rng, rows, 5);
        for shape in std::iter::once(mixed_shape(3)).chain((1..=4).map(|n| aligned_shape(3, n))) {
            let batch = Batch::random(&shape, &slots);
            for via in [Via::Pair, Via::Routed] {
                let small = batch.run(backend, via, options(u32::MAX));
                let large = batch.run(backend, via, options(0));
                assert_same("small and large tiles", &batch, &small, &large);
            }
        }
    }
}

/// The same rows grouped as those of a MoE block: few of them, more than a GPU has blocks for at once, and many rows of few entries.
pub fn spread_rows_equal_others(backend: &TestBackend) {
    let mut rng = Rng::new(12);
    let one_launch = [(776, 16), (1040, 16), (2048, 16)];
    let others = [(1040, 32), (1040, 48), (1040, 64)];
    for (rows, slots) in [(3, 40), (24, 24), (150, 140), (300, 5)] {
        for (k_in, rank) in one_launch.into_iter().chain(others) {
            let site = |n_out| SiteShape {
                n_out,
                gap: 8,
                max_rank: rank,
            };
            let shape = BatchShape {
                seed: u64::from(rank),
                fill: Fill::Signed,
                k_in,
                x_gap: 8,
                slots,
                ranks: vec![rank, 7, rank - 4],
                sites: vec![site(2048), site(1800)],
            };
            let row_slots = Routing::Anywhere.row_slots(&mut rng, rows, slots);
            let batch = Batch::random(&shape, &row_slots);
            let spread = batch.run(backend, Via::RoutedSpread, LaunchOptions::default());
            let routed = batch.run(backend, Via::Routed, LaunchOptions::default());
            assert_same("spread rows and others", &batch, &spread, &routed);
        }
    }
}

/// Spread rows in one pass, in passes of up to `max_rows`, and grouped as others.
fn spread_rows_equal_others_in_passes(backend: &TestBackend, batch: &Batch, max_rows: u32) {
    let whole = batch.run(backend, Via::RoutedSpread, LaunchOptions::default());
    let routed = batch.run(backend, Via::Routed, LaunchOptions::default());
    assert_same("spread rows and others", batch, &whole, &routed);
    let sites = &batch.shape.sites;
    let spec = ScratchSpec {
        max_rows,
        max_rank: sites.iter().map(|site| site.max_rank).max().unwrap_or(0),
        max_sites: sites.len() as u32,
        max_k_in: batch.shape.k_in,
    };
    let settings = (LaunchOptions::default(), spec);
    let (launches, outs) = run_in_passes(backend, batch, Via::RoutedSpread, settings);
    let passes = (batch.row_slots.len() as u32).div_ceil(max_rows);
    // A device may hand nothing over and take all rows at once; the host, in whose caps an L2 plays no part, takes passes.
    let at_once = launches == 1 && backend.caps().l2_bytes > 0;
    assert!(at_once || launches >= passes, "{launches} passes");
    assert_same("one pass and many", batch, &whole, &outs);
}

/// Few spread rows of a narrow out, in one pass and in several.
pub fn few_spread_rows_do_not_depend_on_passes(backend: &TestBackend) {
    let mut rng = Rng::new(13);
    for k_in in [136, 1160] {
        let shape = BatchShape {
            k_in,
            slots: 40,
            ranks: vec![16, 7],
            sites: vec![SiteShape {
                n_out: 200,
                gap: 8,
                max_rank: 16,
            }],
            ..aligned_shape(13, 1)
        };
        let row_slots = Routing::Anywhere.row_slots(&mut rng, 90, 40);
        let batch = Batch::random(&shape, &row_slots);
        spread_rows_equal_others_in_passes(backend, &batch, 70);
    }
}

/// Rows enough for large tiles, at sites of the given widths; slot 3 has several tiles.
fn many_spread_rows(
    rng: &mut Rng,
    (slots, rows): (u32, usize),
    (k_in, rank, widths): (u32, u32, &[u32]),
    seed: u64,
) -> Batch {
    let site = |&n_out| SiteShape {
        n_out,
        gap: 8,
        max_rank: rank,
    };
    let shape = BatchShape {
        k_in,
        slots,
        ranks: vec![rank, 7, rank - 4],
        sites: widths.iter().map(site).collect(),
        ..aligned_shape(seed, 1)
    };
    let mut row_slots = Routing::Anywhere.row_slots(rng, rows, slots);
    row_slots.splice(700..700, [3; 150]);
    Batch::random(&shape, &row_slots)
}

/// So many entries that a GPU makes whole deltas in one launch, a block a tile; in one pass and in several.
pub fn many_spread_rows_equal_others(backend: &TestBackend) {
    let mut rng = Rng::new(14);
    for (k_in, rank) in [(776, 16), (1024, 32), (1160, 32), (2048, 32)] {
        let shape = (k_in, rank, &[632, 200][..]);
        let batch = many_spread_rows(&mut rng, (140, 1600), shape, 14);
        spread_rows_equal_others_in_passes(backend, &batch, 1000);
    }
}

/// Entries so few that a GPU has two blocks share a tile, or four, as it does where two sites read the same x; in one pass and in several. Some entries have a delta at
/// one of two sites or at none.
pub fn tiles_of_several_blocks_equal_others(backend: &TestBackend) {
    const FEW: (u32, usize) = (90, 1300);
    const MANY: (u32, usize) = (100, 8300);
    let mut rng = Rng::new(15);
    let shapes: [(u32, u32, &[u32], _); 7] = [
        (776, 16, &[632], FEW),
        (1024, 32, &[8], FEW),
        (1160, 16, &[2056], FEW),
        (1032, 16, &[200, 632], FEW),
        (2048, 16, &[632, 200], FEW),
        (2184, 16, &[328], MANY),
        (4096, 16, &[136, 200], MANY),
    ];
    for (k_in, rank, widths, size) in shapes {
        let mut batch = many_spread_rows(&mut rng, size, (k_in, rank, widths), 15);
        for adapter in batch.adapters[0].iter_mut().step_by(4) {
            *adapter = None;
        }
        spread_rows_equal_others_in_passes(backend, &batch, 1000);
    }
}

/// Ranks of 7 and 24 made 32 by zeros: the zeros add nothing.
pub fn padded_rank_equals_true_rank(backend: &TestBackend) {
    let mut rng = Rng::new(4);
    let slots = Routing::Skewed.row_slots(&mut rng, 60, 5);
    let batch = Batch::random(&mixed_shape(4), &slots);
    let mut padded = batch.clone();
    for adapter in padded.adapters.iter_mut().flatten().flatten() {
        *adapter = adapter.at_rank(32);
    }
    for via in [Via::Pair, Via::Routed] {
        let true_rank = batch.run(backend, via, options(8));
        let at_padding = padded.run(backend, via, options(8));
        assert_same("padded and true rank", &batch, &true_rank, &at_padding);
    }
}

/// The first and the `runs`-th run.
pub fn every_run_is_the_same(backend: &TestBackend, runs: usize) {
    let mut rng = Rng::new(5);
    let slots = Routing::Skewed.row_slots(&mut rng, 90, 5);
    let batch = Batch::random(&mixed_shape(5), &slots);
    let mut device = DeviceBatch::new(backend, &batch, Via::Routed, options(48));
    let mut run = || {
        device.reset();
        device.group(Stream::OWN);
        assert_eq!(
            device.launch(Stream::OWN),
            Applied::Launched { launches: 1 }
        );
        device.outs()
    };
    let first = run();
    for count in 1..runs {
        assert_same(&format!("runs 0 and {count}"), &batch, &first, &run());
    }
}

/// Scratch for all rows at once, and for so few that it takes many passes.
pub fn passes_do_not_change_bits(backend: &TestBackend) {
    let mut rng = Rng::new(6);
    for (via, routing) in [(Via::Pair, Routing::Same), (Via::Routed, Routing::Skewed)] {
        let slots = routing.row_slots(&mut rng, 700, 5);
        let batch = Batch::random(&mixed_shape(6), &slots);
        let whole = batch.run(backend, via, options(48));
        let spec = ScratchSpec {
            max_rows: 70,
            max_rank: 24,
            max_sites: 2,
            max_k_in: 2100,
        };
        let (launches, outs) = run_in_passes(backend, &batch, via, (options(48), spec));
        assert!(launches > 5, "{launches} passes");
        assert_same("one pass and many", &batch, &whole, &outs);
    }
}

/// Launches and outs of a batch whose scratch is one for fewer rows.
fn run_in_passes(
    backend: &TestBackend,
    batch: &Batch,
    via: Via,
    settings: (LaunchOptions, ScratchSpec),
) -> (u32, Vec<Vec<bf16>>) {
    let mut device = DeviceBatch::with_scratch(backend, batch, via, settings);
    device.group(Stream::OWN);
    let applied = device.launch(Stream::OWN);
    let Applied::Launched { launches } = applied else {
        panic!("{applied:?}");
    };
    (launches, device.outs())
}

/// Device and host give the same tiles and permutation, for every routing shape; batches of so many rows as are in `of_rows`.
pub fn groupings_agree_with_the_rule(backend: &TestBackend, of_rows: Range<usize>) {
    let mut rng = Rng::new(7);
    let memory = || Arc::clone(backend) as Arc<dyn DeviceMemory>;
    for rows in [
        1, 7, 8, 9, 32, 48, 49, 64, 65, 500, 1024, 1025, 5000, 20_000,
    ] {
        for (entries, small_max) in [(1, 48), (3, 0), (64, 48), (512, u32::MAX), (70_000, 48)] {
            for routing in Routing::ALL {
                // Drawn for all batches, so that one does not depend on which are wanted.
                let slots = routing.row_slots(&mut rng, rows, entries);
                if !of_rows.contains(&rows) {
                    continue;
                }
                let spec = RowGroupsSpec::new(20_000, entries, small_max);
                let mut groups = RowGroups::new(memory(), spec).expect("groups");
                let buffer = DeviceBuffer::from_slice(memory(), &slots).expect("upload");
                let view = buffer.row_slots(rows).expect("slots");
                groups.build(&**backend, Stream::OWN, view).expect("build");
                backend.synchronize(Stream::OWN).expect("synchronize");
                let built = groups.download().expect("download");
                let rule = Grouping::of_rows(&slots, entries, spec.small_max_of(rows as u32));
                assert!(
                    built == rule,
                    "{rows} rows, {entries} entries, {small_max}, {routing:?}"
                );
            }
        }
    }
}

/// x read by several rows of out, by division and by list, equals x written out row by row.
pub fn shared_x_rows_equal_copied_ones(backend: &TestBackend) {
    let memory = || Arc::clone(backend) as Arc<dyn DeviceMemory>;
    let (tokens, repeat) = (9_usize, 4_usize);
    let rows = tokens * repeat;
    let slots: Vec<i32> = (0..rows).map(|row| (row as i32 * 7) % 6 - 1).collect();
    let mut shape = mixed_shape(8);
    shape.sites.truncate(1);
    let mut batch = Batch::random(&shape, &slots);
    let stride = batch.x_stride();
    let compact = batch.x[..tokens * stride].to_vec();
    for row in 0..rows {
        let token = &compact[row / repeat * stride..][..stride];
        batch.x[row * stride..][..stride].copy_from_slice(token);
    }
    let copied = batch.run(backend, Via::Routed, options(48));

    let x = DeviceBuffer::from_slice(memory(), &compact).expect("upload");
    let x = x.mat(tokens, shape.k_in as usize, stride).expect("x");
    let list: Vec<u32> = (0..rows).map(|row| (row / repeat) as u32).collect();
    let list = DeviceBuffer::from_slice(memory(), &list).expect("upload");
    let by = NonZeroU32::new(repeat as u32).expect("not zero");
    let list = list.row_indices(rows).expect("list");
    let mut device = DeviceBatch::new(backend, &batch, Via::Routed, options(48));
    device.group(Stream::OWN);
    for routed in [RoutedX::repeated(x, by), RoutedX::gathered(x, list)] {
        device.reset();
        let applied = device.launch_with(Stream::OWN, routed);
        assert_eq!(applied, Applied::Launched { launches: 1 });
        assert_same("copied and shared x", &batch, &copied, &device.outs());
    }
}
