//! How far a result may lie from what was recorded.
//!
//! The contract rounds three times to BF16 (`x A^T`, its product with `B^T`, the fold), so an element may differ by a few
//! units in the last place of the terms it is made of, cancelled or not:
//! `2 * 2^-8 * (|base| + |out| + |scale| * (|B| |A| |x|))`.

use super::matrix::Matrix;

/// Twice the spacing of BF16 at 1, halved for rounding to nearest: what one rounding of each term may cost.
pub(super) const UNIT: f64 = 2.0 / 256.0;

/// A and B of one adapter on one module, as f32, true rank.
#[derive(Debug, Clone)]
pub struct Factors {
    /// `[rank, k_in]`.
    pub a: Matrix,
    /// `[n_out, rank]`.
    pub b: Matrix,
    /// FP32 scale.
    pub scale: f32,
}

impl Factors {
    /// `|scale| * (|B| |A| |x|)` for every output of one row: the size of the delta's terms before any cancels.
    pub fn magnitude(&self, x: &[f32]) -> Vec<f64> {
        let absolute = |row: &[f32], by: &[f64]| -> f64 {
            row.iter()
                .zip(by)
                .map(|(w, v)| f64::from(w.abs()) * v)
                .sum()
        };
        let x: Vec<f64> = x.iter().map(|v| f64::from(v.abs())).collect();
        let xa: Vec<f64> = (0..self.a.shape().0)
            .map(|r| absolute(self.a.row(r), &x))
            .collect();
        let scale = f64::from(self.scale.abs());
        (0..self.b.shape().0)
            .map(|n| scale * absolute(self.b.row(n), &xa))
            .collect()
    }
}

/// The element that lies furthest from what was recorded, as a fraction of its tolerance.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Worst {
    /// Distance over tolerance: over 1 is a miss. NaN counts as infinite.
    pub fraction: f64,
    /// Row of the recorded rows.
    pub row: usize,
    /// Output column.
    pub column: usize,
    /// What the delta path gave.
    pub got: f32,
    /// What was recorded.
    pub wanted: f32,
}

impl Worst {
    /// Compares one row. `magnitude` is [`Factors::magnitude`] of it, empty where no adapter touches the row.
    pub fn of_row(
        row: usize,
        got: &[f32],
        base: &[f32],
        wanted: &[f32],
        magnitude: &[f64],
    ) -> Option<Self> {
        let elements = base.iter().zip(wanted).enumerate();
        let tolerance = elements.map(|(column, (base, wanted))| {
            let terms = magnitude.get(column).copied().unwrap_or(0.0);
            UNIT * (f64::from(base.abs()) + f64::from(wanted.abs()) + terms)
        });
        Self::within(row, got, wanted, &tolerance.collect::<Vec<_>>())
    }

    /// Compares one row at these tolerances.
    pub(super) fn within(
        row: usize,
        got: &[f32],
        wanted: &[f32],
        tolerance: &[f64],
    ) -> Option<Self> {
        let pairs = got.iter().zip(wanted).zip(tolerance).enumerate();
        let elements = pairs.map(|(column, ((got, wanted), tolerance))| {
            let distance = (f64::from(*got) - f64::from(*wanted)).abs();
            let fraction = match distance {
                0.0 => 0.0,
                _ if (distance / tolerance).is_nan() => f64::INFINITY,
                _ => distance / tolerance,
            };
            Self {
                fraction,
                row,
                column,
                got: *got,
                wanted: *wanted,
            }
        });
        elements.max_by(|a, b| a.fraction.total_cmp(&b.fraction))
    }

    /// Whether the element is within its tolerance.
    pub fn passes(&self) -> bool {
        self.fraction <= 1.0
    }

    /// The further of two.
    pub fn further(self, other: Self) -> Self {
        if other.fraction > self.fraction {
            other
        } else {
            self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors() -> Factors {
        Factors {
            a: Matrix::new(1, 2, vec![1.0, -2.0]),
            b: Matrix::new(2, 1, vec![3.0, -1.0]),
            scale: -0.5,
        }
    }

    #[test]
    fn magnitude_is_taken_before_cancelling() {
        assert_eq!(
            factors().magnitude(&[2.0, 1.0]),
            [0.5 * 3.0 * 4.0, 0.5 * 4.0]
        );
    }

    #[test]
    fn worst_element_is_a_fraction_of_its_own_tolerance() {
        let magnitude = [1.0, 0.0];
        let worst = Worst::of_row(4, &[2.0, 1.25], &[1.0, 1.0], &[2.0, 1.0], &magnitude)
            .expect("two elements");
        assert_eq!((worst.row, worst.column), (4, 1));
        assert!((worst.fraction - 0.25 / (UNIT * 2.0)).abs() < 1e-9);
        assert!(!worst.passes());
    }

    #[test]
    fn nan_and_a_difference_from_nothing_are_misses() {
        let nan = Worst::of_row(0, &[f32::NAN], &[1.0], &[1.0], &[]).expect("one element");
        assert!(!nan.passes());
        let from_zero = Worst::of_row(0, &[0.1], &[0.0], &[0.0], &[]).expect("one element");
        assert!(!from_zero.passes());
        assert!(
            Worst::of_row(0, &[0.0], &[0.0], &[0.0], &[])
                .expect("one element")
                .passes()
        );
    }
}
