//! Values: not finite, too large for BF16, all zero. One pass over the bytes, on all threads of rayon's pool.
//!
//! The flags are gathered by `or` alone, with no branch on a value, so that the loop is vectorised and runs at the speed of
//! memory. Only a tensor that holds something bad is read again, to say where.

use crate::{AdapterStore, TensorDtype, TensorId};
use rayon::prelude::*;

/// Bytes a task: long enough to hide what a task costs, short enough to spread one large tensor.
const PIECE: usize = 1 << 20;

/// What the values of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Values {
    /// Index of the first value that is not finite as BF16.
    pub(super) first_bad: Option<usize>,
    /// Some value is not zero as BF16.
    pub(super) any_nonzero: bool,
}

/// Scans the tensors that `wanted` says; the others, and those of a dtype that does not load, come back as
/// [`Values::default`].
pub(super) fn scan(store: &AdapterStore, wanted: impl Fn(TensorId) -> bool) -> Vec<Values> {
    let count = store.tensors().len();
    let pieces: Vec<(usize, &[u8])> = (0..count)
        .filter(|&i| wanted(TensorId(i)) && store.tensors()[i].dtype.loads())
        .flat_map(|i| {
            let bytes = store.tensor_bytes(TensorId(i));
            bytes.chunks(PIECE).map(move |piece| (i, piece))
        })
        .collect();
    let flags: Vec<Flags> = pieces
        .par_iter()
        .map(|&(i, piece)| Flags::of(store.tensors()[i].dtype, piece))
        .collect();
    let mut values = vec![Values::default(); count];
    let mut bad = vec![false; count];
    for (&(i, _), flags) in pieces.iter().zip(&flags) {
        values[i].any_nonzero |= flags.nonzero;
        bad[i] |= flags.bad;
    }
    for i in (0..count).filter(|&i| bad[i]) {
        let meta = &store.tensors()[i];
        values[i].first_bad = first_bad(meta.dtype, store.tensor_bytes(TensorId(i)));
    }
    values
}

#[derive(Debug, Clone, Copy)]
struct Flags {
    bad: bool,
    nonzero: bool,
}

impl Flags {
    fn of(dtype: TensorDtype, bytes: &[u8]) -> Self {
        match dtype {
            TensorDtype::Bf16 => Self::of_16(bytes.as_chunks().0, BF16_CARRY),
            TensorDtype::F16 => Self::of_16(bytes.as_chunks().0, F16_CARRY),
            TensorDtype::F32 => Self::of_32(bytes.as_chunks().0),
            TensorDtype::Other(_) => Self {
                bad: false,
                nonzero: false,
            },
        }
    }

    fn of_16(values: &[[u8; 2]], carry: u16) -> Self {
        let (mut any, mut over) = (0u16, 0u16);
        for &value in values {
            let magnitude = u16::from_le_bytes(value) & 0x7fff;
            any |= magnitude;
            over |= magnitude.wrapping_add(carry);
        }
        Self {
            bad: over & 0x8000 != 0,
            nonzero: any != 0,
        }
    }

    fn of_32(values: &[[u8; 4]]) -> Self {
        let (mut any, mut over) = (0u32, 0u32);
        for &value in values {
            let magnitude = u32::from_le_bytes(value) & 0x7fff_ffff;
            any |= magnitude + F32_ROUNDS_TO_ZERO;
            over |= magnitude + F32_CARRY;
        }
        Self {
            bad: over & 0x8000_0000 != 0,
            nonzero: any >= 0x1_0000,
        }
    }
}

/// Added to a magnitude, reach the sign bit exactly where the value is infinite or NaN, or, for F32, rounds to infinity in
/// BF16 (from 0x7f7f8000 on, which ties away from the odd 0x7f7f).
const BF16_CARRY: u16 = 0x8000 - 0x7f80;
const F16_CARRY: u16 = 0x8000 - 0x7c00;
const F32_CARRY: u32 = 0x8000_0000 - 0x7f7f_8000;
/// Added to a magnitude, stays below 2^16 exactly where it rounds to zero in BF16 (up to 0x8000, which ties to even).
const F32_ROUNDS_TO_ZERO: u32 = 0x7fff;

fn first_bad(dtype: TensorDtype, bytes: &[u8]) -> Option<usize> {
    let bad_16 =
        |carry: u16| move |value: &[u8; 2]| (u16::from_le_bytes(*value) & 0x7fff) >= 0x8000 - carry;
    match dtype {
        TensorDtype::Bf16 => bytes.as_chunks().0.iter().position(bad_16(BF16_CARRY)),
        TensorDtype::F16 => bytes.as_chunks().0.iter().position(bad_16(F16_CARRY)),
        TensorDtype::F32 => bytes.as_chunks().0.iter().position(|value| {
            (u32::from_le_bytes(*value) & 0x7fff_ffff) >= 0x8000_0000 - F32_CARRY
        }),
        TensorDtype::Other(_) => None,
    }
}

/// The value at `index`, as it stands in the file.
pub(super) fn value_at(store: &AdapterStore, id: TensorId, index: usize) -> Option<f32> {
    let bytes = store.tensor_bytes(id);
    match store.tensor(id).dtype {
        TensorDtype::Bf16 => {
            let value = bytes.as_chunks().0.get(index)?;
            Some(half::bf16::from_le_bytes(*value).to_f32())
        }
        TensorDtype::F16 => {
            let value = bytes.as_chunks().0.get(index)?;
            Some(half::f16::from_le_bytes(*value).to_f32())
        }
        TensorDtype::F32 => {
            let value = bytes.as_chunks().0.get(index)?;
            Some(f32::from_le_bytes(*value))
        }
        TensorDtype::Other(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryTensor;
    use half::{bf16, f16};

    fn scan_one(tensor: MemoryTensor) -> Values {
        let store = AdapterStore::from_tensors("{}", [tensor]).unwrap();
        scan(&store, |_| true)[0]
    }

    fn f32s(values: &[f32]) -> Values {
        scan_one(MemoryTensor::from_f32("x", [values.len()], values))
    }

    fn halves(dtype: TensorDtype, bits: &[u16]) -> Values {
        let bytes: Vec<u8> = bits.iter().flat_map(|v| v.to_le_bytes()).collect();
        scan_one(MemoryTensor::new("x", dtype, [bits.len()], bytes))
    }

    #[test]
    fn every_16_bit_value_is_judged_as_half_judges_it() {
        for bits in 0..=u16::MAX {
            let got = halves(TensorDtype::Bf16, &[bits]);
            let value = bf16::from_bits(bits);
            assert_eq!(got.first_bad.is_none(), value.is_finite(), "{bits:#x}");
            assert_eq!(got.any_nonzero, value.to_f32() != 0.0, "{bits:#x}");
            let got = halves(TensorDtype::F16, &[bits]);
            let value = f16::from_bits(bits);
            assert_eq!(got.first_bad.is_none(), value.is_finite(), "{bits:#x}");
            assert_eq!(got.any_nonzero, value.to_f32() != 0.0, "{bits:#x}");
        }
    }

    #[test]
    fn f32_values_at_every_border_are_judged_as_their_bf16() {
        let borders = [0, 0x8000, 0x1_0000, 0x7f7f_8000, 0x7f80_0000, 0x7fff_ffff];
        for border in borders {
            for bits in border - border.min(2)..=border + 2 {
                for bits in [bits, bits ^ 0x8000_0000] {
                    let value = bf16::from_f32(f32::from_bits(bits));
                    let got = f32s(&[f32::from_bits(bits)]);
                    assert_eq!(got.first_bad.is_none(), value.is_finite(), "{bits:#x}");
                    assert_eq!(got.any_nonzero, value.to_f32() != 0.0, "{bits:#x}");
                }
            }
        }
    }

    #[test]
    fn the_first_bad_value_is_found_in_any_piece() {
        let mut values = vec![1.0f32; PIECE / 2];
        let (last, middle) = (values.len() - 1, PIECE / 4 + 3);
        values[last] = f32::NAN;
        assert_eq!(f32s(&values).first_bad, Some(last));
        values[middle] = f32::INFINITY;
        assert_eq!(f32s(&values).first_bad, Some(middle));
    }

    #[test]
    fn what_is_not_wanted_is_not_read() {
        let tensor = MemoryTensor::from_f32("x", [1], &[f32::NAN]);
        let store = AdapterStore::from_tensors("{}", [tensor]).unwrap();
        assert_eq!(scan(&store, |_| false)[0], Values::default());
    }
}
