//! The reference: two loops in f64, with no rounding in between.

use super::TestAdapter;
use half::bf16;

/// BF16's unit roundoff.
pub(crate) const ROUNDOFF: f64 = 1.0 / 256.0;

/// What a row of out should be.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpectedRow {
    /// `scale * (x @ A^T) @ B^T`.
    pub delta: Vec<f64>,
    /// `|scale| * |B| |A| |x|`: what the delta would be if nothing cancelled, the scale of its rounding errors.
    pub magnitude: Vec<f64>,
}

/// The delta of one row of x.
pub fn naive_delta(x: &[bf16], adapter: &TestAdapter) -> ExpectedRow {
    let (rank, k) = (adapter.rank as usize, adapter.k_in as usize);
    let (mut xa, mut xa_abs) = (vec![0.0; rank], vec![0.0; rank]);
    for r in 0..rank {
        for (x, a) in x.iter().zip(&adapter.a[r * k..][..k]) {
            let product = x.to_f64() * a.to_f64();
            xa[r] += product;
            xa_abs[r] += product.abs();
        }
    }
    let scale = f64::from(adapter.scale);
    let (mut delta, mut magnitude) = (Vec::new(), Vec::new());
    for row in adapter.b.chunks(adapter.max_rank as usize) {
        let (mut sum, mut sum_abs) = (0.0, 0.0);
        for (r, b) in row[..rank].iter().enumerate() {
            sum += b.to_f64() * xa[r];
            sum_abs += b.to_f64().abs() * xa_abs[r];
        }
        delta.push(scale * sum);
        magnitude.push(scale.abs() * sum_abs);
    }
    ExpectedRow { delta, magnitude }
}

/// How far outputs are from the reference, as fractions of what is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Verdict {
    /// Worst element: error over `2 * 2^-8 * (|base| + |out| + |scale| |B| |A| |x|)`.
    pub worst: f64,
    /// Root mean square of all errors over `2^-8` times that of `|out| + |delta|`. Where sums cancel, the elementwise limit is wide; this
    /// one still sees a scale that is 5 % off.
    pub rms: f64,
}

impl Verdict {
    /// Whether both are within what is allowed. A NaN is not.
    pub fn passes(&self) -> bool {
        self.worst <= 1.0 && self.rms <= 1.0
    }
}

/// Adds up a [`Verdict`] row by row.
#[derive(Debug, Default)]
pub(crate) struct Judge {
    worst: f64,
    errors: f64,
    sizes: f64,
}

impl Judge {
    pub(crate) fn row(&mut self, base: &[bf16], out: &[bf16], expected: &ExpectedRow) {
        let wanted = expected.delta.iter().zip(&expected.magnitude);
        for ((base, out), (delta, magnitude)) in base.iter().zip(out).zip(wanted) {
            let (base, out) = (base.to_f64(), out.to_f64());
            let error = (out - (base + delta)).abs();
            let allowed = 2.0 * ROUNDOFF * (base.abs() + out.abs() + magnitude);
            // A NaN is infinitely wrong: `max` would drop it.
            let fraction = match error / allowed {
                _ if error == 0.0 => 0.0,
                fraction if fraction.is_nan() => f64::INFINITY,
                fraction => fraction,
            };
            self.worst = self.worst.max(fraction);
            self.errors += error * error;
            self.sizes += (out.abs() + delta.abs()).powi(2);
        }
    }

    pub(crate) fn verdict(&self) -> Verdict {
        let rms = if self.errors == 0.0 {
            0.0
        } else {
            (self.errors / self.sizes).sqrt() / ROUNDOFF
        };
        Verdict {
            worst: self.worst,
            rms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(out: f32, delta: f64) -> Verdict {
        let expected = ExpectedRow {
            delta: vec![delta],
            magnitude: vec![delta.abs()],
        };
        let mut judge = Judge::default();
        judge.row(&[bf16::ONE], &[bf16::from_f32(out)], &expected);
        judge.verdict()
    }

    #[test]
    fn an_exact_output_is_at_nought() {
        assert_eq!(judge(3.0, 2.0), Verdict::default());
    }

    #[test]
    fn a_nan_or_a_wrong_output_does_not_pass() {
        assert!(!judge(f32::NAN, 2.0).passes());
        assert!(!judge(f32::INFINITY, 2.0).passes());
        assert!(!judge(3.2, 2.0).passes());
        assert!(judge(3.01, 2.0).passes());
    }
}
