//! Seeded random data.

use half::bf16;
use std::ops::Range;

/// How values relate to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Values of either sign: sums cancel, as trained weights' do.
    Signed,
    /// All products that are added have one sign, so that the result is as large as the sum of magnitudes, and the elementwise
    /// tolerance as sharp as it gets.
    Coherent,
}

/// A seeded source of BF16 values.
#[derive(Debug, Clone)]
pub struct Rng(fastrand::Rng);

impl Rng {
    /// Starts at `seed`.
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// A whole number.
    pub fn below(&mut self, range: Range<usize>) -> usize {
        self.0.usize(range)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.0.usize(0..n) == 0
    }

    /// A value of root mean square `rms`: of either sign, or in 0.5..1.5 times it.
    pub fn value(&mut self, fill: Fill, rms: f32) -> f32 {
        match fill {
            Fill::Signed => (self.0.f32() * 2.0 - 1.0) * 3_f32.sqrt() * rms,
            Fill::Coherent => (self.0.f32() + 0.5) * rms,
        }
    }

    /// `len` BF16 values of root mean square `rms`.
    pub fn values(&mut self, len: usize, fill: Fill, rms: f32) -> Vec<bf16> {
        (0..len)
            .map(|_| bf16::from_f32(self.value(fill, rms)))
            .collect()
    }
}
