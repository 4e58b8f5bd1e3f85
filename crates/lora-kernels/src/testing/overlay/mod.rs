//! Bodies for whole-row operations: copies are compared bit for bit, logits at a tolerance and, between two ways to compute them, bit
//! for bit.

mod head;
mod replay;
mod rows;

pub use head::{
    HeadWay, ids_past_the_vocabulary_are_skipped, logit_miss, logits_do_not_depend_on_the_batch,
    logits_match_the_reference, logits_of, one_slot_for_all_rows_equals_rows_of_it,
    wrong_overlays_are_caught,
};
pub use replay::{Replay, replays_follow_swaps};
pub use rows::{gathered_rows_are_copies, replaced_rows_are_copies, row_distances_are_exact};

use super::{Fill, Rng, TestBackend};
use crate::overlay::OverlayTable;
use crate::{DeviceBuffer, LaunchOptions, LoraKernels, OverlaySlot};
use half::bf16;
use lora_weights::device::DeviceMemory;
use std::sync::Arc;

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

/// A buffer of `values`.
fn upload<T: bytemuck::Pod>(backend: &TestBackend, values: &[T]) -> DeviceBuffer {
    DeviceBuffer::from_slice(Arc::clone(backend) as _, values).expect("upload")
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
