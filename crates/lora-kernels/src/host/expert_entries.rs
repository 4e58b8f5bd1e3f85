//! Table entries of the rows of a MoE block.

use super::memory::Arena;
use crate::{EntryParams, KernelError, Operand};

/// The entry of every row, by the rule of [`EntryParams`]; -1 where there is none.
pub(super) fn find_entries(
    arena: &Arena,
    row_count: u32,
    params: &EntryParams,
) -> Result<Vec<i32>, KernelError> {
    let ints = |name, ptr, len: u32| arena.list::<i32>(Operand::shared(name), ptr, len.into());
    let numbers = |name, ptr, len: u64| arena.list::<u32>(Operand::shared(name), ptr, len);
    let adapters = ints("token adapters", params.adapters, params.token_count)?;
    let residents = ints("resident of slot", params.resident_of_slot, params.slots)?;
    let entry_of = |token: u32, expert: Option<u32>| -> Option<i32> {
        let expert = expert.filter(|expert| *expert < params.num_experts)?;
        let slot = usize::try_from(*adapters.get(token as usize)?).ok()?;
        let resident = u32::try_from(*residents.get(slot)?).ok()?;
        (resident < params.residents).then(|| (resident * params.num_experts + expert) as i32)
    };
    let entries: Vec<Option<i32>> = if params.experts == 0 {
        let bounds = u64::from(params.num_experts) + 1;
        let offsets = numbers("expert offsets", params.offsets, bounds)?;
        let tokens = numbers("token of row", params.tokens, row_count.into())?;
        let rows = (0..row_count).zip(tokens);
        rows.map(|(row, token)| {
            let at_or_before = offsets.partition_point(|first| *first <= row) as u32;
            entry_of(*token, at_or_before.checked_sub(1))
        })
        .collect()
    } else {
        let experts = ints("experts", params.experts, row_count)?;
        let rows = (0..row_count).zip(experts);
        rows.map(|(row, expert)| entry_of(row / params.top_k.max(1), u32::try_from(*expert).ok()))
            .collect()
    };
    Ok(entries
        .into_iter()
        .map(|entry| entry.unwrap_or(-1))
        .collect())
}
