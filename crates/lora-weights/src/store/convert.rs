//! Little-endian bytes of any alignment to BF16, nearest even.
//!
//! Loops are free of branches on values, so that the compiler vectorises them.

use super::TensorDtype;
use half::bf16;
use half::f16;
use half::slice::HalfFloatSliceExt;

/// A two-dimensional walk over a tensor's elements and over a destination, all in elements: element `(i, j)` of the walk is
/// read at `start + i * src[0] + j * src[1]` and written at `i * dst[0] + j * dst[1]`.
///
/// Whole rows, ranges of rows, columns of a stacked B and transposes are all such walks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Walk {
    pub(crate) start: usize,
    pub(crate) counts: [usize; 2],
    pub(crate) src: [usize; 2],
    pub(crate) dst: [usize; 2],
}

/// Runs `walk` from `src` (elements of `dtype`) into `dst`.
///
/// # Panics
/// If the walk leaves either side, or if `dtype` does not load: the audit lets neither through.
pub(crate) fn convert(dtype: TensorDtype, src: &[u8], walk: &Walk, dst: &mut [bf16]) {
    match dtype {
        TensorDtype::Bf16 => run(src.as_chunks().0, walk, dst, copy_bf16, |e: [u8; 2]| {
            bf16::from_le_bytes(e)
        }),
        TensorDtype::F16 => run(src.as_chunks().0, walk, dst, round_f16, |e: [u8; 2]| {
            bf16::from_bits(round(f16::from_le_bytes(e).to_f32().to_bits()))
        }),
        TensorDtype::F32 => run(src.as_chunks().0, walk, dst, round_f32, |e: [u8; 4]| {
            bf16::from_bits(round(u32::from_le_bytes(e)))
        }),
        TensorDtype::Other(_) => panic!("{dtype} does not load"),
    }
}

/// The walk, with `row` for runs that are contiguous on both sides and `one` for single elements.
fn run<const N: usize>(
    src: &[[u8; N]],
    walk: &Walk,
    dst: &mut [bf16],
    row: impl Fn(&[[u8; N]], &mut [bf16]),
    one: impl Fn([u8; N]) -> bf16,
) {
    let Walk {
        start,
        counts: [n, m],
        src: [si, sj],
        dst: [di, dj],
    } = *walk;
    if n == 0 || m == 0 {
        return;
    }
    if sj == 1 && dj == 1 {
        if n == 1 || (si == m && di == m) {
            let len = n * m;
            row(&src[start..start + len], &mut dst[..len]);
            return;
        }
        for i in 0..n {
            let from = start + i * si;
            row(&src[from..from + m], &mut dst[i * di..i * di + m]);
        }
        return;
    }
    for i in 0..n {
        let from = &src[start + i * si..];
        let to = &mut dst[i * di..];
        for j in 0..m {
            to[j * dj] = one(from[j * sj]);
        }
    }
}

fn copy_bf16(src: &[[u8; 2]], dst: &mut [bf16]) {
    for (to, from) in dst.iter_mut().zip(src) {
        *to = bf16::from_le_bytes(*from);
    }
}

fn round_f32(src: &[[u8; 4]], dst: &mut [bf16]) {
    for (to, from) in dst.iter_mut().zip(src) {
        *to = bf16::from_bits(round(u32::from_le_bytes(*from)));
    }
}

fn round_f16(src: &[[u8; 2]], dst: &mut [bf16]) {
    // By blocks: `half` widens slices with the processor's own conversion where there is one.
    const BLOCK: usize = 256;
    let mut narrow = [f16::ZERO; BLOCK];
    let mut wide = [0.0f32; BLOCK];
    for (to, from) in dst.chunks_mut(BLOCK).zip(src.chunks(BLOCK)) {
        for (n, bytes) in narrow.iter_mut().zip(from) {
            *n = f16::from_le_bytes(*bytes);
        }
        narrow.convert_to_f32_slice(&mut wide);
        for (t, w) in to.iter_mut().zip(&wide) {
            *t = bf16::from_bits(round(w.to_bits()));
        }
    }
}

/// The upper half of an F32, rounded to nearest, ties to even. A NaN stays one: its quiet bit is set, since rounding could
/// carry it into infinity or drop the bits that make it a NaN.
#[inline]
fn round(bits: u32) -> u16 {
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let nan = (bits >> 16) as u16 | 0x40;
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        nan
    } else {
        rounded
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(dtype: TensorDtype, src: &[u8], count: usize) -> Vec<bf16> {
        let mut out = vec![bf16::ZERO; count];
        let walk = Walk {
            start: 0,
            counts: [1, count],
            src: [count, 1],
            dst: [count, 1],
        };
        convert(dtype, src, &walk, &mut out);
        out
    }

    proptest! {
        #[test]
        fn f32_rounds_as_half_does(values in prop::collection::vec(any::<u32>(), 0..600)) {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let got = all(TensorDtype::F32, &bytes, values.len());
            let want: Vec<u16> = values.iter().map(|&v| bf16::from_f32(f32::from_bits(v)).to_bits()).collect();
            prop_assert_eq!(got.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), want);
        }

        #[test]
        fn a_strided_walk_reads_what_indexing_reads(
            (n, m, start, si, sj) in (1usize..5, 1usize..5, 0usize..7, 1usize..9, 1usize..9),
        ) {
            let count = start + (n - 1) * si + (m - 1) * sj + 1;
            let values: Vec<f32> = (0..count).map(|v| v as f32).collect();
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let walk = Walk { start, counts: [n, m], src: [si, sj], dst: [1, n] };
            let mut out = vec![bf16::NAN; n * m];
            convert(TensorDtype::F32, &bytes, &walk, &mut out);
            for i in 0..n {
                for j in 0..m {
                    prop_assert_eq!(out[i + j * n].to_f32(), values[start + i * si + j * sj]);
                }
            }
        }
    }

    #[test]
    fn every_f16_rounds_as_by_way_of_f32() {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let got = all(TensorDtype::F16, &bytes, 1 << 16);
        for (bits, value) in (0..=u16::MAX).zip(got) {
            let want = bf16::from_f32(f16::from_bits(bits).to_f32());
            assert_eq!(value.to_bits(), want.to_bits(), "{bits:#x}");
        }
    }

    #[test]
    fn ties_go_to_the_even_neighbour() {
        let bytes: Vec<u8> = [0x3f80_8000u32, 0x3f81_8000, 0x3f80_8001]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        let got = all(TensorDtype::F32, &bytes, 3);
        assert_eq!(
            got.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
            [0x3f80, 0x3f82, 0x3f81]
        );
    }
}
