//! Which adapter each row of a step follows, on the device.

use crate::{LoraRuntime, RuntimeError};
use lora_kernels::overlay::SlotOfRow;
use lora_kernels::{
    DeviceBuffer, LoraRows, RowGroups, RowGroupsSpec, RowSlots, Stream, TokenAdapters,
};
use lora_weights::fill_seq_slot_host;

/// The row map of a step and the groups of rows that share an adapter, in device buffers allocated once.
///
/// Fill it once a step, before the first layer; all layers of the step read it. A step that is still running on the
/// device reads it too: an engine that prepares the next step meanwhile keeps two and alternates.
#[derive(Debug)]
pub struct RoutedBatch {
    rows: Vec<i32>,
    seq_slot: DeviceBuffer,
    /// Whether `seq_slot` is the row map of the step.
    holds_map: bool,
    groups: RowGroups,
}

impl RoutedBatch {
    pub(crate) fn new(runtime: &LoraRuntime, max_rows: u32) -> Result<Self, RuntimeError> {
        let kernels = runtime.kernels();
        let spec = RowGroupsSpec::new(
            max_rows,
            runtime.weights().pool().max_loras,
            kernels.options().gemv_max_m,
        );
        Ok(Self {
            rows: Vec::with_capacity(max_rows as usize),
            seq_slot: DeviceBuffer::zeroed(
                runtime.memory(),
                u64::from(max_rows) * size_of::<i32>() as u64,
            )?,
            holds_map: false,
            groups: RowGroups::new(runtime.memory(), spec)?,
        })
    }

    /// Resolves `requests` against the slots as they are now, pads to `padded` rows, uploads the row map and groups the rows on `stream`.
    pub(crate) fn fill(
        &mut self,
        runtime: &LoraRuntime,
        stream: Stream,
        requests: &[i32],
        padded: usize,
    ) -> Result<(), RuntimeError> {
        self.holds_map = false;
        self.rows.resize(padded, 0);
        fill_seq_slot_host(requests, &mut self.rows, runtime.weights().slot_space())?;
        self.seq_slot.upload(0, &self.rows)?;
        let rows = self.seq_slot.row_slots(padded)?;
        self.groups
            .build(&**runtime.kernels().backend(), stream, rows)?;
        self.holds_map = true;
        Ok(())
    }

    /// Groups the rows of a row map that is on the device already: legal under graph capture, where a replayed graph
    /// groups whatever the map then holds.
    pub(crate) fn fill_from_device(
        &mut self,
        runtime: &LoraRuntime,
        stream: Stream,
        rows: RowSlots<'_>,
    ) -> Result<(), RuntimeError> {
        self.holds_map = false;
        Ok(self
            .groups
            .build(&**runtime.kernels().backend(), stream, rows)?)
    }

    /// The rows as launches take them.
    pub fn rows(&self) -> LoraRows<'_> {
        LoraRows::Routed(&self.groups)
    }

    /// The slot of each row as it was last [routed](LoraRuntime::route) from the host, as expert folds take it. A map that is on the device already
    /// serves them itself.
    ///
    /// # Errors
    /// None in practice: the view is inside the buffer.
    pub fn token_adapters(&self) -> Result<TokenAdapters<'_>, RuntimeError> {
        Ok(self.seq_slot.token_adapters(self.rows.len())?)
    }

    /// The slot that each row follows; `None` where the step was routed from a row map of the engine's own.
    pub(crate) fn slot_of_row(&self) -> Result<Option<SlotOfRow<'_>>, RuntimeError> {
        if !self.holds_map {
            return Ok(None);
        }
        Ok(Some(SlotOfRow::Each(
            self.seq_slot.row_slots(self.rows.len())?,
        )))
    }

    /// The groups.
    pub fn groups(&self) -> &RowGroups {
        &self.groups
    }
}
