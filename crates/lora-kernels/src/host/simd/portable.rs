//! Lanes as an array. On targets whose baseline has fused multiply-add (AArch64) the compiler vectorises these loops; elsewhere
//! `mul_add` is a call, and this form is the slow, correct one.

use super::{LANES, PAIRS, Simd};
use half::bf16;
use std::array::from_fn;

/// Needs nothing of the CPU.
#[derive(Debug, Clone, Copy)]
pub(in crate::host) struct Portable;

impl Simd for Portable {
    type V = [f32; LANES];

    const WIDE: bool = false;

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::V {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Self::V {
        *values
    }

    #[inline(always)]
    fn store(self, v: Self::V) -> [f32; LANES] {
        v
    }

    #[inline(always)]
    fn widen(self, values: &[bf16; LANES]) -> Self::V {
        from_fn(|i| widen_one(values[i]))
    }

    #[inline(always)]
    fn widen_pairs(self, values: &[bf16; PAIRS]) -> [Self::V; 2] {
        [
            from_fn(|i| widen_one(values[2 * i])),
            from_fn(|i| widen_one(values[2 * i + 1])),
        ]
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let v8: [f32; 8] = from_fn(|i| v[i] + v[i + 8]);
        let v4: [f32; 4] = from_fn(|i| v8[i] + v8[i + 4]);
        (v4[0] + v4[2]) + (v4[1] + v4[3])
    }

    #[inline(always)]
    fn round(self, v: Self::V) -> Self::V {
        from_fn(|i| round_one(v[i]))
    }

    #[inline(always)]
    fn narrow(self, v: Self::V) -> [bf16; LANES] {
        from_fn(|i| bf16::from_bits((v[i].to_bits() >> 16) as u16))
    }

    #[inline(always)]
    fn transpose(self, rows: &[[bf16; LANES]], stride: usize) -> [Self::V; LANES] {
        from_fn(|r| from_fn(|n| widen_one(rows[n * stride][r])))
    }
}

/// `value` as FP32, exactly: `bf16::to_f32` makes signalling NaN quiet, which the vector forms do not.
#[inline(always)]
fn widen_one(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Adding half of the last place, less one where the last kept bit is even, carries exactly when rounding goes up; a NaN would
/// carry into infinity or lose its payload, so it only gets its quiet bit.
#[inline(always)]
fn round_one(value: f32) -> f32 {
    let bits = value.to_bits();
    let rounded = if value.is_nan() {
        bits | 0x0040_0000
    } else {
        bits.wrapping_add(0x7fff + (bits >> 16 & 1))
    };
    f32::from_bits(rounded & 0xffff_0000)
}
