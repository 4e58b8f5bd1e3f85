//! Lanes as two AVX2 registers: lanes 0..8 and 8..16.

use super::{LANES, PAIRS, Simd};
use half::bf16;
use pulp::cast;
use pulp::x86::V3;
use std::arch::x86_64::{__m128i, __m256, __m256i};

/// Proof that the CPU has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(in crate::host) struct Avx2(V3);

impl Avx2 {
    /// `None` where the CPU lacks a part of it.
    pub(in crate::host) fn new() -> Option<Self> {
        V3::try_new().map(Self)
    }

    #[inline(always)]
    fn low(self, v: __m256i) -> __m256 {
        cast(self.0.avx2._mm256_slli_epi32::<16>(v))
    }

    #[inline(always)]
    fn high(self, v: __m256i) -> __m256 {
        let mask = self.0.avx._mm256_set1_epi32(0xffff_0000_u32 as i32);
        cast(self.0.avx2._mm256_and_si256(v, mask))
    }

    #[inline(always)]
    fn round_half(self, v: __m256) -> __m256 {
        let (avx, avx2) = (self.0.avx, self.0.avx2);
        let bits: __m256i = cast(v);
        let odd =
            avx2._mm256_and_si256(avx2._mm256_srli_epi32::<16>(bits), avx._mm256_set1_epi32(1));
        let carried = avx2._mm256_add_epi32(
            bits,
            avx2._mm256_add_epi32(odd, avx._mm256_set1_epi32(0x7fff)),
        );
        let nan = avx._mm256_cmp_ps::<{ std::arch::x86_64::_CMP_UNORD_Q }>(v, v);
        let quiet = avx2._mm256_or_si256(bits, avx._mm256_set1_epi32(0x0040_0000));
        self.high(avx2._mm256_blendv_epi8(carried, quiet, cast(nan)))
    }

    /// Eight rows of eight 32-bit elements, transposed: element `c` of the result holds element `c` of every row.
    #[inline(always)]
    fn transpose8(self, rows: [__m256i; 8]) -> [__m256i; 8] {
        let avx2 = self.0.avx2;
        let mut by2 = rows;
        for i in 0..4 {
            let (a, b) = (rows[2 * i], rows[2 * i + 1]);
            by2[2 * i] = avx2._mm256_unpacklo_epi32(a, b);
            by2[2 * i + 1] = avx2._mm256_unpackhi_epi32(a, b);
        }
        let mut by4 = by2;
        for half in 0..2 {
            let at = 4 * half;
            for i in 0..2 {
                let (a, b) = (by2[at + i], by2[at + 2 + i]);
                by4[at + 2 * i] = avx2._mm256_unpacklo_epi64(a, b);
                by4[at + 2 * i + 1] = avx2._mm256_unpackhi_epi64(a, b);
            }
        }
        let mut columns = by4;
        for c in 0..4 {
            columns[c] = avx2._mm256_permute2x128_si256::<0x20>(by4[c], by4[c + 4]);
            columns[c + 4] = avx2._mm256_permute2x128_si256::<0x31>(by4[c], by4[c + 4]);
        }
        columns
    }
}

impl Simd for Avx2 {
    type V = [__m256; 2];

    const WIDE: bool = false;

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        self.0.vectorize(f)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::V {
        [self.0.avx._mm256_set1_ps(value); 2]
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Self::V {
        cast(*values)
    }

    #[inline(always)]
    fn store(self, v: Self::V) -> [f32; LANES] {
        cast(v)
    }

    #[inline(always)]
    fn widen(self, values: &[bf16; LANES]) -> Self::V {
        let halves: [__m128i; 2] = cast(*values);
        let avx2 = self.0.avx2;
        [
            self.low(avx2._mm256_cvtepu16_epi32(halves[0])),
            self.low(avx2._mm256_cvtepu16_epi32(halves[1])),
        ]
    }

    #[inline(always)]
    fn widen_pairs(self, values: &[bf16; PAIRS]) -> [Self::V; 2] {
        let [a, b]: [__m256i; 2] = cast(*values);
        [[self.low(a), self.low(b)], [self.high(a), self.high(b)]]
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        let fma = self.0.fma;
        [
            fma._mm256_fmadd_ps(a[0], b[0], c[0]),
            fma._mm256_fmadd_ps(a[1], b[1], c[1]),
        ]
    }

    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let (avx, sse) = (self.0.avx, self.0.sse);
        let v8 = avx._mm256_add_ps(v[0], v[1]);
        let v4 = sse._mm_add_ps(
            avx._mm256_castps256_ps128(v8),
            avx._mm256_extractf128_ps::<1>(v8),
        );
        let v2 = sse._mm_add_ps(v4, sse._mm_movehl_ps(v4, v4));
        let v1 = sse._mm_add_ss(v2, sse._mm_shuffle_ps::<1>(v2, v2));
        sse._mm_cvtss_f32(v1)
    }

    #[inline(always)]
    fn round(self, v: Self::V) -> Self::V {
        [self.round_half(v[0]), self.round_half(v[1])]
    }

    #[inline(always)]
    fn narrow(self, v: Self::V) -> [bf16; LANES] {
        let avx2 = self.0.avx2;
        let [a, b] = [
            avx2._mm256_srli_epi32::<16>(cast(v[0])),
            avx2._mm256_srli_epi32::<16>(cast(v[1])),
        ];
        // Packing works within 128-bit lanes: the middle quarters come out swapped.
        cast(avx2._mm256_permute4x64_epi64::<0b11_01_10_00>(avx2._mm256_packus_epi32(a, b)))
    }

    #[inline(always)]
    fn transpose(self, rows: &[[bf16; LANES]], stride: usize) -> [Self::V; LANES] {
        let mut halves = [[self.0.avx._mm256_setzero_si256(); 8]; 2];
        for i in 0..8 {
            halves[0][i] = cast(rows[i * stride]);
            halves[1][i] = cast(rows[(i + 8) * stride]);
        }
        let [top, bottom] = [self.transpose8(halves[0]), self.transpose8(halves[1])];
        let mut columns = [self.splat(0.0); LANES];
        for c in 0..8 {
            columns[2 * c] = [self.low(top[c]), self.low(bottom[c])];
            columns[2 * c + 1] = [self.high(top[c]), self.high(bottom[c])];
        }
        columns
    }
}
