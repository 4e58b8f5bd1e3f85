//! A row diff of two tables, and a gather of the rows that differ.

use super::{BLOCK_ROWS, Launches, OverlayShape, exact};
use crate::overlay::{GatherSources, gather_rows, row_diff};
use crate::testing::{Fill, Rng, Verdict};
use crate::{DeviceBuffer, KernelError, LoraBackend, Stream};
use half::bf16;
use std::sync::Arc;

/// What a changed row differs by, in one element.
const CHANGE: f32 = 0.5;

pub(super) struct Build {
    backend: Arc<dyn LoraBackend>,
    size: (usize, usize),
    adapter: DeviceBuffer,
    served: DeviceBuffer,
    distances: DeviceBuffer,
    /// Rows that differ, ascending.
    changed: Vec<u32>,
    index: DeviceBuffer,
    compact: DeviceBuffer,
}

impl Build {
    pub(super) fn new(
        backend: &Arc<dyn LoraBackend>,
        shape: OverlayShape,
        changed: u32,
    ) -> Result<Self, KernelError> {
        let (vocab, hidden) = (shape.vocab as usize, shape.hidden as usize);
        let memory = || Arc::clone(backend) as _;
        let block = Rng::new(1).values(BLOCK_ROWS.min(vocab) * hidden, Fill::Signed, 0.02);
        let mut adapter = filled(backend, &block, vocab * hidden)?;
        let served = filled(backend, &block, vocab * hidden)?;
        let spread = |i: u32| (u64::from(i) * u64::from(shape.vocab) / u64::from(changed)) as u32;
        let changed: Vec<u32> = (0..changed).map(spread).collect();
        for &row in &changed {
            let at = row as usize * hidden + row as usize % hidden;
            let value = block[at % block.len()].to_f32() + CHANGE;
            adapter.upload(at, &[bf16::from_f32(value)])?;
        }
        Ok(Self {
            distances: DeviceBuffer::zeroed(memory(), vocab as u64 * 4)?,
            index: DeviceBuffer::from_slice(memory(), &changed)?,
            compact: DeviceBuffer::zeroed(memory(), (changed.len() * hidden * 2) as u64)?,
            backend: Arc::clone(backend),
            size: (vocab, hidden),
            adapter,
            served,
            changed,
        })
    }
}

/// A table of `elements` elements, `block` again and again.
pub(super) fn filled(
    backend: &Arc<dyn LoraBackend>,
    block: &[bf16],
    elements: usize,
) -> Result<DeviceBuffer, KernelError> {
    let mut table = DeviceBuffer::zeroed(Arc::clone(backend) as _, elements as u64 * 2)?;
    for first in (0..elements).step_by(block.len()) {
        table.upload(first, &block[..block.len().min(elements - first)])?;
    }
    Ok(table)
}

impl Launches for Build {
    fn copies(&self) -> usize {
        1 // a whole vocabulary's table is many times any cache
    }

    fn enqueue(&mut self, part: usize, _: usize, stream: Stream) -> Result<(), KernelError> {
        let (vocab, hidden) = self.size;
        let on = (&*self.backend, stream);
        let base = self.adapter.mat(vocab, hidden, hidden)?;
        if part == 0 {
            let served = self.served.mat(vocab, hidden, hidden)?;
            return row_diff(
                on,
                base,
                served,
                self.distances.f32_mat_mut(1, vocab, vocab)?,
            );
        }
        let sources = GatherSources {
            base,
            delta: self.served.mat(0, hidden, hidden)?,
        };
        let rows = self.changed.len();
        let out = self.compact.mat_mut(rows, hidden, hidden)?;
        gather_rows(on, sources, self.index.row_indices(rows)?, out)
    }

    fn check(&mut self) -> Result<Verdict, KernelError> {
        self.enqueue(0, 0, Stream::OWN)?;
        self.enqueue(1, 0, Stream::OWN)?;
        self.backend.synchronize(Stream::OWN)?;
        let (vocab, hidden) = self.size;
        let distances: Vec<f32> = self.distances.download(0, vocab)?;
        // What rounding to BF16 leaves of the change.
        let differs = |distance: f32| (distance - CHANGE).abs() <= CHANGE / 128.0;
        let found = distances.iter().zip(0..).filter(|(d, _)| **d != 0.0);
        let mut same = found.clone().all(|(distance, _)| differs(*distance));
        same &= found.map(|(_, row)| row).eq(self.changed.iter().copied());
        for (place, &row) in self
            .changed
            .iter()
            .enumerate()
            .step_by(self.changed.len() / 7 + 1)
        {
            let copy: Vec<u16> = self.compact.download(place * hidden, hidden)?;
            let source: Vec<u16> = self.adapter.download(row as usize * hidden, hidden)?;
            same &= copy == source;
        }
        Ok(exact(same))
    }
}
