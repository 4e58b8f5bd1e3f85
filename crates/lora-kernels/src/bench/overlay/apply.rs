//! Embedding rows replaced and logits computed anew, for a batch of several adapters.

use super::build::filled;
use super::{BLOCK_ROWS, Launches, OverlayShape, OverlayWork};
use crate::overlay::{
    HeadRows, LogitsMut, OverlayTable, OverlayTokens, SlotOfRow, head_logits, replace_rows,
};
use crate::testing::naive::ROUNDOFF;
use crate::testing::overlay::logit_miss;
use crate::testing::{Fill, Rng, Verdict};
use crate::{
    DeviceBuffer, KernelError, LaunchOptions, LoraBackend, LoraKernels, OverlaySlot, RowGroups,
    RowGroupsSpec, Stream,
};
use half::bf16;
use std::sync::Arc;

/// Times the L2 that is read between two uses of an overlay.
const COLD_L2S: u64 = 4;

/// Rows and ids whose logits are compared with the reference.
const CHECKED: (usize, usize) = (9, 70);

/// Overlays of all adapters, and the table that names them.
struct Copy {
    _rows: Vec<DeviceBuffer>,
    _entries: DeviceBuffer,
    table: OverlayTable,
}

pub(super) struct Apply {
    kernels: LoraKernels,
    shape: OverlayShape,
    rows: usize,
    adapters: usize,
    /// Ids of every overlay, ascending.
    ids: Vec<u32>,
    /// What overlays' rows repeat.
    block: Vec<bf16>,
    hidden_rows: Vec<bf16>,
    copies: Vec<Copy>,
    _ids_and_map: [DeviceBuffer; 2],
    tokens: DeviceBuffer,
    row_slots: DeviceBuffer,
    groups: RowGroups,
    x: DeviceBuffer,
    embedding: DeviceBuffer,
    logits: DeviceBuffer,
}

impl Apply {
    pub(super) fn new(
        backend: &Arc<dyn LoraBackend>,
        shape: OverlayShape,
    ) -> Result<Self, KernelError> {
        let OverlayWork::Apply {
            rows,
            adapters,
            ids,
            places,
        } = shape.work
        else {
            unreachable!("a bench of applying is made for nothing else");
        };
        let memory = || Arc::clone(backend) as Arc<_>;
        let (hidden, count) = (shape.hidden as usize, rows as usize);
        let mut rng = Rng::new(2);
        let block_rows = BLOCK_ROWS.min(ids as usize);
        let rms = 1.0 / (hidden as f32).sqrt();
        let block = rng.values(block_rows * hidden, Fill::Signed, rms);
        let hidden_rows = rng.values(count * hidden, Fill::Signed, 1.0);
        let id = |place| places.id(place, ids, shape.vocab);
        let ids: Vec<u32> = (0..ids).map(id).collect();
        let mut map = vec![-1_i32; shape.vocab as usize];
        for (place, &id) in (0..).zip(&ids) {
            map[id as usize] = place;
        }
        let ids_and_map = [
            DeviceBuffer::from_slice(memory(), &ids)?,
            DeviceBuffer::from_slice(memory(), &map)?,
        ];
        let tokens: Vec<i32> = (0..count)
            .map(|row| ids[row * 31 % ids.len()] as i32)
            .collect();
        let row_slots: Vec<i32> = (0..rows).map(|row| (row % adapters) as i32).collect();
        let options = LaunchOptions::default();
        let spec = RowGroupsSpec::new(rows, adapters, options.gemv_max_m);
        let l2_bytes = backend.caps().l2_bytes;
        let bytes = u64::from(adapters) * (ids.len() * hidden * 2) as u64;
        let copies = match l2_bytes {
            0 => 1,
            // The rest of the batch is shared by the copies, and as warm as an engine's would be.
            _ if bytes >= COLD_L2S * l2_bytes => 1,
            _ => (COLD_L2S * l2_bytes).div_ceil(bytes) + 1,
        };
        let copies = (0..copies)
            .map(|_| upload_overlays(backend, (shape, adapters), &block, &ids_and_map, ids.len()));
        let mut bench = Self {
            copies: copies.collect::<Result<_, _>>()?,
            kernels: LoraKernels::new(Arc::clone(backend), options),
            tokens: DeviceBuffer::from_slice(memory(), &tokens)?,
            row_slots: DeviceBuffer::from_slice(memory(), &row_slots)?,
            groups: RowGroups::new(memory(), spec)?,
            x: DeviceBuffer::from_slice(memory(), &hidden_rows)?,
            embedding: DeviceBuffer::zeroed(memory(), (count * hidden * 2) as u64)?,
            logits: DeviceBuffer::zeroed(memory(), u64::from(rows) * u64::from(shape.vocab) * 2)?,
            rows: count,
            adapters: adapters as usize,
            _ids_and_map: ids_and_map,
            shape,
            ids,
            block,
            hidden_rows,
        };
        let slots = bench.row_slots.row_slots(count)?;
        bench.groups.build(&**backend, Stream::OWN, slots)?;
        backend.synchronize(Stream::OWN)?;
        Ok(bench)
    }

    /// Row `place` of adapter `adapter`'s overlay, by the block that fills it.
    fn overlay_row(&self, adapter: usize, place: usize) -> &[bf16] {
        let hidden = self.shape.hidden as usize;
        let rows = self.block.len() / hidden;
        &self.block[(place + adapter) % rows * hidden..][..hidden]
    }

    /// Worst miss of a row's logits of some ids.
    fn worst_of_row(&self, row: usize) -> Result<f64, KernelError> {
        let (vocab, hidden) = (self.shape.vocab as usize, self.shape.hidden as usize);
        let logits: Vec<bf16> = self.logits.download(row * vocab, vocab)?;
        let x = &self.hidden_rows[row * hidden..][..hidden];
        let mut worst = 0_f64;
        for place in (0..self.ids.len()).step_by(self.ids.len() / CHECKED.1 + 1) {
            let weights = self.overlay_row(row % self.adapters, place);
            let found = logits[self.ids[place] as usize].to_f64();
            worst = worst.max(logit_miss((x, weights), found, ROUNDOFF));
        }
        Ok(worst)
    }
}

/// Overlays of all adapters; that of adapter i begins with row i of `block`.
fn upload_overlays(
    backend: &Arc<dyn LoraBackend>,
    (shape, adapters): (OverlayShape, u32),
    block: &[bf16],
    [ids, map]: &[DeviceBuffer; 2],
    count: usize,
) -> Result<Copy, KernelError> {
    let hidden = shape.hidden as usize;
    let block_rows = block.len() / hidden;
    let mut rows = Vec::new();
    let mut records = Vec::new();
    for adapter in 0..adapters as usize {
        let mut own = block.to_vec();
        own.rotate_left(adapter % block_rows * hidden);
        let overlay = filled(backend, &own, count * hidden)?;
        records.push(OverlaySlot {
            rows: overlay.ptr().0,
            ids: ids.ptr().0,
            slot_map: map.ptr().0,
            n_override: count as u32,
            reserved: 0,
        });
        rows.push(overlay);
    }
    let entries = DeviceBuffer::from_slice(Arc::clone(backend) as _, &records)?;
    let table = OverlayTable {
        entries: entries.ptr(),
        slots: adapters,
        vocab: shape.vocab,
        hidden: shape.hidden,
        expected_ids: count as u32,
    };
    Ok(Copy {
        _rows: rows,
        _entries: entries,
        table,
    })
}

impl Launches for Apply {
    fn copies(&self) -> usize {
        self.copies.len()
    }

    fn enqueue(&mut self, part: usize, copy: usize, stream: Stream) -> Result<(), KernelError> {
        let (vocab, hidden) = (self.shape.vocab as usize, self.shape.hidden as usize);
        let (on, table) = ((&self.kernels, stream), &self.copies[copy].table);
        if part == 0 {
            let tokens = OverlayTokens {
                ids: self.tokens.token_ids(self.rows)?,
                slots: SlotOfRow::Each(self.row_slots.row_slots(self.rows)?),
            };
            let out = self.embedding.mat_mut(self.rows, hidden, hidden)?;
            return replace_rows(on, table, tokens, out, None).map(drop);
        }
        let x = self.x.mat(self.rows, hidden, hidden)?;
        let logits = LogitsMut::Bf16(self.logits.mat_mut(self.rows, vocab, vocab)?);
        head_logits(on, table, x, HeadRows::Grouped(&self.groups), logits).map(drop)
    }

    fn check(&mut self) -> Result<Verdict, KernelError> {
        self.enqueue(0, 0, Stream::OWN)?;
        self.enqueue(1, 0, Stream::OWN)?;
        self.kernels.backend().synchronize(Stream::OWN)?;
        let hidden = self.shape.hidden as usize;
        let mut worst = 0_f64;
        for row in (0..self.rows).step_by(self.rows / CHECKED.0 + 1) {
            let place = row * 31 % self.ids.len();
            let expected = self.overlay_row(row % self.adapters, place);
            let found: Vec<bf16> = self.embedding.download(row * hidden, hidden)?;
            let same = found
                .iter()
                .zip(expected)
                .all(|(a, b)| a.to_bits() == b.to_bits());
            worst = worst.max(super::exact(same).worst);
            worst = worst.max(self.worst_of_row(row)?);
        }
        Ok(Verdict { worst, rms: 0.0 })
    }
}
