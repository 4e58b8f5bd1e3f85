//! Lanes as one AVX-512 register.

use super::{LANES, PAIRS, Simd};
use half::bf16;
use pulp::cast;
use pulp::x86::V4;
use std::arch::x86_64::{__m256i, __m512, __m512i};

/// Proof that the CPU has AVX-512 F, BW, CD, DQ and VL.
#[derive(Clone, Copy)]
pub(in crate::host) struct Avx512(V4);

impl Avx512 {
    /// `None` where the CPU lacks a part of it.
    pub(in crate::host) fn new() -> Option<Self> {
        V4::try_new().map(Self)
    }

    /// The low halves of the 32-bit lanes as FP32: shifted up.
    #[inline(always)]
    fn low(self, v: __m512i) -> __m512 {
        cast(self.0.avx512f._mm512_slli_epi32::<16>(v))
    }

    /// The high halves of the 32-bit lanes as FP32: masked.
    #[inline(always)]
    fn high(self, v: __m512i) -> __m512 {
        let mask = self.0.avx512f._mm512_set1_epi32(0xffff_0000_u32 as i32);
        cast(self.0.avx512f._mm512_and_si512(v, mask))
    }
}

impl Simd for Avx512 {
    type V = __m512;

    const WIDE: bool = true;

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        self.0.vectorize(f)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        self.0.avx512f._mm512_set1_ps(value)
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> __m512 {
        cast(*values)
    }

    #[inline(always)]
    fn store(self, v: __m512) -> [f32; LANES] {
        cast(v)
    }

    #[inline(always)]
    fn widen(self, values: &[bf16; LANES]) -> __m512 {
        let halves: __m256i = cast(*values);
        self.low(self.0.avx512f._mm512_cvtepu16_epi32(halves))
    }

    #[inline(always)]
    fn widen_pairs(self, values: &[bf16; PAIRS]) -> [__m512; 2] {
        let pairs: __m512i = cast(*values);
        [self.low(pairs), self.high(pairs)]
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        self.0.avx512f._mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        let (avx, sse) = (self.0.avx, self.0.sse);
        let low = self.0.avx512f._mm512_castps512_ps256(v);
        let high = self.0.avx512dq._mm512_extractf32x8_ps::<1>(v);
        let v8 = avx._mm256_add_ps(low, high);
        let v4 = sse._mm_add_ps(
            avx._mm256_castps256_ps128(v8),
            avx._mm256_extractf128_ps::<1>(v8),
        );
        let v2 = sse._mm_add_ps(v4, sse._mm_movehl_ps(v4, v4));
        let v1 = sse._mm_add_ss(v2, sse._mm_shuffle_ps::<1>(v2, v2));
        sse._mm_cvtss_f32(v1)
    }

    #[inline(always)]
    fn round(self, v: __m512) -> __m512 {
        let f = self.0.avx512f;
        let bits: __m512i = cast(v);
        let odd = f._mm512_and_si512(f._mm512_srli_epi32::<16>(bits), f._mm512_set1_epi32(1));
        let carried =
            f._mm512_add_epi32(bits, f._mm512_add_epi32(odd, f._mm512_set1_epi32(0x7fff)));
        let nan = f._mm512_cmp_ps_mask::<{ std::arch::x86_64::_CMP_UNORD_Q }>(v, v);
        let quiet = f._mm512_or_si512(bits, f._mm512_set1_epi32(0x0040_0000));
        self.high(f._mm512_mask_mov_epi32(carried, nan, quiet))
    }

    #[inline(always)]
    fn narrow(self, v: __m512) -> [bf16; LANES] {
        let f = self.0.avx512f;
        cast(f._mm512_cvtepi32_epi16(f._mm512_srli_epi32::<16>(cast(v))))
    }

    /// Two neighbouring BF16 travel as one 32-bit element: three rounds of pairwise shuffles transpose 8 rows of 8 such elements in
    /// each half of the registers, rows 0..8 in the low halves and 8..16 in the high ones.
    #[inline(always)]
    fn transpose(self, rows: &[[bf16; LANES]], stride: usize) -> [__m512; LANES] {
        let f = self.0.avx512f;
        let mut joined = [f._mm512_setzero_si512(); 8];
        for (i, pair) in joined.iter_mut().enumerate() {
            let [upper, lower]: [__m256i; 2] =
                [cast(rows[i * stride]), cast(rows[(i + 8) * stride])];
            *pair = f._mm512_inserti64x4::<1>(f._mm512_castsi256_si512(upper), lower);
        }
        let mut by2 = joined;
        for i in 0..4 {
            let (a, b) = (joined[2 * i], joined[2 * i + 1]);
            by2[2 * i] = f._mm512_unpacklo_epi32(a, b);
            by2[2 * i + 1] = f._mm512_unpackhi_epi32(a, b);
        }
        let mut by4 = by2;
        for half in 0..2 {
            let at = 4 * half;
            for i in 0..2 {
                let (a, b) = (by2[at + i], by2[at + 2 + i]);
                by4[at + 2 * i] = f._mm512_unpacklo_epi64(a, b);
                by4[at + 2 * i + 1] = f._mm512_unpackhi_epi64(a, b);
            }
        }
        // by4[c] holds, for rows 0..4 (and 8..12), element c in its lower and element c + 4 in its upper 128 bits of each half.
        let lower: __m512i = cast([0_u64, 1, 8, 9, 4, 5, 12, 13]);
        let upper: __m512i = cast([2_u64, 3, 10, 11, 6, 7, 14, 15]);
        let mut columns = [self.splat(0.0); LANES];
        for c in 0..4 {
            let first = f._mm512_permutex2var_epi64(by4[c], lower, by4[c + 4]);
            let second = f._mm512_permutex2var_epi64(by4[c], upper, by4[c + 4]);
            columns[2 * c] = self.low(first);
            columns[2 * c + 1] = self.high(first);
            columns[2 * c + 8] = self.low(second);
            columns[2 * c + 9] = self.high(second);
        }
        columns
    }
}
