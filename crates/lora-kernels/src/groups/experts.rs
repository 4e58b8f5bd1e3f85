//! Rows of a MoE block grouped by (adapter, expert), on the device: what lets a captured graph follow whatever the router chooses.

use super::RowGroups;
use crate::{
    EntryParams, ExpertIds, KernelError, LoraBackend, MAX_ENTRIES, MatRef, Operand, ResidentOfSlot,
    RoutedX, RowIndices, Stream, TokenAdapters,
};
use bytemuck::Zeroable;
use std::num::NonZeroU32;

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

impl RowGroups {
    /// Enqueues the grouping of a MoE block's rows on `stream`, in one launch; legal under graph capture. `adapters` has one slot a token. A row whose
    /// expert, token, slot or resident is negative or past its limit is in no group. No rows: nothing is enqueued.
    ///
    /// # Errors
    /// [`KernelError::TooManyRows`]; [`KernelError::SizeMismatch`] where the routing has not top-k rows a token, or not one bound more than there are
    /// experts, or the entries are not those of the groups; [`KernelError::OutOfRange`] as [`ExpertSpace::entries`], and for rows without tokens or slots; what
    /// the backend gives.
    pub fn build_experts(
        &mut self,
        (backend, stream): (&dyn LoraBackend, Stream),
        routing: ExpertRouting<'_>,
        adapters: TokenAdapters<'_>,
        space: ExpertSpace<'_>,
    ) -> Result<(), KernelError> {
        let expected = u64::from(self.spec().entries);
        check_size(
            "entries",
            space.entries()?.into(),
            expected,
            "the groups' entries",
        )?;
        let rows = self.admit(routing.rows())?;
        let entries = EntryParams {
            adapters: adapters.ptr().0,
            token_count: adapters.len().min(u32::MAX as usize) as u32,
            resident_of_slot: space.resident_of_slot.ptr().0,
            slots: space.resident_of_slot.len().min(u32::MAX as usize) as u32,
            residents: space.residents,
            num_experts: space.num_experts,
            ..routing_params(routing, adapters, space.num_experts)?
        };
        if rows > 0 {
            let limit = (1, MAX_ENTRIES.into());
            for (quantity, count) in [("tokens", entries.token_count), ("slots", entries.slots)] {
                KernelError::check_range(ROUTING, quantity, count.into(), limit)?;
            }
            backend.group_experts(stream, &self.params(rows), &entries)?;
        }
        self.rows = rows;
        Ok(())
    }
}

fn check_size(
    quantity: &'static str,
    found: u64,
    expected: u64,
    source_of_size: &'static str,
) -> Result<(), KernelError> {
    if found == expected {
        return Ok(());
    }
    Err(KernelError::SizeMismatch {
        operand: ROUTING,
        quantity,
        found,
        expected,
        source_of_size,
    })
}

/// What unsorted and sorted rows fill in, once their lengths agree.
fn routing_params(
    routing: ExpertRouting<'_>,
    adapters: TokenAdapters<'_>,
    num_experts: u32,
) -> Result<EntryParams, KernelError> {
    let check = |quantity, found: usize, expected: usize, source_of_size| {
        check_size(quantity, found as u64, expected as u64, source_of_size)
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
