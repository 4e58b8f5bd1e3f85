//! Which adapter's experts a row follows, as pure functions of what the host knows.
//!
//! Two modes. **Per row**, every token follows its own adapter through [`ExpertTables`](crate::ExpertTables); nothing is ever refused. **Single
//! active**, an engine has one adapter's experts installed: rows of that adapter fold, rows without an adapter are skipped, and a row of any
//! other adapter is refused before anything is launched, rather than folded with the wrong one.

use crate::MoeError;
use lora_kernels::{DeviceBuffer, KernelError, MAX_ROWS, TokenAdapters};

/// A token without a fold.
pub const NO_FOLD: i32 = -1;

/// What becomes of a row's expert deltas in single-active mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MoeLoraRoute {
    /// The installed experts, or there are none to install.
    Fold,
    /// The row follows no adapter.
    Skip,
    /// The row follows an adapter whose experts are not installed.
    Refuse,
}

/// What becomes of the row of `slot` while the experts of `active` are installed.
///
/// `has_moe_lora` says whether any loaded adapter adapts experts or a router: without one every row folds, which changes nothing. Then a negative
/// slot ([`BASE_SLOT`](lora_weights::BASE_SLOT) among them) is skipped, the active slot folds, and any other is refused.
///
/// ```
/// use lora_moe::{MoeLoraRoute, resolve_moe_lora_route};
///
/// assert_eq!(resolve_moe_lora_route(3, Some(0), false), MoeLoraRoute::Fold);
/// assert_eq!(resolve_moe_lora_route(-1, Some(0), true), MoeLoraRoute::Skip);
/// assert_eq!(resolve_moe_lora_route(0, Some(0), true), MoeLoraRoute::Fold);
/// assert_eq!(resolve_moe_lora_route(3, Some(0), true), MoeLoraRoute::Refuse);
/// ```
pub fn resolve_moe_lora_route(slot: i32, active: Option<u32>, has_moe_lora: bool) -> MoeLoraRoute {
    match u32::try_from(slot) {
        _ if !has_moe_lora => MoeLoraRoute::Fold,
        Err(_) => MoeLoraRoute::Skip,
        Ok(slot) if Some(slot) == active => MoeLoraRoute::Fold,
        Ok(_) => MoeLoraRoute::Refuse,
    }
}

/// Passes a decode batch that single-active mode can serve. To be called before a captured graph is looked up.
///
/// # Errors
/// [`MoeError::RouteRefused`] for the first row that would have to be refused.
pub fn ensure_decode_route_servable(
    slots: &[i32],
    active: Option<u32>,
    has_moe_lora: bool,
) -> Result<(), MoeError> {
    let refused =
        |slot: &i32| resolve_moe_lora_route(*slot, active, has_moe_lora) == MoeLoraRoute::Refuse;
    slots.iter().position(refused).map_or(Ok(()), |row| {
        Err(MoeError::RouteRefused {
            row,
            slot: slots[row],
            active,
        })
    })
}

/// The adapter slot of each token of a MoE block; [`NO_FOLD`] where a token has none.
///
/// A type of its own, because attention's builder ([`build_seq_slot_host`](lora_weights::build_seq_slot_host)) takes requests, in which -1 means the active
/// adapter; here -1 means no fold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoeRowAdapters(Vec<i32>);

impl MoeRowAdapters {
    /// One slot a token.
    pub fn as_slice(&self) -> &[i32] {
        &self.0
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Writes them to the front of an `i32` buffer, blocking, and gives the view that folds take.
    ///
    /// # Errors
    /// [`KernelError::ViewOutside`] if the buffer is shorter; what the upload gives.
    pub fn upload<'a>(
        &self,
        buffer: &'a mut DeviceBuffer,
    ) -> Result<TokenAdapters<'a>, KernelError> {
        buffer.upload(0, &self.0)?;
        buffer.token_adapters(self.0.len())
    }
}

/// The map of a packed prefill: rows `cu_seqlens[b]..cu_seqlens[b + 1]` follow `slots[b]`, no adapter where that is negative.
///
/// `None` for fewer than two bounds, other than one slot a stream, a first bound that is not 0, a negative or decreasing bound, or more than
/// [`MAX_ROWS`] rows.
pub fn build_moe_row_adapter_host(cu_seqlens: &[i32], slots: &[i32]) -> Option<MoeRowAdapters> {
    let (first, last) = (*cu_seqlens.first()?, *cu_seqlens.last()?);
    let streams = cu_seqlens.len() - 1;
    // Bounds that start at 0 and do not decrease are not negative either.
    let ordered = cu_seqlens.windows(2).all(|pair| pair[0] <= pair[1]);
    if streams == 0 || streams != slots.len() || first != 0 || !ordered || last as u32 > MAX_ROWS {
        return None;
    }
    let mut rows = Vec::with_capacity(last as usize);
    for (end, slot) in cu_seqlens[1..].iter().zip(slots) {
        rows.resize(*end as usize, (*slot).max(NO_FOLD));
    }
    Some(MoeRowAdapters(rows))
}

/// The map of a decode step in single-active mode: the active slot where a row folds, [`NO_FOLD`] in every other row and in the padding up
/// to `padded_n`. Without an active slot nothing folds.
///
/// # Errors
/// [`MoeError::PaddingTooSmall`] where `padded_n` is below the rows.
pub fn build_moe_row_adapter_decode(
    slots: &[i32],
    padded_n: usize,
    active: Option<u32>,
    has_moe_lora: bool,
) -> Result<MoeRowAdapters, MoeError> {
    let mut rows = vec![NO_FOLD; padded_n];
    let named = rows
        .get_mut(..slots.len())
        .ok_or(MoeError::PaddingTooSmall {
            rows: slots.len(),
            padded: padded_n,
        })?;
    let folded = active
        .and_then(|slot| i32::try_from(slot).ok())
        .unwrap_or(NO_FOLD);
    for (row, slot) in named.iter_mut().zip(slots) {
        if resolve_moe_lora_route(*slot, active, has_moe_lora) == MoeLoraRoute::Fold {
            *row = folded;
        }
    }
    Ok(MoeRowAdapters(rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lora_weights::BASE_SLOT;

    #[test]
    fn without_moe_lora_every_row_folds() {
        for slot in [BASE_SLOT, -1, 0, 7] {
            assert_eq!(
                resolve_moe_lora_route(slot, Some(0), false),
                MoeLoraRoute::Fold
            );
            assert_eq!(
                resolve_moe_lora_route(slot, None, false),
                MoeLoraRoute::Fold
            );
        }
    }

    #[test]
    fn negative_slots_are_skipped_and_never_mean_active() {
        for slot in [BASE_SLOT, -2, -1] {
            assert_eq!(
                resolve_moe_lora_route(slot, Some(0), true),
                MoeLoraRoute::Skip
            );
        }
    }

    #[test]
    fn only_the_active_slot_folds() {
        assert_eq!(resolve_moe_lora_route(2, Some(2), true), MoeLoraRoute::Fold);
        assert_eq!(
            resolve_moe_lora_route(1, Some(2), true),
            MoeLoraRoute::Refuse
        );
        assert_eq!(resolve_moe_lora_route(0, None, true), MoeLoraRoute::Refuse);
    }

    #[test]
    fn a_batch_with_another_adapter_is_refused_by_row() {
        assert_eq!(
            ensure_decode_route_servable(&[2, -1, 2], Some(2), true),
            Ok(())
        );
        assert_eq!(
            ensure_decode_route_servable(&[5, 6], Some(2), false),
            Ok(())
        );
        let error = ensure_decode_route_servable(&[2, -1, 4, 5], Some(2), true).unwrap_err();
        assert_eq!(
            error,
            MoeError::RouteRefused {
                row: 2,
                slot: 4,
                active: Some(2)
            }
        );
        assert!(error.to_string().contains("slot 4"), "{error}");
    }

    #[test]
    fn a_packed_prefill_gives_each_stream_its_slot() {
        let rows = build_moe_row_adapter_host(&[0, 2, 2, 5], &[3, 9, BASE_SLOT]).unwrap();
        assert_eq!(rows.as_slice(), [3, 3, -1, -1, -1]);
        let empty = build_moe_row_adapter_host(&[0, 0], &[1]).unwrap();
        assert!(empty.is_empty());
    }

    #[test]
    fn bounds_that_do_not_hold_together_give_no_map() {
        let bad: [(&[i32], &[i32]); 8] = [
            (&[], &[]),
            (&[0], &[]),
            (&[0, 2], &[]),
            (&[0, 2], &[1, 1]),
            (&[1, 2], &[0]),
            (&[0, -1], &[0]),
            (&[0, 3, 2], &[0, 0]),
            (&[0, i32::MAX], &[0]),
        ];
        for (bounds, slots) in bad {
            assert_eq!(
                build_moe_row_adapter_host(bounds, slots),
                None,
                "{bounds:?}"
            );
        }
    }

    #[test]
    fn a_decode_map_holds_the_active_slot_or_no_fold() {
        let build = |active, has| {
            build_moe_row_adapter_decode(&[2, -1, 1, BASE_SLOT], 6, active, has)
                .map(|rows| rows.as_slice().to_vec())
        };
        assert_eq!(build(Some(2), true).unwrap(), [2, -1, -1, -1, -1, -1]);
        assert_eq!(build(Some(2), false).unwrap(), [2, 2, 2, 2, -1, -1]);
        assert_eq!(build(None, true).unwrap(), [-1; 6]);
        assert_eq!(
            build_moe_row_adapter_decode(&[0, 0], 1, None, false),
            Err(MoeError::PaddingTooSmall { rows: 2, padded: 1 })
        );
    }
}
