//! Which adapter a row follows: requests, slots and row maps, as pure functions.

use crate::WeightsError;

/// The request for the base model: no adapter, whatever is active.
///
/// A request names its adapter by one `i32`: a slot number, any other negative number for the active slot, or this. A row
/// map, which is what reaches the device, speaks another language: slot numbers, and [`NO_DELTA`] for no adapter. The two
/// meet only in [`build_seq_slot_host`] and [`uniform_seq_slots`].
pub const BASE_SLOT: i32 = i32::MIN;

/// A row without a delta.
pub const NO_DELTA: i32 = -1;

/// What requests resolve against: how many slots there are and which one is active.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotSpace {
    /// Slots of the pool.
    pub slots: u32,
    /// The active slot; `None` where none was ever made active.
    pub active: Option<u32>,
}

/// A request, resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolved {
    /// The base model: no delta.
    Base,
    /// This slot.
    Slot(u32),
    /// A slot past the pool.
    OutOfRange,
}

impl SlotSpace {
    /// Resolves a request. A negative one where nothing is active is the base model's.
    pub fn resolve(self, request: i32) -> Resolved {
        match (u32::try_from(request), self.active) {
            _ if request == BASE_SLOT => Resolved::Base,
            (Ok(slot), _) if slot < self.slots => Resolved::Slot(slot),
            (Ok(_), _) => Resolved::OutOfRange,
            (Err(_), Some(active)) => Resolved::Slot(active),
            (Err(_), None) => Resolved::Base,
        }
    }

    fn row(self, row: usize, request: i32) -> Result<i32, WeightsError> {
        match self.resolve(request) {
            Resolved::Base => Ok(NO_DELTA),
            // Slots are at most i32::MAX.
            Resolved::Slot(slot) => Ok(slot as i32),
            Resolved::OutOfRange => Err(WeightsError::RowSlotOutOfRange {
                row,
                slot: request,
                slots: self.slots,
            }),
        }
    }
}

/// What the sites of a launch can fall back to where every row follows the active adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LoraSites {
    /// Sites that have the active adapter's pairs installed and use them without a row map.
    PairFallback,
    /// Sites that serve rows of several sequences at once and always need a row map.
    MultiSeq,
}

/// The row map of a step: row `i` gets the slot that `requests[i]` resolves to, [`NO_DELTA`] for the base model; rows
/// past the requests up to `padded_n` are [`NO_DELTA`]. This is the i32 buffer that routed launches read.
///
/// ```
/// use lora_weights::{BASE_SLOT, SlotSpace, build_seq_slot_host};
/// let space = SlotSpace { slots: 4, active: Some(2) };
/// assert_eq!(build_seq_slot_host(&[0, -1, BASE_SLOT], 5, space)?, [0, 2, -1, -1, -1]);
/// # Ok::<(), lora_weights::WeightsError>(())
/// ```
///
/// # Errors
/// [`WeightsError::RowSlotOutOfRange`] for a slot past the pool, [`WeightsError::PaddingTooSmall`] where `padded_n` is
/// below the number of requests.
pub fn build_seq_slot_host(
    requests: &[i32],
    padded_n: usize,
    space: SlotSpace,
) -> Result<Vec<i32>, WeightsError> {
    let mut rows = vec![NO_DELTA; padded_n];
    fill_seq_slot_host(requests, &mut rows, space)?;
    Ok(rows)
}

/// [`build_seq_slot_host`] into a buffer that the engine keeps: `rows` is the padded map. On an error its contents are
/// unspecified.
///
/// # Errors
/// As [`build_seq_slot_host`].
pub fn fill_seq_slot_host(
    requests: &[i32],
    rows: &mut [i32],
    space: SlotSpace,
) -> Result<(), WeightsError> {
    let padded = rows.len();
    let Some((named, padding)) = rows.split_at_mut_checked(requests.len()) else {
        return Err(WeightsError::PaddingTooSmall {
            rows: requests.len(),
            padded,
        });
    };
    for (row, (out, request)) in named.iter_mut().zip(requests).enumerate() {
        *out = space.row(row, *request)?;
    }
    padding.fill(NO_DELTA);
    Ok(())
}

/// The row map of `count` rows of one request. `None` only where the request resolves to the active slot and the sites
/// have its pairs installed ([`LoraSites::PairFallback`]); sites for several sequences always get rows. A request for
/// the base model gets rows of [`NO_DELTA`].
///
/// # Errors
/// [`WeightsError::RowSlotOutOfRange`] for a slot past the pool.
pub fn uniform_seq_slots(
    request: i32,
    count: usize,
    sites: LoraSites,
    space: SlotSpace,
) -> Result<Option<Vec<i32>>, WeightsError> {
    let row = space.row(0, request)?;
    let is_active = space.active.is_some_and(|active| row == active as i32);
    if sites == LoraSites::PairFallback && is_active {
        return Ok(None);
    }
    Ok(Some(vec![row; count]))
}

/// The slot that a prefill of one request must be routed to: the resolved slot where it is in range and not the active
/// one (whose pairs are installed at the sites). `None` for the base model.
pub fn routed_prefill_slot_of(request: i32, space: SlotSpace) -> Option<u32> {
    match space.resolve(request) {
        Resolved::Slot(slot) if Some(slot) != space.active => Some(slot),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: SlotSpace = SlotSpace {
        slots: 4,
        active: Some(1),
    };
    const IDLE: SlotSpace = SlotSpace {
        slots: 4,
        active: None,
    };

    #[test]
    fn negative_rows_follow_the_active_slot_and_base_rows_none() {
        let rows = build_seq_slot_host(&[3, -1, -7, BASE_SLOT, 0], 7, SPACE).unwrap();
        assert_eq!(rows, [3, 1, 1, -1, 0, -1, -1]);
    }

    #[test]
    fn nothing_active_means_no_delta() {
        assert_eq!(build_seq_slot_host(&[-1, 2], 2, IDLE).unwrap(), [-1, 2]);
        let rows = uniform_seq_slots(-1, 2, LoraSites::PairFallback, IDLE).unwrap();
        assert_eq!(rows, Some(vec![-1, -1]));
    }

    #[test]
    fn a_row_past_the_pool_is_refused_by_number() {
        let error = build_seq_slot_host(&[0, 4], 2, SPACE).unwrap_err();
        assert!(matches!(
            error,
            WeightsError::RowSlotOutOfRange {
                row: 1,
                slot: 4,
                slots: 4
            }
        ));
    }

    #[test]
    fn more_requests_than_padded_rows_are_refused() {
        let error = build_seq_slot_host(&[0, 0], 1, SPACE).unwrap_err();
        assert!(matches!(
            error,
            WeightsError::PaddingTooSmall { rows: 2, padded: 1 }
        ));
    }

    #[test]
    fn only_the_active_adapter_at_pair_sites_goes_without_rows() {
        let at = |request, sites| uniform_seq_slots(request, 2, sites, SPACE).unwrap();
        assert_eq!(at(-1, LoraSites::PairFallback), None);
        assert_eq!(at(1, LoraSites::PairFallback), None);
        assert_eq!(at(2, LoraSites::PairFallback), Some(vec![2, 2]));
        assert_eq!(at(BASE_SLOT, LoraSites::PairFallback), Some(vec![-1, -1]));
        assert_eq!(at(-1, LoraSites::MultiSeq), Some(vec![1, 1]));
        assert_eq!(at(BASE_SLOT, LoraSites::MultiSeq), Some(vec![-1, -1]));
        assert!(uniform_seq_slots(9, 2, LoraSites::MultiSeq, SPACE).is_err());
    }

    #[test]
    fn prefill_is_routed_only_to_another_slot_in_range() {
        assert_eq!(routed_prefill_slot_of(2, SPACE), Some(2));
        assert_eq!(routed_prefill_slot_of(1, SPACE), None);
        assert_eq!(routed_prefill_slot_of(-1, SPACE), None);
        assert_eq!(routed_prefill_slot_of(4, SPACE), None);
        assert_eq!(routed_prefill_slot_of(BASE_SLOT, SPACE), None);
        assert_eq!(routed_prefill_slot_of(0, IDLE), Some(0));
    }
}
