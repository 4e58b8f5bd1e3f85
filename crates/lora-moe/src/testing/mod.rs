//! Test bodies that run on any backend: the folds agree with each other to the bit, and with a naive reference.
//!
//! ```
//! use lora_kernels::host::HostBackend;
//! use lora_kernels::testing::TestBackend;
//! use lora_moe::testing::{Choice, MoeShape, folds_agree};
//! use std::sync::Arc;
//!
//! let backend: TestBackend = Arc::new(HostBackend::new());
//! let shape = MoeShape { tokens: 5, top_k: 2, num_experts: 4, choice: Choice::Spread };
//! folds_agree(&backend, shape);
//! ```

mod case;
mod device;
mod router;

pub use case::{Choice, MoeCase, MoeShape, Outs};
pub use device::DeviceMoe;
pub use router::router_folds_agree;

use lora_kernels::testing::TestBackend;

/// The shapes that every backend is held to.
pub const SHAPES: [MoeShape; 14] = {
    use Choice::{OneExpert, PastTheTable, Spread};
    const fn shape(tokens: usize, top_k: usize, num_experts: usize, choice: Choice) -> MoeShape {
        MoeShape {
            tokens,
            top_k,
            num_experts,
            choice,
        }
    }
    [
        shape(1, 1, 1, Spread),
        shape(1, 8, 128, Spread),
        shape(7, 1, 3, Spread),
        shape(33, 8, 16, Spread),
        shape(40, 22, 64, Spread),
        shape(9, 8, 512, Spread),
        shape(12, 22, 512, PastTheTable),
        shape(30, 2, 5, PastTheTable),
        shape(1, 1, 4, PastTheTable),
        shape(90, 1, 8, OneExpert),
        shape(350, 1, 8, OneExpert),
        shape(60, 8, 8, Spread),
        shape(1100, 1, 8, OneExpert),
        shape(180, 8, 8, Spread),
    ]
};

/// Host-driven, sorted and unsorted folds give the same bits, which lie where the naive reference says; rows without a fold keep theirs; a
/// part of the batch gives the bits that the whole batch gives.
pub fn folds_agree(backend: &TestBackend, shape: MoeShape) {
    let case = MoeCase::random(shape);
    let mut device = DeviceMoe::new(backend, &case);
    let unsorted = device.unsorted(&case);
    case.assert_near_reference(&unsorted);
    assert_same(&case, "sorted", &unsorted, &device.sorted(&case));
    for max_rows in [0, 3, usize::MAX] {
        let what = format!("host-driven, {max_rows} rows a launch");
        let host_driven = device.host_driven(&case, max_rows);
        assert_same(&case, &what, &unsorted, &host_driven);
    }
    let tokens = shape.tokens.div_ceil(2);
    let part = case.first_tokens(tokens);
    let of_part = device.unsorted(&part);
    for (proj, out) in of_part.iter().enumerate() {
        let same = bits(out) == bits(&unsorted[proj][..out.len()]);
        assert!(same, "{shape:?}: the first {tokens} tokens alone, {proj}");
    }
}

/// [`folds_agree`] for all of [`SHAPES`].
pub fn all_folds_agree(backend: &TestBackend) {
    for shape in SHAPES {
        folds_agree(backend, shape);
    }
}

/// A removed slot folds nothing, another that takes its place folds its own experts.
pub fn tables_follow_their_slots(backend: &TestBackend) {
    let shape = MoeShape {
        tokens: 20,
        top_k: 4,
        num_experts: 8,
        choice: Choice::Spread,
    };
    let case = MoeCase::random(shape);
    let mut device = DeviceMoe::new(backend, &case);
    let all = device.unsorted(&case);
    let tables = device.tables();
    assert_eq!(tables.resident_slots(), MoeCase::RESIDENT_SLOTS);
    tables.remove(1).expect("remove");
    tables.remove(1).expect("twice is once");
    let without = case.without_slot(1);
    assert!(device.unsorted(&without) != all, "slot 1 takes part");
    without.assert_near_reference(&device.unsorted(&without));
    device.install(1);
    assert_same(&case, "installed again", &all, &device.unsorted(&case));
}

/// Asserts that two runs gave the same bits.
pub fn assert_same(case: &MoeCase, what: &str, expected: &Outs, found: &Outs) {
    for (proj, (expected, found)) in expected.iter().zip(found).enumerate() {
        let width = expected.len() / case.rows().max(1);
        let pairs = expected.chunks(width).zip(found.chunks(width));
        for (row, (expected, found)) in pairs.enumerate() {
            let same = bits(expected) == bits(found);
            assert!(
                same,
                "{:?}: {what}: projection {proj}, row {row}",
                case.shape()
            );
        }
    }
}

fn bits(values: &[half::bf16]) -> Vec<u16> {
    values.iter().map(|value| value.to_bits()).collect()
}
