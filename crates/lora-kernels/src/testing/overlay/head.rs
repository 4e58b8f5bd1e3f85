//! Bodies of the LM head.

use super::{DeviceOverlays, OverlayBatch, TestOverlay, kernels, strided, upload};
use crate::overlay::{HeadRows, LogitsMut, head_logits};
use crate::testing::naive::ROUNDOFF;
use crate::testing::{Fill, Rng, TestBackend};
use crate::{Applied, RowGroups, RowGroupsSpec, Stream};
use half::bf16;
use std::sync::Arc;

/// What FP32 sums may miss by, over the sum of magnitudes: tensor cores cut bits off where they add.
const SUM_ERROR: f64 = 1.0 / 16384.0;

/// How logits are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadWay {
    /// FP32 logits, not BF16.
    pub f32_logits: bool,
    /// Largest group cut into small tiles.
    pub small_max: u32,
    /// The hint that chooses a kernel.
    pub expected_ids: u32,
    /// Elements that rows of logits and of x are apart, beside their widths.
    pub gap: usize,
    /// Groups made on the device; else on the host, slots that do not exist taken out.
    pub grouped_on_device: bool,
}

impl HeadWay {
    /// BF16 logits, groups as decode has them, few ids.
    pub const PLAIN: Self = Self {
        f32_logits: false,
        small_max: 48,
        expected_ids: 0,
        gap: 0,
        grouped_on_device: true,
    };
}

/// What logits hold before a launch.
pub(super) const BEFORE: f32 = -3.5;

/// The logits of a batch, as FP32, gaps left out but looked at. Panics where the backend gives an error.
pub fn logits_of(
    backend: &TestBackend,
    batch: &OverlayBatch,
    device: &DeviceOverlays,
    way: HeadWay,
) -> Vec<f32> {
    let (rows, hidden, vocab) = (batch.rows(), batch.hidden as usize, batch.vocab as usize);
    let (x_stride, stride) = (hidden + way.gap, vocab + way.gap);
    let x = upload(backend, &strided(&batch.x, hidden, way.gap, bf16::NAN));
    let spec = RowGroupsSpec::new(rows as u32, batch.overlays.len() as u32, way.small_max);
    let mut groups = RowGroups::new(Arc::clone(backend) as _, spec).expect("groups");
    let slots = upload(backend, &batch.row_slots);
    let grouped = if way.grouped_on_device {
        let slots = slots.row_slots(rows).expect("slots");
        groups.build(&**backend, Stream::OWN, slots)
    } else {
        let known = |slot: &i32| (*slot as u32 as usize) < batch.overlays.len();
        let slots = batch.row_slots.iter();
        let slots: Vec<i32> = slots.map(|s| if known(s) { *s } else { -1 }).collect();
        groups.build_host(&slots)
    };
    grouped.expect("group rows");
    let on = (&kernels(backend), Stream::OWN);
    let table = device.table(way.expected_ids);
    let x = x.mat(rows, hidden, x_stride).expect("x");
    let head = HeadRows::Grouped(&groups);
    let applied;
    let values: Vec<f32> = if way.f32_logits {
        let mut out = upload(backend, &vec![BEFORE; rows * stride]);
        let logits = out.f32_mat_mut(rows, vocab, stride).expect("logits");
        applied = head_logits(on, &table, x, head, LogitsMut::F32(logits));
        backend.synchronize(Stream::OWN).expect("synchronize");
        out.download(0, rows * stride).expect("download")
    } else {
        let mut out = upload(backend, &vec![bf16::from_f32(BEFORE); rows * stride]);
        let logits = out.mat_mut(rows, vocab, stride).expect("logits");
        applied = head_logits(on, &table, x, head, LogitsMut::Bf16(logits));
        backend.synchronize(Stream::OWN).expect("synchronize");
        let values: Vec<bf16> = out.download(0, rows * stride).expect("download");
        values.iter().map(|value| value.to_f32()).collect()
    };
    assert_eq!(applied, Ok(Applied::Launched { launches: 1 }));
    for row in values.chunks(stride) {
        assert!(
            row[vocab..].iter().all(|v| *v == BEFORE),
            "a gap was written"
        );
    }
    let inside = values.chunks(stride).flat_map(|row| &row[..vocab]);
    inside.copied().collect()
}

/// How far a logit is from the dot product of its two rows, over what is allowed; `rounding` is what it was rounded to, relative. A NaN is
/// infinitely far.
pub fn logit_miss((x, row): (&[bf16], &[bf16]), found: f64, rounding: f64) -> f64 {
    let products = x.iter().zip(row).map(|(x, w)| x.to_f64() * w.to_f64());
    let (sum, magnitude) = products.fold((0.0, 0.0), |(sum, magnitude), product| {
        (sum + product, magnitude + f64::abs(product))
    });
    let miss = (found - sum).abs() / (rounding * f64::abs(sum) + SUM_ERROR * magnitude);
    if miss.is_nan() { f64::INFINITY } else { miss }
}

/// Worst miss of `found` over what is allowed, by an f64 reference; logits that are not overridden must have kept their bits.
pub(super) fn worst_miss(batch: &OverlayBatch, way: HeadWay, found: &[f32]) -> f64 {
    let (vocab, hidden) = (batch.vocab as usize, batch.hidden as usize);
    let mut worst = 0_f64;
    for (row, found) in found.chunks(vocab).enumerate() {
        let overlay = batch.overlay_of(row);
        for (id, &found) in (0..).zip(found) {
            let Some(weights) = overlay.and_then(|overlay| overlay.row(id, hidden)) else {
                assert_eq!(found, BEFORE, "row {row}, id {id} is not overridden");
                continue;
            };
            let rounding = if way.f32_logits { 0.0 } else { ROUNDOFF };
            worst = worst.max(logit_miss(
                (batch.x_row(row), weights),
                found.into(),
                rounding,
            ));
        }
    }
    worst
}

fn ways() -> impl Iterator<Item = HeadWay> {
    let large = HeadWay {
        f32_logits: true,
        small_max: 0,
        ..HeadWay::PLAIN
    };
    let wide = HeadWay {
        expected_ids: 1 << 20,
        gap: 8,
        ..HeadWay::PLAIN
    };
    let unaligned = HeadWay {
        gap: 3,
        grouped_on_device: false,
        ..large
    };
    let wide_unaligned = HeadWay {
        expected_ids: 1 << 20,
        ..unaligned
    };
    // More tiles, of enough rows, than a block looks through at a time.
    let many_tiles = HeadWay {
        small_max: 1 << 20,
        expected_ids: 1 << 20,
        ..HeadWay::PLAIN
    };
    // An item a row or so, and so many that they are of one kernel or another for little work.
    let few = [1, 64, 128].map(|expected_ids| HeadWay {
        expected_ids,
        f32_logits: true,
        ..HeadWay::PLAIN
    });
    [
        HeadWay::PLAIN,
        large,
        wide,
        unaligned,
        wide_unaligned,
        many_tiles,
    ]
    .into_iter()
    .chain(few)
}

/// Logits against the reference: widths and vocabularies on and off every boundary, BF16 and FP32, overlays of one id to all, few rows and many.
pub fn logits_match_the_reference(backend: &TestBackend) {
    const SIZES: [(u32, u32, usize); 9] = [
        (5, 1, 3),
        (40, 33, 9),
        (130, 64, 70),
        (257, 200, 17),
        (129, 1000, 40),
        (33, 257, 300),
        (64, 4096, 12),
        (200, 4168, 12),
        (5, 8, 2600),
    ];
    for (index, (vocab, hidden, rows)) in SIZES.into_iter().enumerate() {
        let fill = [Fill::Signed, Fill::Coherent][index % 2];
        let batch = OverlayBatch::random(index as u64, fill, (vocab, hidden), rows);
        let device = DeviceOverlays::upload(backend, &batch.overlays, (vocab, hidden));
        for way in ways() {
            let worst = worst_miss(&batch, way, &logits_of(backend, &batch, &device, way));
            assert!(
                worst <= 1.0,
                "{rows} rows, {vocab} x {hidden}, {way:?}: {worst}"
            );
        }
    }
}

/// A logit's bits are the same alone and in any batch, whatever the tiles, the kernel, the strides and the order of the rows.
pub fn logits_do_not_depend_on_the_batch(backend: &TestBackend) {
    for (vocab, hidden, rows) in [(200, 1096, 90), (77, 264, 330)] {
        let batch = OverlayBatch::random(3, Fill::Signed, (vocab, hidden), rows);
        let device = DeviceOverlays::upload(backend, &batch.overlays, (vocab, hidden));
        let row_bits = |values: &[f32]| -> Vec<Vec<u32>> {
            let rows = values.chunks(vocab as usize);
            rows.map(|row| row.iter().map(|v| v.to_bits()).collect())
                .collect()
        };
        for f32_logits in [true, false] {
            let plain = HeadWay {
                f32_logits,
                ..HeadWay::PLAIN
            };
            let expected = row_bits(&logits_of(backend, &batch, &device, plain));
            for way in ways() {
                let way = HeadWay { f32_logits, ..way };
                let found = row_bits(&logits_of(backend, &batch, &device, way));
                assert!(found == expected, "{rows} rows, {way:?}");
            }
            let some: Vec<usize> = (0..rows).rev().step_by(11).collect();
            let found = row_bits(&logits_of(backend, &batch.select(&some), &device, plain));
            for (found, &row) in found.iter().zip(&some) {
                assert!(*found == expected[row], "row {row} among others");
            }
            for row in [0, rows / 2, rows - 1] {
                let one = batch.select(&[row]);
                let found = row_bits(&logits_of(backend, &one, &device, plain));
                assert!(found[0] == expected[row], "row {row} alone");
            }
        }
    }
}

/// One slot for all rows gives what rows of that slot give.
pub fn one_slot_for_all_rows_equals_rows_of_it(backend: &TestBackend) {
    let (vocab, hidden, rows) = (90_u32, 136_u32, 75);
    let mut batch = OverlayBatch::random(8, Fill::Signed, (vocab, hidden), rows);
    let device = DeviceOverlays::upload(backend, &batch.overlays, (vocab, hidden));
    let way = HeadWay {
        f32_logits: true,
        ..HeadWay::PLAIN
    };
    let x = upload(backend, &batch.x);
    for slot in [0, 1, 3, 60] {
        batch.row_slots = vec![slot; rows];
        let expected = logits_of(backend, &batch, &device, way);
        let (vocab, hidden) = (vocab as usize, hidden as usize);
        let mut out = upload(backend, &vec![BEFORE; rows * vocab]);
        let logits = LogitsMut::F32(out.f32_mat_mut(rows, vocab, vocab).expect("logits"));
        let x = x.mat(rows, hidden, hidden).expect("x");
        let on = (&kernels(backend), Stream::OWN);
        let head = HeadRows::All(slot as u32);
        let applied = head_logits(on, &device.table(0), x, head, logits);
        assert_eq!(applied, Ok(Applied::Launched { launches: 1 }));
        backend.synchronize(Stream::OWN).expect("synchronize");
        let found: Vec<f32> = out.download(0, rows * vocab).expect("download");
        assert_eq!(found, expected, "slot {slot}");
    }
}

/// Ids past the vocabulary are skipped, also where a row of logits is wide enough for them.
pub fn ids_past_the_vocabulary_are_skipped(backend: &TestBackend) {
    let (vocab, hidden, rows) = (20_u32, 64_u32, 5);
    let mut batch = OverlayBatch::random(9, Fill::Signed, (vocab, hidden), rows);
    let ids = vec![3, 19, 20, 21, 900, u32::MAX];
    let overlay = TestOverlay::random(&mut Rng::new(2), Fill::Signed, ids, hidden as usize);
    batch.overlays[0] = Some(overlay);
    batch.row_slots = vec![0; rows];
    let device = DeviceOverlays::upload(backend, &batch.overlays, (vocab, hidden));
    for way in ways() {
        // Gaps, which an id of 20 or 21 would land in, are looked at there.
        let found = logits_of(backend, &batch, &device, way);
        assert!(worst_miss(&batch, way, &found) <= 1.0, "{way:?}");
    }
}

/// The checks themselves: a row 5 % off, a part of the hidden size left out, two rows swapped must each fail them.
pub fn wrong_overlays_are_caught(backend: &TestBackend) {
    let (vocab, hidden, rows) = (60_u32, 2048_u32, 20);
    for fill in [Fill::Signed, Fill::Coherent] {
        let batch = OverlayBatch::random(5, fill, (vocab, hidden), rows);
        let fails = |what: &str, change: &dyn Fn(&mut TestOverlay)| {
            let mut wrong = batch.overlays.clone();
            wrong.iter_mut().flatten().for_each(change);
            let device = DeviceOverlays::upload(backend, &wrong, (vocab, hidden));
            for way in ways() {
                let worst = worst_miss(&batch, way, &logits_of(backend, &batch, &device, way));
                assert!(worst > 1.0, "{what} passes {way:?}, {fill:?}: {worst}");
            }
        };
        fails("rows off by 5 %", &|overlay| {
            for value in &mut overlay.rows {
                *value = bf16::from_f32(value.to_f32() * 1.05);
            }
        });
        fails("32 columns left out", &|overlay| {
            for row in overlay.rows.chunks_mut(hidden as usize) {
                row[1024..1056].fill(bf16::ZERO);
            }
        });
        fails("two rows swapped", &|overlay| {
            let n = overlay.rows.len() / hidden as usize;
            for column in 0..hidden as usize {
                overlay
                    .rows
                    .swap(column, (n - 1) * hidden as usize + column);
            }
            // An overlay of one row has none to swap with.
            if n == 1 {
                overlay.rows.fill(bf16::ZERO);
            }
        });
    }
}
