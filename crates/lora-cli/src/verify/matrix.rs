//! A small dense matrix of recorded values.

use half::bf16;

/// `rows x cols`, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

impl Matrix {
    /// # Panics
    /// Where `values` does not hold `rows * cols` elements.
    pub fn new(rows: usize, cols: usize, values: Vec<f32>) -> Self {
        assert_eq!(values.len(), rows * cols, "{rows} x {cols}");
        Self { rows, cols, values }
    }

    /// (rows, columns).
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    /// One row, to change.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.cols..][..self.cols]
    }

    /// One row rounded to BF16, nearest even.
    pub fn row_bf16(&self, row: usize) -> impl Iterator<Item = bf16> {
        self.row(row).iter().map(|value| bf16::from_f32(*value))
    }

    /// Swaps two rows.
    pub fn swap_rows(&mut self, a: usize, b: usize) {
        for col in 0..self.cols {
            self.values.swap(a * self.cols + col, b * self.cols + col);
        }
    }

    /// `self * other^T` of matrices that share their width, each element summed in f64.
    ///
    /// # Panics
    /// Where the widths differ.
    pub fn times_transposed(&self, other: &Self) -> Self {
        assert_eq!(self.cols, other.cols, "widths");
        let dot = |a: &[f32], b: &[f32]| -> f32 {
            a.iter()
                .zip(b)
                .map(|(x, y)| f64::from(*x) * f64::from(*y))
                .sum::<f64>() as f32
        };
        let values = (0..self.rows)
            .flat_map(|r| (0..other.rows).map(move |c| dot(self.row(r), other.row(c))));
        Self::new(self.rows, other.rows, values.collect())
    }
}
