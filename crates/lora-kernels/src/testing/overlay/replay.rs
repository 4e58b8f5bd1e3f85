//! Work that is captured once and replayed while overlays are swapped.

use super::head::{BEFORE, worst_miss};
use super::{DeviceOverlays, HeadWay, OverlayBatch, bits, kernels, upload};
use crate::overlay::{HeadRows, LogitsMut, OverlayTokens, SlotOfRow, head_logits, replace_rows};
use crate::testing::{Fill, TestBackend};
use crate::{Applied, DeviceBuffer, LoraKernels, RowGroups, RowGroupsSpec, Stream};
use half::bf16;
use std::sync::Arc;

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
        let spec = RowGroupsSpec::new(rows as u32, batch.overlays.len() as u32, 48);
        Self {
            backend: Arc::clone(backend),
            kernels: kernels(backend),
            overlays: DeviceOverlays::upload(backend, &batch.overlays, (batch.vocab, batch.hidden)),
            groups: RowGroups::new(Arc::clone(backend) as _, spec).expect("groups"),
            tokens: upload(backend, &vec![0_i32; rows]),
            row_slots: upload(backend, &batch.row_slots),
            x: upload(backend, &batch.x),
            embedding: upload(backend, &vec![bf16::ONE; rows * hidden]),
            logits: upload(backend, &vec![BEFORE; rows * vocab]),
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
