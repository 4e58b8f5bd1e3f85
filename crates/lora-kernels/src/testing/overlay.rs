//! Bodies for whole-row operations: copies are compared bit for bit, logits at a tolerance and, between two ways to compute them, bit
//! for bit.

use super::{Fill, Rng, TestBackend};
use crate::overlay::{
    GatherSources, HeadRows, LogitsMut, OverlayTable, OverlayTokens, SlotOfRow, gather_rows,
    head_logits, replace_rows, row_diff,
};
use crate::{
    Applied, DeviceBuffer, LaunchOptions, LoraKernels, OverlaySlot, RowGroups, RowGroupsSpec,
    Stream,
};
use half::bf16;
use lora_weights::device::DeviceMemory;
use std::sync::Arc;

/// BF16's unit roundoff.
const ROUNDOFF: f64 = 1.0 / 256.0;

/// What FP32 sums may miss by, over the sum of magnitudes: tensor cores cut bits off where they add.
const SUM_ERROR: f64 = 1.0 / 16384.0;

/// An overlay in host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct TestOverlay {
    /// Token ids, ascending.
    pub ids: Vec<u32>,
    /// `[ids, hidden]`.
    pub rows: Vec<bf16>,
}

impl TestOverlay {
    /// Random rows for the given ids.
    pub fn random(rng: &mut Rng, fill: Fill, ids: Vec<u32>, hidden: usize) -> Self {
        let rows = rng.values(ids.len() * hidden, fill, 1.0 / (hidden as f32).sqrt());
        Self { ids, rows }
    }

    /// The row of a token.
    fn row(&self, token: u32, hidden: usize) -> Option<&[bf16]> {
        let place = self.ids.binary_search(&token).ok()?;
        Some(&self.rows[place * hidden..][..hidden])
    }

    /// The place of each token of the vocabulary, -1 for none.
    fn slot_map(&self, vocab: u32) -> Vec<i32> {
        let mut map = vec![-1; vocab as usize];
        for (place, &id) in (0..).zip(&self.ids) {
            if let Some(entry) = map.get_mut(id as usize) {
                *entry = place;
            }
        }
        map
    }
}

/// The overlays of a table's slots on a device.
pub struct DeviceOverlays {
    memory: Arc<dyn DeviceMemory>,
    entries: DeviceBuffer,
    /// What records point to, those of replaced overlays among them.
    held: Vec<DeviceBuffer>,
    table: OverlayTable,
}

impl DeviceOverlays {
    /// A table of as many slots as `overlays` has. Panics where the backend gives an error.
    pub fn upload(
        backend: &TestBackend,
        overlays: &[Option<TestOverlay>],
        (vocab, hidden): (u32, u32),
    ) -> Self {
        let memory: Arc<dyn DeviceMemory> = Arc::clone(backend) as _;
        let none = vec![OverlaySlot::NONE; overlays.len()];
        let entries = DeviceBuffer::from_slice(Arc::clone(&memory), &none).expect("records");
        let table = OverlayTable {
            entries: entries.ptr(),
            slots: overlays.len() as u32,
            vocab,
            hidden,
            expected_ids: 0,
        };
        let mut uploaded = Self {
            memory,
            entries,
            held: Vec::new(),
            table,
        };
        for (slot, overlay) in overlays.iter().enumerate() {
            uploaded.set(slot, overlay.as_ref());
        }
        uploaded
    }

    /// Replaces the overlay of a slot, at new addresses.
    pub fn set(&mut self, slot: usize, overlay: Option<&TestOverlay>) {
        let map = overlay.map(|overlay| overlay.slot_map(self.table.vocab));
        self.set_with_map(slot, overlay, &map.unwrap_or_default());
    }

    /// The same with another slot map than the overlay's own.
    pub fn set_with_map(&mut self, slot: usize, overlay: Option<&TestOverlay>, map: &[i32]) {
        let record = overlay.map_or(OverlaySlot::NONE, |overlay| OverlaySlot {
            rows: self.hold(&overlay.rows),
            ids: self.hold(&overlay.ids),
            slot_map: self.hold(map),
            n_override: overlay.ids.len() as u32,
            reserved: 0,
        });
        self.entries.upload(slot, &[record]).expect("a record");
    }

    /// What launches take, with `expected_ids` ids expected.
    pub fn table(&self, expected_ids: u32) -> OverlayTable {
        OverlayTable {
            expected_ids,
            ..self.table
        }
    }

    fn hold<T: bytemuck::Pod>(&mut self, values: &[T]) -> u64 {
        let buffer = DeviceBuffer::from_slice(Arc::clone(&self.memory), values).expect("upload");
        let address = buffer.ptr().0;
        self.held.push(buffer);
        address
    }
}

/// A buffer of `values`, from element `shift` on, so that its rows need not be aligned.
fn shifted<T: bytemuck::Pod>(backend: &TestBackend, shift: usize, values: &[T]) -> DeviceBuffer {
    let mut padded = vec![T::zeroed(); shift];
    padded.extend_from_slice(values);
    DeviceBuffer::from_slice(Arc::clone(backend) as _, &padded).expect("upload")
}

/// `rows` rows of `cols` values with `gap` values of `between` after each.
fn strided<T: Copy>(rows: &[T], cols: usize, gap: usize, between: T) -> Vec<T> {
    rows.chunks(cols)
        .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(between, gap)))
        .collect()
}

fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Distances of rows, over widths and strides on and off every boundary, NaN, infinities and zeros of both signs among the values: exact.
pub fn row_distances_are_exact(backend: &TestBackend) {
    let odd = [
        0x7fc0, 0x7fc1, 0xffc0, 0x7f80, 0xff80, 0x8000, 0x0000, 0x0001, 0x7f7f, 0xff7f,
    ]
    .map(bf16::from_bits);
    let mut rng = Rng::new(40);
    for (index, cols) in [1, 7, 8, 33, 256, 257, 2048, 4096].into_iter().enumerate() {
        for rows in [1, 5, 70] {
            let a = rng.values(rows * cols, Fill::Signed, 1.0);
            let mut b = a.clone();
            let mut a = a;
            for row in 0..rows {
                let at = row * cols + rng.below(0..cols);
                match row % 4 {
                    0 => b[at] = bf16::from_f32(a[at].to_f32() + rng.value(Fill::Signed, 0.3)),
                    1 => a[at] = odd[rng.below(0..odd.len())],
                    2 => {
                        a[at] = odd[rng.below(0..odd.len())];
                        b[at] = odd[rng.below(0..odd.len())];
                    }
                    _ => {}
                }
            }
            let expected: Vec<u32> = a
                .chunks(cols)
                .zip(b.chunks(cols))
                .map(|(a, b)| naive_distance(a, b).to_bits())
                .collect();
            let (gap_a, gap_b) = ([0, 8, 3][index % 3], [8, 0, 5][index % 3]);
            let nan = bf16::NAN;
            let a = shifted(backend, 0, &strided(&a, cols, gap_a, nan));
            let b = shifted(backend, 0, &strided(&b, cols, gap_b, bf16::ZERO));
            let mut found =
                DeviceBuffer::from_slice(Arc::clone(backend) as _, &vec![-1_f32; rows + 1])
                    .expect("distances");
            row_diff(
                (&**backend, Stream::OWN),
                a.mat(rows, cols, cols + gap_a).expect("a"),
                b.mat(rows, cols, cols + gap_b).expect("b"),
                found.f32_mat_mut(1, rows, rows).expect("distances"),
            )
            .expect("row diff");
            backend.synchronize(Stream::OWN).expect("synchronize");
            let found: Vec<f32> = found.download(0, rows + 1).expect("download");
            let bits: Vec<u32> = found[..rows].iter().map(|v| v.to_bits()).collect();
            assert_eq!(bits, expected, "{rows} rows of {cols}");
            assert_eq!(found[rows], -1.0, "past the last distance");
        }
    }
}

fn naive_distance(a: &[bf16], b: &[bf16]) -> f32 {
    let elements = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits());
    elements
        .map(|(a, b)| (a.to_f32() - b.to_f32()).abs())
        .map(|d| if d.is_nan() { f32::INFINITY } else { d })
        .fold(0.0, f32::max)
}

/// Rows of two tables in one, bit for bit; numbers past both leave their row, and gaps are not written.
pub fn gathered_rows_are_copies(backend: &TestBackend) {
    let mut rng = Rng::new(41);
    for (index, cols) in [1, 7, 8, 64, 333, 4096].into_iter().enumerate() {
        for (base_rows, delta_rows, rows) in [(0, 3, 9), (5, 0, 1), (40, 17, 130)] {
            let gap = [0, 8, 3][index % 3];
            let base = rng.values(base_rows * cols, Fill::Signed, 1.0);
            let delta = rng.values(delta_rows * cols, Fill::Signed, 1.0);
            let both = [base.clone(), delta.clone()].concat();
            let list: Vec<u32> = (0..rows)
                .map(|row| match row % 5 {
                    4 => [(base_rows + delta_rows) as u32, u32::MAX][row / 5 % 2],
                    _ => rng.below(0..base_rows + delta_rows) as u32,
                })
                .collect();
            let before = rng.values(rows * (cols + gap), Fill::Signed, 1.0);
            let mut expected = before.clone();
            for (row, &from) in list.iter().enumerate() {
                if let Some(from) = both.chunks(cols).nth(from as usize) {
                    expected[row * (cols + gap)..][..cols].copy_from_slice(from);
                }
            }
            let base = shifted(backend, 0, &strided(&base, cols, 8, bf16::NAN));
            let delta = shifted(backend, 0, &delta);
            let list = shifted(backend, 0, &list);
            let mut out = shifted(backend, 0, &before);
            gather_rows(
                (&**backend, Stream::OWN),
                GatherSources {
                    base: base.mat(base_rows, cols, cols + 8).expect("base"),
                    delta: delta.mat(delta_rows, cols, cols).expect("delta"),
                },
                list.row_indices(rows).expect("index"),
                out.mat_mut(rows, cols, cols + gap).expect("out"),
            )
            .expect("gather");
            backend.synchronize(Stream::OWN).expect("synchronize");
            let found: Vec<bf16> = out.download(0, before.len()).expect("download");
            assert_eq!(bits(&found), bits(&expected), "{rows} rows of {cols}");
        }
    }
}

/// Overlays of every kind for slots of one vocabulary: none, one id, some, all; and rows that name slots that do not exist.
#[derive(Debug)]
pub struct OverlayBatch {
    /// Token ids of the table.
    pub vocab: u32,
    /// Columns.
    pub hidden: u32,
    /// One a slot.
    pub overlays: Vec<Option<TestOverlay>>,
    /// The slot of each row.
    pub row_slots: Vec<i32>,
    /// `[rows, hidden]`.
    pub x: Vec<bf16>,
}

impl OverlayBatch {
    /// `rows` rows over five slots.
    pub fn random(seed: u64, fill: Fill, (vocab, hidden): (u32, u32), rows: usize) -> Self {
        let mut rng = Rng::new(seed);
        let every = |n: usize| (0..vocab).step_by(n).collect::<Vec<u32>>();
        let ids = [
            Some(every(3)),
            None,
            Some(vec![vocab - 1]),
            Some(every(1)),
            Some((0..vocab).filter(|id| id * 7 % 5 == 1).collect()),
        ];
        let mut overlay = |ids: Vec<u32>| TestOverlay::random(&mut rng, fill, ids, hidden as usize);
        let overlays: Vec<_> = ids.map(|ids| ids.map(&mut overlay)).into();
        let mut rng = Rng::new(seed ^ 99);
        let row_slots = (0..rows).map(|_| match rng.below(0..8) {
            0 => [-1, 5, i32::MAX, i32::MIN][rng.below(0..4)],
            _ => rng.below(0..5) as i32,
        });
        Self {
            vocab,
            hidden,
            overlays,
            row_slots: row_slots.collect(),
            x: rng.values(rows * hidden as usize, fill, 1.0),
        }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.row_slots.len()
    }

    /// The overlay of a row.
    pub fn overlay_of(&self, row: usize) -> Option<&TestOverlay> {
        let slot = usize::try_from(self.row_slots[row]).ok()?;
        self.overlays.get(slot)?.as_ref()
    }

    fn x_row(&self, row: usize) -> &[bf16] {
        &self.x[row * self.hidden as usize..][..self.hidden as usize]
    }

    fn select(&self, rows: &[usize]) -> Self {
        Self {
            overlays: self.overlays.clone(),
            row_slots: rows.iter().map(|&row| self.row_slots[row]).collect(),
            x: rows
                .iter()
                .flat_map(|&row| self.x_row(row).iter().copied())
                .collect(),
            ..*self
        }
    }
}

fn kernels(backend: &TestBackend) -> LoraKernels {
    LoraKernels::new(Arc::clone(backend), LaunchOptions::default())
}

/// Rows of a mixed batch after the gather: bit copies of the overlay's rows where it has the token, and nothing else is touched: corrupt slot maps, tokens
/// and slots that do not exist included. Scaled embeddings are multiplied and rounded once.
pub fn replaced_rows_are_copies(backend: &TestBackend) {
    for (index, hidden) in [1_u32, 7, 8, 64, 333, 4096].into_iter().enumerate() {
        let vocab = 50;
        let mut batch =
            OverlayBatch::random(index as u64, Fill::Signed, (vocab, hidden), 67 + index);
        let rows = batch.rows();
        let mut rng = Rng::new(7);
        let tokens: Vec<i32> = (0..rows)
            .map(|row| match row % 9 {
                8 => [-1, vocab as i32, i32::MAX, i32::MIN][row / 9 % 4],
                _ => rng.below(0..vocab as usize) as i32,
            })
            .collect();
        let mut device = DeviceOverlays::upload(backend, &batch.overlays, (vocab, hidden));
        // Slot 3 has every token; these entries of its map name no row.
        let overlay = batch.overlays[3].as_mut().expect("slot 3 has an overlay");
        let mut map = overlay.slot_map(vocab);
        (map[4], map[9], map[11]) = (vocab as i32, i32::MAX, i32::MIN);
        device.set_with_map(3, Some(overlay), &map);
        let overlay = batch.overlays[3].as_ref();
        let slots = shifted(backend, 0, &batch.row_slots);
        let ids = shifted(backend, 0, &tokens);
        let (cols, gap) = (hidden as usize, [0, 8, 3][index % 3]);
        let before = rng.values(rows * (cols + gap), Fill::Signed, 1.0);
        for multiplier in [None, Some(1.7_f32)] {
            for one in [None, Some(3_u32), Some(1), Some(77)] {
                let mut expected = before.clone();
                for row in 0..rows {
                    let of_row = match one {
                        None => batch.overlay_of(row),
                        Some(3) => overlay,
                        Some(_) => None,
                    };
                    let whole = of_row.is_some_and(|o| o.ids.len() == vocab as usize);
                    let corrupt = whole && [4, 9, 11].contains(&tokens[row]);
                    let found = of_row.and_then(|o| o.row(u32::try_from(tokens[row]).ok()?, cols));
                    if let (Some(from), false) = (found, corrupt) {
                        let to = &mut expected[row * (cols + gap)..][..cols];
                        for (to, from) in to.iter_mut().zip(from) {
                            *to = multiplier.map_or(*from, |by| bf16::from_f32(from.to_f32() * by));
                        }
                    }
                }
                let mut out = shifted(backend, 0, &before);
                let tokens = OverlayTokens {
                    ids: ids.token_ids(rows).expect("tokens"),
                    slots: match one {
                        None => SlotOfRow::Each(slots.row_slots(rows).expect("slots")),
                        Some(slot) => SlotOfRow::All(slot),
                    },
                };
                let out_rows = out.mat_mut(rows, cols, cols + gap).expect("out");
                let on = (&kernels(backend), Stream::OWN);
                let applied = replace_rows(on, &device.table(0), tokens, out_rows, multiplier);
                assert_eq!(applied, Ok(Applied::Launched { launches: 1 }));
                backend.synchronize(Stream::OWN).expect("synchronize");
                let found: Vec<bf16> = out.download(0, before.len()).expect("download");
                assert_eq!(bits(&found), bits(&expected), "{rows} rows of {hidden}");
            }
        }
    }
}

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
const BEFORE: f32 = -3.5;

/// The logits of a batch, as FP32, gaps left out but looked at. Panics where the backend gives an error.
pub fn logits_of(
    backend: &TestBackend,
    batch: &OverlayBatch,
    device: &DeviceOverlays,
    way: HeadWay,
) -> Vec<f32> {
    let (rows, hidden, vocab) = (batch.rows(), batch.hidden as usize, batch.vocab as usize);
    let (x_stride, stride) = (hidden + way.gap, vocab + way.gap);
    let x = shifted(backend, 0, &strided(&batch.x, hidden, way.gap, bf16::NAN));
    let spec = RowGroupsSpec {
        max_rows: rows as u32,
        entries: batch.overlays.len() as u32,
        small_max: way.small_max,
    };
    let mut groups = RowGroups::new(Arc::clone(backend) as _, spec).expect("groups");
    let slots = shifted(backend, 0, &batch.row_slots);
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
        let mut out = shifted(backend, 0, &vec![BEFORE; rows * stride]);
        let logits = out.f32_mat_mut(rows, vocab, stride).expect("logits");
        applied = head_logits(on, &table, x, head, LogitsMut::F32(logits));
        backend.synchronize(Stream::OWN).expect("synchronize");
        out.download(0, rows * stride).expect("download")
    } else {
        let mut out = shifted(backend, 0, &vec![bf16::from_f32(BEFORE); rows * stride]);
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

/// Worst miss of `found` over what is allowed, by an f64 reference; logits that are not overridden must have kept their bits.
fn worst_miss(batch: &OverlayBatch, way: HeadWay, found: &[f32]) -> f64 {
    let (vocab, hidden) = (batch.vocab as usize, batch.hidden as usize);
    let mut worst = 0_f64;
    for (row, found) in found.chunks(vocab).enumerate() {
        let overlay = batch.overlay_of(row);
        for (id, &found) in (0..).zip(found) {
            let Some(weights) = overlay.and_then(|overlay| overlay.row(id, hidden)) else {
                assert_eq!(found, BEFORE, "row {row}, id {id} is not overridden");
                continue;
            };
            let products = batch.x_row(row).iter().zip(weights);
            let products = products.map(|(x, w)| x.to_f64() * w.to_f64());
            let (sum, magnitude) = products.fold((0.0, 0.0), |(sum, magnitude), product| {
                (sum + product, magnitude + f64::abs(product))
            });
            let rounding = if way.f32_logits { 0.0 } else { ROUNDOFF };
            let allowed = rounding * f64::abs(sum) + SUM_ERROR * magnitude;
            let miss = (f64::from(found) - sum).abs() / allowed;
            worst = worst.max(if miss.is_nan() { f64::INFINITY } else { miss });
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
    [HeadWay::PLAIN, large, wide, unaligned, wide_unaligned].into_iter()
}

/// Logits against the reference: widths and vocabularies on and off every boundary, BF16 and FP32, overlays of one id to all, few rows and many.
pub fn logits_match_the_reference(backend: &TestBackend) {
    const SIZES: [(u32, u32, usize); 7] = [
        (5, 1, 3),
        (40, 33, 9),
        (130, 64, 70),
        (257, 200, 17),
        (129, 1000, 40),
        (33, 257, 300),
        (64, 4096, 12),
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
    let x = shifted(backend, 0, &batch.x);
    for slot in [0, 1, 3, 60] {
        batch.row_slots = vec![slot; rows];
        let expected = logits_of(backend, &batch, &device, way);
        let (vocab, hidden) = (vocab as usize, hidden as usize);
        let mut out = shifted(backend, 0, &vec![BEFORE; rows * vocab]);
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

/// A step of embedding and head on buffers that stay where they are.
struct Step {
    backend: TestBackend,
    kernels: LoraKernels,
    overlays: DeviceOverlays,
    groups: RowGroups,
    tokens: DeviceBuffer,
    row_slots: DeviceBuffer,
    x: DeviceBuffer,
    embedding: DeviceBuffer,
    logits: DeviceBuffer,
    size: (usize, usize, usize),
}

impl Step {
    fn new(backend: &TestBackend, batch: &OverlayBatch) -> Self {
        let (rows, vocab, hidden) = (batch.rows(), batch.vocab as usize, batch.hidden as usize);
        let spec = RowGroupsSpec {
            max_rows: rows as u32,
            entries: batch.overlays.len() as u32,
            small_max: 48,
        };
        Self {
            backend: Arc::clone(backend),
            kernels: kernels(backend),
            overlays: DeviceOverlays::upload(backend, &batch.overlays, (batch.vocab, batch.hidden)),
            groups: RowGroups::new(Arc::clone(backend) as _, spec).expect("groups"),
            tokens: shifted(backend, 0, &vec![0_i32; rows]),
            row_slots: shifted(backend, 0, &batch.row_slots),
            x: shifted(backend, 0, &batch.x),
            embedding: shifted(backend, 0, &vec![bf16::ONE; rows * hidden]),
            logits: shifted(backend, 0, &vec![BEFORE; rows * vocab]),
            size: (rows, vocab, hidden),
        }
    }

    fn enqueue(&mut self, stream: Stream) {
        let (rows, vocab, hidden) = self.size;
        let slots = self.row_slots.row_slots(rows).expect("slots");
        let grouped = self.groups.build(&*self.backend, stream, slots);
        grouped.expect("group rows");
        let (on, table) = ((&self.kernels, stream), self.overlays.table(4));
        let tokens = OverlayTokens {
            ids: self.tokens.token_ids(rows).expect("tokens"),
            slots: SlotOfRow::Each(slots),
        };
        let out = self.embedding.mat_mut(rows, hidden, hidden).expect("out");
        let replaced = replace_rows(on, &table, tokens, out, None);
        let logits = self.logits.f32_mat_mut(rows, vocab, vocab).expect("logits");
        let x = self.x.mat(rows, hidden, hidden).expect("x");
        let head = HeadRows::Grouped(&self.groups);
        let computed = head_logits(on, &table, x, head, LogitsMut::F32(logits));
        let launched = Ok(Applied::Launched { launches: 1 });
        assert_eq!([replaced, computed], [launched.clone(), launched]);
    }

    /// Sets everything that a step reads and writes, but for the overlays.
    fn reset(&mut self, row_slots: &[i32], tokens: &[i32]) {
        let (rows, vocab, hidden) = self.size;
        self.row_slots.upload(0, row_slots).expect("upload");
        self.tokens.upload(0, tokens).expect("upload");
        let ones = vec![bf16::ONE; rows * hidden];
        self.embedding.upload(0, &ones).expect("upload");
        let before = vec![BEFORE; rows * vocab];
        self.logits.upload(0, &before).expect("upload");
    }

    fn assert_right(&self, batch: &OverlayBatch, tokens: &[i32]) {
        let (rows, vocab, hidden) = self.size;
        self.backend.synchronize(Stream::OWN).expect("synchronize");
        let found: Vec<bf16> = self.embedding.download(0, rows * hidden).expect("download");
        for (row, found) in found.chunks(hidden).enumerate() {
            let overlay = batch.overlay_of(row);
            let expected = overlay.and_then(|overlay| overlay.row(tokens[row] as u32, hidden));
            let ones = vec![bf16::ONE; hidden];
            assert_eq!(bits(found), bits(expected.unwrap_or(&ones)), "row {row}");
        }
        let logits: Vec<f32> = self.logits.download(0, rows * vocab).expect("download");
        let way = HeadWay {
            f32_logits: true,
            ..HeadWay::PLAIN
        };
        let worst = worst_miss(batch, way, &logits);
        assert!(worst <= 1.0, "{rows} rows: {worst}");
    }
}

/// What a backend makes of work that it captures: something that runs it again.
pub type Replay = Box<dyn Fn()>;

/// Embedding and head enqueued once, by `capture`, and replayed with other tokens, slots and overlays each time.
pub fn replays_follow_swaps(
    backend: &TestBackend,
    rows: usize,
    capture: impl FnOnce(&mut dyn FnMut(Stream)) -> Replay,
) {
    let (vocab, hidden) = (60_u32, 192_u32);
    let mut batch = OverlayBatch::random(12, Fill::Signed, (vocab, hidden), rows);
    let mut step = Step::new(backend, &batch);
    step.enqueue(Stream::OWN);
    backend.synchronize(Stream::OWN).expect("synchronize");
    let replay = capture(&mut |stream| step.enqueue(stream));
    for round in 0..4_usize {
        // The set of overlays moves on by a slot, with fresh rows at other addresses.
        batch.overlays.rotate_right(round.min(1));
        for (slot, overlay) in batch.overlays.iter_mut().enumerate() {
            if let Some(overlay) = overlay {
                overlay.rows.rotate_left(3);
            }
            step.overlays.set(slot, overlay.as_ref());
        }
        let of_row = |row: usize| ((row * (round + 1)) % 7) as i32 - 1;
        batch.row_slots = (0..rows).map(of_row).collect();
        let token = |row: usize| ((row * 13 + round) % vocab as usize) as i32;
        let tokens: Vec<i32> = (0..rows).map(token).collect();
        step.reset(&batch.row_slots, &tokens);
        replay();
        step.assert_right(&batch, &tokens);
    }
}
