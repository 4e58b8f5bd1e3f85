use super::*;

/// Runs `check` on every level that this CPU has.
macro_rules! on_every_level {
    ($check:ident) => {
        $check(Portable);
        #[cfg(target_arch = "x86_64")]
        {
            Avx2::new().into_iter().for_each($check);
            Avx512::new().into_iter().for_each($check);
        }
    };
}

fn odd_values() -> [f32; LANES] {
    [
        0.0,
        -0.0,
        1.0,
        -1.003_906_2,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::from_bits(0x7f80_0001),
        f32::from_bits(0xffc1_2345),
        f32::from_bits(1),
        f32::from_bits(0x0000_8000),
        f32::from_bits(0x0001_8000),
        f32::MAX,
        3.1,
        -2.7e-20,
        1e30,
        f32::from_bits(0x3f80_8000),
    ]
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn rounding_is_that_of_half() {
    fn check<S: Simd>(simd: S) {
        let rounded = simd.round(simd.load(&odd_values()));
        let expected = odd_values().map(bf16::from_f32);
        assert_eq!(
            simd.narrow(rounded).map(bf16::to_bits),
            expected.map(bf16::to_bits)
        );
        let widened = expected.map(|v| f32::from_bits(u32::from(v.to_bits()) << 16));
        assert_eq!(bits(&simd.store(rounded)), bits(&widened));
    }
    on_every_level!(check);
}

#[test]
fn widening_keeps_every_pattern() {
    fn check<S: Simd>(simd: S) {
        for first in (0..=u16::MAX).step_by(PAIRS) {
            let values: [bf16; PAIRS] =
                std::array::from_fn(|i| bf16::from_bits(first.wrapping_add(i as u16)));
            let wide = |i: usize| u32::from(values[i].to_bits()) << 16;
            let [even, odd] = simd.widen_pairs(&values).map(|v| simd.store(v));
            let (plain, _) = values.split_first_chunk::<LANES>().unwrap();
            let plain = simd.store(simd.widen(plain));
            for i in 0..LANES {
                assert_eq!(even[i].to_bits(), wide(2 * i));
                assert_eq!(odd[i].to_bits(), wide(2 * i + 1));
                assert_eq!(plain[i].to_bits(), wide(i));
            }
        }
    }
    on_every_level!(check);
}

#[test]
fn sums_and_products_are_those_of_the_portable_form() {
    fn check<S: Simd>(simd: S) {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..200 {
            let mut lanes = || -> [f32; LANES] { std::array::from_fn(|_| (rng.f32() - 0.5) * 1e3) };
            let (a, b, c) = (lanes(), lanes(), lanes());
            let [va, vb, vc] = [a, b, c].map(|v| simd.load(&v));
            let fused = simd.store(simd.fma(va, vb, vc));
            assert_eq!(bits(&fused), bits(&Portable.fma(a, b, c)));
            assert_eq!(simd.sum(va).to_bits(), Portable.sum(a).to_bits());
            assert_eq!(simd.store(simd.splat(a[0])), [a[0]; LANES]);
        }
    }
    on_every_level!(check);
}

#[test]
fn transposing_puts_rows_into_columns() {
    fn check<S: Simd>(simd: S) {
        for stride in [1, 3] {
            let mut rows = [[bf16::NAN; LANES]; 3 * LANES];
            for n in 0..LANES {
                rows[n * stride] = std::array::from_fn(|r| bf16::from_f32((16 * n + r) as f32));
            }
            let columns = simd.transpose(&rows, stride).map(|v| simd.store(v));
            for (r, column) in columns.iter().enumerate() {
                for (n, value) in column.iter().enumerate() {
                    assert_eq!(*value, (16 * n + r) as f32);
                }
            }
        }
    }
    on_every_level!(check);
}

#[test]
fn detection_names_an_available_level() {
    assert!(SimdLevel::detect().is_available());
    assert!(SimdLevel::Portable.is_available());
}
