//! Which rows of a saved table differ from the served one.

use crate::OverlayError;
use half::bf16;

/// Largest absolute difference in a row up to which it counts as unchanged. A table that was saved without being trained differs from the
/// served one by rounding alone; a small fine-tune that moves rows by less than this is lost, so callers may choose a smaller value.
pub const ROWDIFF_THRESH: f32 = 0.1;

/// Rows in which `adapter` and `served` differ by strictly more than `threshold` (largest absolute difference of an element), ascending.
///
/// Both are BF16, `[rows, hidden]`, row-major. Rows that only one of them has are left out: a longer adapter table's extra rows are an
/// extension of the vocabulary, not a change to it. A row with a NaN on one side differs.
///
/// # Errors
/// [`OverlayError::Shape`] where a table is not rows of `hidden` elements.
pub fn row_diff(
    adapter: &[bf16],
    served: &[bf16],
    hidden: usize,
    threshold: f32,
) -> Result<Vec<u32>, OverlayError> {
    for table in [adapter, served] {
        let elements = table.len();
        if hidden == 0 || !elements.is_multiple_of(hidden) {
            return Err(OverlayError::Shape { elements, hidden });
        }
    }
    let same = |(a, b): (&bf16, &bf16)| {
        (a.to_f32() - b.to_f32()).abs() <= threshold || a.to_bits() == b.to_bits()
    };
    let rows = adapter
        .chunks_exact(hidden)
        .zip(served.chunks_exact(hidden));
    Ok((0..)
        .zip(rows)
        .filter(|(_, (a, b))| !a.iter().zip(*b).all(same))
        .map(|(row, _)| row)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|&v| bf16::from_f32(v)).collect()
    }

    #[test]
    fn only_rows_strictly_past_the_threshold_differ() {
        let served = table(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        let adapter = table(&[0.0, 1.0, 2.5, 3.0, 4.0, 5.25]);
        assert_eq!(row_diff(&adapter, &served, 2, 0.25).unwrap(), [1]);
        assert_eq!(row_diff(&adapter, &served, 2, 0.2).unwrap(), [1, 2]);
        assert_eq!(row_diff(&adapter, &served, 3, 0.5).unwrap(), [] as [u32; 0]);
    }

    #[test]
    fn extra_rows_on_either_side_are_left_out() {
        let (long, short) = (table(&[0.0, 9.0, 9.0]), table(&[0.0, 1.0]));
        assert_eq!(row_diff(&long, &short, 1, 0.1).unwrap(), [1]);
        assert_eq!(row_diff(&short, &long, 1, 0.1).unwrap(), [1]);
    }

    #[test]
    fn a_nan_differs_from_a_number_and_not_from_itself() {
        let (nan, one) = (table(&[f32::NAN]), table(&[1.0]));
        assert_eq!(row_diff(&nan, &one, 1, ROWDIFF_THRESH).unwrap(), [0]);
        assert!(row_diff(&nan, &nan, 1, ROWDIFF_THRESH).unwrap().is_empty());
    }

    #[test]
    fn tables_that_are_not_whole_rows_are_refused_with_both_numbers() {
        let error = row_diff(&table(&[1.0; 5]), &table(&[1.0; 4]), 2, 0.1).unwrap_err();
        assert_eq!(
            error,
            OverlayError::Shape {
                elements: 5,
                hidden: 2
            }
        );
        assert!(row_diff(&[], &[], 0, 0.1).is_err());
    }
}
