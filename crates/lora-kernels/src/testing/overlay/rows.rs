//! Bodies of what moves or compares whole rows.

use super::{DeviceOverlays, OverlayBatch, bits, kernels, strided, upload};
use crate::overlay::{
    GatherSources, OverlayTokens, SlotOfRow, gather_rows, replace_rows, row_diff,
};
use crate::testing::{Fill, Rng, TestBackend};
use crate::{Applied, DeviceBuffer, Stream};
use half::bf16;
use std::sync::Arc;

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
            let a = upload(backend, &strided(&a, cols, gap_a, nan));
            let b = upload(backend, &strided(&b, cols, gap_b, bf16::ZERO));
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
            let base = upload(backend, &strided(&base, cols, 8, bf16::NAN));
            let delta = upload(backend, &delta);
            let list = upload(backend, &list);
            let mut out = upload(backend, &before);
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
        let slots = upload(backend, &batch.row_slots);
        let ids = upload(backend, &tokens);
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
                let mut out = upload(backend, &before);
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
