//! Folds that the host drives, one launch an expert: the reference, and the way to go where the host knows the routing anyway.

use crate::MoeError;
use lora_kernels::{
    Applied, KernelError, LaunchContext, MatMut, MatRef, Operand, PairSite, SiteKind,
    apply_lora_delta,
};
use lora_weights::device::LoraPair;
use lora_weights::{ExpertLoraLayer, ExpertProj};

/// Rows of one adapted expert, in rows sorted by expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpertWork {
    /// Expert.
    pub expert: usize,
    /// First row.
    pub row_off: usize,
    /// Rows, at least 1.
    pub rows: usize,
}

/// The rows of each adapted expert; rows `offsets[e]..offsets[e + 1]` are expert e's. An expert past the table, or without rows, gives none.
///
/// ```
/// use lora_moe::{ExpertWork, expert_delta_workitems};
///
/// let work = expert_delta_workitems(&[0, 4, 4, 9], [1, 2, 3]);
/// assert_eq!(work, [ExpertWork { expert: 2, row_off: 4, rows: 5 }]);
/// ```
pub fn expert_delta_workitems(
    offsets: &[u32],
    adapted: impl IntoIterator<Item = usize>,
) -> Vec<ExpertWork> {
    let work = adapted.into_iter().filter_map(|expert| {
        let first = *offsets.get(expert)?;
        let rows = offsets.get(expert.checked_add(1)?)?.checked_sub(first)?;
        (rows > 0).then_some(ExpertWork {
            expert,
            row_off: first as usize,
            rows: rows as usize,
        })
    });
    work.collect()
}

/// One projection of one adapter's experts, and the rows that each expert has.
#[derive(Debug, Clone, Copy)]
pub struct SortedExperts<'a> {
    /// The adapter's pairs in this layer.
    pub layer: &'a ExpertLoraLayer,
    /// Projection.
    pub proj: ExpertProj,
    /// `[num_experts + 1]`: first row of each expert, and one past the last.
    pub offsets: &'a [u32],
}

/// Adds one adapter's deltas to the output of a grouped GEMM, in place. Rows of x and out are sorted by expert.
///
/// x is `[rows, k_in]`, out `[rows, n_out]`. A launch takes at most `max_rows` rows, so that scratch stays bounded; 0 counts as 1. Rows of experts
/// that are not adapted keep their bits. The down fold comes before the weighted sum over a token's experts.
///
/// # Errors
/// [`KernelError::SizeMismatch`] where x and out differ in rows, [`KernelError::OutOfRange`] for offsets past them, both before anything is launched;
/// what [`apply_lora_delta`] gives.
pub fn apply_expert_lora_sorted(
    ctx: &mut LaunchContext<'_>,
    experts: SortedExperts<'_>,
    x: MatRef<'_>,
    mut out: MatMut<'_>,
    max_rows: usize,
) -> Result<Applied, MoeError> {
    check_rows(x, &out)?;
    let work = expert_delta_workitems(experts.offsets, experts.layer.adapted_experts());
    for item in &work {
        // Refuses what leaves x before the first launch.
        x.row_range(item.row_off..item.row_off.saturating_add(item.rows))?;
    }
    let mut total = Applied::Empty;
    for item in work {
        let Some(pair) = experts.layer.pair(item.expert, experts.proj) else {
            continue;
        };
        let rows = item.row_off..item.row_off + item.rows;
        let operands = (x.row_range(rows.clone())?, out.reborrow().row_range(rows)?);
        total = add(
            total,
            fold_blocks(ctx, SiteKind::Expert, pair, operands, max_rows)?,
        );
    }
    Ok(total)
}

/// Adds a router's delta to the gate logits, before top-k: x is `[rows, hidden]`, logits `[rows, num_experts]` BF16. A launch takes at most `max_rows`
/// rows; 0 counts as 1.
///
/// # Errors
/// [`KernelError::SizeMismatch`] where x and logits differ in rows; what [`apply_lora_delta`] gives.
pub fn apply_router_lora(
    ctx: &mut LaunchContext<'_>,
    pair: LoraPair,
    x: MatRef<'_>,
    logits: MatMut<'_>,
    max_rows: usize,
) -> Result<Applied, MoeError> {
    check_rows(x, &logits)?;
    fold_blocks(ctx, SiteKind::Router, pair, (x, logits), max_rows)
}

fn check_rows(x: MatRef<'_>, out: &MatMut<'_>) -> Result<(), KernelError> {
    if x.rows() == out.rows() {
        return Ok(());
    }
    Err(KernelError::SizeMismatch {
        operand: Operand::shared("x"),
        quantity: "rows",
        found: x.rows() as u64,
        expected: out.rows() as u64,
        source_of_size: "the rows of out",
    })
}

/// One pair over all rows, `max_rows` at a time.
fn fold_blocks(
    ctx: &mut LaunchContext<'_>,
    kind: SiteKind,
    pair: LoraPair,
    (x, mut out): (MatRef<'_>, MatMut<'_>),
    max_rows: usize,
) -> Result<Applied, MoeError> {
    let mut total = Applied::Empty;
    for first in (0..x.rows()).step_by(max_rows.max(1)) {
        let rows = first..first.saturating_add(max_rows.max(1)).min(x.rows());
        let out = out.reborrow().row_range(rows.clone())?;
        let mut sites = [PairSite { pair, out }];
        total = add(
            total,
            apply_lora_delta(ctx, kind, x.row_range(rows)?, &mut sites)?,
        );
    }
    Ok(total)
}

/// What two launches did together. A lever that skips one skips all of its kind.
fn add(total: Applied, next: Applied) -> Applied {
    match (total, next) {
        (Applied::Launched { launches: a }, Applied::Launched { launches: b }) => {
            Applied::Launched { launches: a + b }
        }
        (total, Applied::Empty) => total,
        (_, next) => next,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_past_the_table_or_without_rows_give_no_work() {
        let offsets = [0, 3, 3, 10];
        let experts = |work: Vec<ExpertWork>| work.iter().map(|w| w.expert).collect::<Vec<_>>();
        assert_eq!(
            experts(expert_delta_workitems(&offsets, [0, 1, 2, 3, usize::MAX])),
            [0, 2]
        );
        assert!(expert_delta_workitems(&offsets, []).is_empty());
        assert!(expert_delta_workitems(&[], [0]).is_empty());
        assert!(expert_delta_workitems(&[5], [0]).is_empty());
    }

    #[test]
    fn bounds_that_decrease_give_no_work() {
        assert!(expert_delta_workitems(&[7, 3], [0]).is_empty());
    }
}
