//! Rows of a MoE block to table entries, on the device: what lets a captured graph follow whatever the router chooses.

use crate::{
    DeviceBuffer, EntryParams, ExpertIds, KernelError, LoraBackend, MAX_ENTRIES, MAX_ROWS, MatRef,
    Operand, ResidentOfSlot, RoutedX, RowIndices, RowSlots, Stream, TokenAdapters,
};
use bytemuck::Zeroable;
use lora_weights::device::DeviceMemory;
use std::num::NonZeroU32;
use std::sync::Arc;

const ROUTING: Operand = Operand::shared("expert routing");

/// How the rows of a MoE block say whose token and which expert they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertRouting<'a> {
    /// Unsorted: row `t * top_k + j` is token t's j-th expert.
    Unsorted {
        /// `[tokens x top_k]`.
        experts: ExpertIds<'a>,
        /// Experts a token.
        top_k: NonZeroU32,
    },
    /// Sorted by expert: rows `offsets[e]..offsets[e + 1]` are expert e's.
    Sorted {
        /// `[num_experts + 1]`, not decreasing.
        offsets: RowIndices<'a>,
        /// `[rows]`: the token of each row.
        tokens: RowIndices<'a>,
    },
}

impl<'a> ExpertRouting<'a> {
    /// Rows of the block.
    pub fn rows(&self) -> usize {
        match self {
            Self::Unsorted { experts, .. } => experts.len(),
            Self::Sorted { tokens, .. } => tokens.len(),
        }
    }

    /// x of gate and up, one row a token, as the rows of the block read it. x of down has a row for each row of the block:
    /// [`RoutedX::same_rows`].
    pub fn token_x(&self, x: MatRef<'a>) -> RoutedX<'a> {
        match *self {
            Self::Unsorted { top_k, .. } => RoutedX::repeated(x, top_k),
            Self::Sorted { tokens, .. } => RoutedX::gathered(x, tokens),
        }
    }
}

/// What entries are numbered over: `residents x num_experts`, experts of one adapter together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertSpace<'a> {
    /// Which resident adapter each slot of the pool is.
    pub resident_of_slot: ResidentOfSlot<'a>,
    /// Adapters that the tables have room for.
    pub residents: u32,
    /// Experts of the block.
    pub num_experts: u32,
}

impl ExpertSpace<'_> {
    /// Entries of each table.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for none, or more than [`MAX_ENTRIES`].
    pub fn entries(&self) -> Result<u32, KernelError> {
        let entries = u64::from(self.residents) * u64::from(self.num_experts);
        KernelError::check_range(ROUTING, "entries", entries, (1, MAX_ENTRIES.into()))?;
        Ok(entries as u32)
    }
}

/// The table entry of each row of a MoE block, in a device buffer allocated once; -1 where a row has no fold. It is the row map that
/// [`RowGroups::build`](crate::RowGroups::build) groups by.
#[derive(Debug)]
pub struct ExpertEntries {
    buffer: DeviceBuffer,
    max_rows: u32,
    rows: u32,
}

impl ExpertEntries {
    /// Room for `max_rows` rows: tokens times top-k.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for none, or more than [`MAX_ROWS`]; what the allocation gives.
    pub fn new(memory: Arc<dyn DeviceMemory>, max_rows: u32) -> Result<Self, KernelError> {
        KernelError::check_range(ROUTING, "max_rows", max_rows.into(), (1, MAX_ROWS.into()))?;
        Ok(Self {
            buffer: DeviceBuffer::zeroed(memory, u64::from(max_rows) * size_of::<i32>() as u64)?,
            max_rows,
            rows: 0,
        })
    }

    /// Rows it was last built for.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Enqueues the search on `stream`; legal under graph capture. `adapters` has one slot a token. A row whose expert, token, slot or
    /// resident is negative or past its limit gets no entry. No rows: nothing is enqueued.
    ///
    /// # Errors
    /// [`KernelError::TooManyRows`]; [`KernelError::SizeMismatch`] where the routing has not top-k rows a token, or not one bound more than there are
    /// experts; [`KernelError::OutOfRange`] as [`ExpertSpace::entries`], and for rows without tokens or slots; what the backend gives.
    pub fn build(
        &mut self,
        (backend, stream): (&dyn LoraBackend, Stream),
        routing: ExpertRouting<'_>,
        adapters: TokenAdapters<'_>,
        space: ExpertSpace<'_>,
    ) -> Result<(), KernelError> {
        space.entries()?;
        let params = EntryParams {
            rows: self.admit(routing.rows())?,
            entries: self.buffer.ptr().0,
            adapters: adapters.ptr().0,
            token_count: adapters.len().min(u32::MAX as usize) as u32,
            resident_of_slot: space.resident_of_slot.ptr().0,
            slots: space.resident_of_slot.len().min(u32::MAX as usize) as u32,
            residents: space.residents,
            num_experts: space.num_experts,
            ..routing_params(routing, adapters, space.num_experts)?
        };
        if params.rows > 0 {
            let limit = (1, MAX_ENTRIES.into());
            for (quantity, count) in [("tokens", params.token_count), ("slots", params.slots)] {
                KernelError::check_range(ROUTING, quantity, count.into(), limit)?;
            }
            backend.expert_entries(stream, &params)?;
        }
        self.rows = params.rows;
        Ok(())
    }

    /// The entries, as the row map of a grouping.
    ///
    /// # Errors
    /// None in practice: the view is inside the buffer.
    pub fn row_slots(&self) -> Result<RowSlots<'_>, KernelError> {
        self.buffer.row_slots(self.rows as usize)
    }

    /// Reads the entries back, blocking: for tests and reports. The stream they were built on must have been synchronized.
    ///
    /// # Errors
    /// What the download gives.
    pub fn download(&self) -> Result<Vec<i32>, KernelError> {
        self.buffer.download(0, self.rows as usize)
    }

    fn admit(&self, rows: usize) -> Result<u32, KernelError> {
        match u32::try_from(rows) {
            Ok(rows) if rows <= self.max_rows => Ok(rows),
            _ => Err(KernelError::TooManyRows {
                rows: rows as u64,
                capacity: self.max_rows,
            }),
        }
    }
}

/// What unsorted and sorted rows fill in, once their lengths agree.
fn routing_params(
    routing: ExpertRouting<'_>,
    adapters: TokenAdapters<'_>,
    num_experts: u32,
) -> Result<EntryParams, KernelError> {
    let check = |quantity, found: usize, expected: usize, source_of_size| {
        if found == expected {
            return Ok(());
        }
        Err(KernelError::SizeMismatch {
            operand: ROUTING,
            quantity,
            found: found as u64,
            expected: expected as u64,
            source_of_size,
        })
    };
    match routing {
        ExpertRouting::Unsorted { experts, top_k } => {
            let rows = adapters.len().saturating_mul(top_k.get() as usize);
            check("experts", experts.len(), rows, "top-k experts a token")?;
            Ok(EntryParams {
                experts: experts.ptr().0,
                top_k: top_k.get(),
                ..EntryParams::zeroed()
            })
        }
        ExpertRouting::Sorted { offsets, tokens } => {
            let bounds = num_experts as usize + 1;
            check("offsets", offsets.len(), bounds, "the experts' bounds")?;
            Ok(EntryParams {
                offsets: offsets.ptr().0,
                tokens: tokens.ptr().0,
                top_k: 1,
                ..EntryParams::zeroed()
            })
        }
    }
}
