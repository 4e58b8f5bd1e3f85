//! What overlays are built with.

use super::checked_size;
use crate::launch::check_equal;
use crate::strided::Strided;
use crate::{
    F32MatMut, GatherRowsParams, KernelError, LoraBackend, MAX_ROWS, MatMut, MatRef, Operand,
    RowDiffParams, RowIndices, Stream,
};

const A: Operand = Operand::shared("first table");
const B: Operand = Operand::shared("second table");
const DISTANCES: Operand = Operand::shared("distances");
const BASE: Operand = Operand::shared("base table");
const DELTA: Operand = Operand::shared("delta table");
const OUT: Operand = Operand::shared("out");

/// The largest absolute difference of each row of `a` and `b`.
///
/// Both are BF16 `[rows, hidden]`, each with a row stride of its own; `distances` is `[1, rows]`. A row's distance is exact: the difference of two
/// BF16 values in FP32. Elements of equal bits do not differ, infinities and NaN included; otherwise a NaN on either side makes the
/// distance infinite. Which distance counts as a change is for the caller to say. Each table is read once. No rows: nothing is enqueued.
///
/// # Errors
/// [`KernelError::OutOfRange`] for sizes outside the limits; [`KernelError::SizeMismatch`] between the three; [`KernelError::Overlap`] where
/// distances would be written into a table; what the backend gives.
pub fn row_diff(
    (backend, stream): (&dyn LoraBackend, Stream),
    a: MatRef<'_>,
    b: MatRef<'_>,
    distances: F32MatMut<'_>,
) -> Result<(), KernelError> {
    let (rows, cols) = checked_size(A, (a.rows(), a.cols()))?;
    check_equal(B, "rows", b.rows(), (a.rows(), "the first table"))?;
    check_equal(B, "columns", b.cols(), (a.cols(), "the first table"))?;
    check_equal(
        DISTANCES,
        "rows",
        distances.rows(),
        (1, "one distance a row"),
    )?;
    let wanted = (a.rows(), "the rows of the tables");
    check_equal(DISTANCES, "columns", distances.cols(), wanted)?;
    let written = distances.strided();
    refuse_overlap((DISTANCES, written), (A, a.strided()))?;
    refuse_overlap((DISTANCES, written), (B, b.strided()))?;
    if rows == 0 {
        return Ok(());
    }
    backend.row_diff(
        stream,
        &RowDiffParams {
            a: a.ptr().0,
            b: b.ptr().0,
            a_stride: a.row_stride() as u64,
            b_stride: b.row_stride() as u64,
            distances: distances.ptr().0,
            rows,
            cols,
        },
    )
}

/// Two tables numbered as one: row i of `base` is i, row k of `delta` is `base.rows() + k`. Either may have no rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatherSources<'a> {
    /// An adapter's own table.
    pub base: MatRef<'a>,
    /// Its trained rows.
    pub delta: MatRef<'a>,
}

/// Copies to row i of `out` the row `index[i]` of `sources`, bit for bit, in one launch.
///
/// All are BF16 with the same columns, each with a row stride of its own. A number past both tables leaves its row of out as it is. No rows: nothing
/// is enqueued.
///
/// # Errors
/// [`KernelError::OutOfRange`] for sizes outside the limits; [`KernelError::SizeMismatch`] between tables, index and out;
/// [`KernelError::Overlap`] of out and a table; what the backend gives.
pub fn gather_rows(
    (backend, stream): (&dyn LoraBackend, Stream),
    sources: GatherSources<'_>,
    index: RowIndices<'_>,
    out: MatMut<'_>,
) -> Result<(), KernelError> {
    let GatherSources { base, delta } = sources;
    let (rows, cols) = checked_size(OUT, (out.rows(), out.cols()))?;
    for (operand, table) in [(BASE, base), (DELTA, delta)] {
        check_equal(operand, "columns", table.cols(), (out.cols(), "out"))?;
        let most = (0, MAX_ROWS.into());
        KernelError::check_range(operand, "rows", table.rows() as u64, most)?;
        refuse_overlap((OUT, out.as_ref().strided()), (operand, table.strided()))?;
    }
    check_equal(OUT, "row numbers", index.len(), (out.rows(), "its rows"))?;
    if rows == 0 {
        return Ok(());
    }
    backend.gather_rows(
        stream,
        &GatherRowsParams {
            base: base.ptr().0,
            base_stride: base.row_stride() as u64,
            delta: delta.ptr().0,
            delta_stride: delta.row_stride() as u64,
            index: index.ptr().0,
            out: out.ptr().0,
            out_stride: out.row_stride() as u64,
            base_rows: base.rows() as u32,
            delta_rows: delta.rows() as u32,
            rows,
            cols,
        },
    )
}

fn refuse_overlap(
    (written, to): (Operand, Strided),
    (read, from): (Operand, Strided),
) -> Result<(), KernelError> {
    if to.overlaps(&from) {
        return Err(KernelError::Overlap {
            first: read,
            second: written,
        });
    }
    Ok(())
}
