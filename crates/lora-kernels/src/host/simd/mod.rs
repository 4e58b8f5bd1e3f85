//! Sixteen FP32 lanes in three forms that give the same bits: one AVX-512 register, two AVX2 registers, or an array.
//!
//! Every form does the same operations on the same lanes in the same order, so a result never depends on which one the
//! machine picked. That rules out the hardware's BF16 dot products (they flush denormals and round pairs): BF16 is widened
//! by a shift and multiplied by a fused multiply-add. Instructions come through `pulp`'s tokens, whose existence proves that the CPU has
//! them, so nothing here is unsafe.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
#[cfg(test)]
mod tests;

use half::bf16;

pub(super) use portable::Portable;

#[cfg(target_arch = "x86_64")]
pub(super) use {avx2::Avx2, avx512::Avx512};

/// Lanes of a vector.
pub(super) const LANES: usize = 16;

/// BF16 values that one [`Simd::widen_pairs`] takes.
pub(super) const PAIRS: usize = 2 * LANES;

/// Which instructions the host backend runs on. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum SimdLevel {
    /// Plain code, vectorised by the compiler for the target's baseline.
    Portable,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, CD, DQ and VL.
    Avx512,
}

impl SimdLevel {
    /// The best level of this CPU.
    pub fn detect() -> Self {
        [Self::Avx512, Self::Avx2]
            .into_iter()
            .find(|level| level.is_available())
            .unwrap_or(Self::Portable)
    }

    /// Whether this CPU has the level's instructions.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Avx2::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Avx512::new().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }
}

/// Sixteen FP32 lanes and what the delta kernels do with them.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen FP32 values.
    type V: Copy;

    /// Whether there are registers for sixteen accumulators beside their operands.
    const WIDE: bool;

    /// Runs `f` compiled for these instructions; everything it calls must be `#[inline(always)]`.
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R;

    /// `value` in every lane.
    fn splat(self, value: f32) -> Self::V;

    /// Lane `i` is `values[i]`.
    fn load(self, values: &[f32; LANES]) -> Self::V;

    /// The lanes as an array.
    fn store(self, v: Self::V) -> [f32; LANES];

    /// Lane `i` is `values[i]`, exactly.
    fn widen(self, values: &[bf16; LANES]) -> Self::V;

    /// Lane `i` of the first is `values[2 * i]`, of the second `values[2 * i + 1]`: one load and two cheap operations where widening in order
    /// takes two loads and two shuffles.
    fn widen_pairs(self, values: &[bf16; PAIRS]) -> [Self::V; 2];

    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;

    /// The sum of all lanes: halves are added (lane `i` to lane `i + 8`), then quarters, then pairs.
    fn sum(self, v: Self::V) -> f32;

    /// Each lane rounded to the nearest BF16, ties to even, NaN made quiet.
    fn round(self, v: Self::V) -> Self::V;

    /// The lanes as BF16. They must be BF16 values already, as [`round`](Self::round) gives them.
    fn narrow(self, v: Self::V) -> [bf16; LANES];

    /// Element `r` holds column `r` of the 16 x 16 block whose row `n` is `rows[n * stride]`.
    fn transpose(self, rows: &[[bf16; LANES]], stride: usize) -> [Self::V; LANES];
}
