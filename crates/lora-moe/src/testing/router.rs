//! Router folds: from the host, one adapter a launch, and row by row.

use crate::{apply_router_lora, apply_router_lora_rows};
use half::bf16;
use lora_kernels::testing::{DeviceTables, Fill, Rng, TestAdapter, TestBackend, naive_delta};
use lora_kernels::{
    Applied, DeviceBuffer, LaunchContext, LaunchOptions, LoraKernels, RowGroups, RowGroupsSpec,
    Scratch, ScratchSpec, Skip, Stream,
};
use lora_weights::device::DeviceMemory;
use std::sync::Arc;

const HIDDEN: usize = 72;
const EXPERTS: usize = 12;
const ROWS: usize = 70;

/// Logits of rows with two adapters and base rows: each adapter's rows are, to the bit, what a launch of that adapter alone gives in blocks of
/// any size, and lie where the naive reference says.
pub fn router_folds_agree(backend: &TestBackend) {
    let mut rng = Rng::new(11);
    let memory = Arc::clone(backend) as Arc<dyn DeviceMemory>;
    let dims = (HIDDEN as u32, EXPERTS as u32);
    let adapters = [4, 16].map(|rank| TestAdapter::random(&mut rng, Fill::Signed, rank, dims));
    let on_device = adapters
        .each_ref()
        .map(|adapter| adapter.upload(&memory).expect("upload"));
    let pairs = on_device.each_ref().map(|adapter| Some(adapter.pair));
    let tables = DeviceTables::upload(&memory, &pairs, (dims.0, dims.1, 16)).expect("tables");
    let x = rng.values(ROWS * HIDDEN, Fill::Signed, 1.0);
    let base = rng.values(ROWS * EXPERTS, Fill::Signed, 1.0);
    let slots: Vec<i32> = (0..ROWS).map(|row| row as i32 % 3 - 1).collect();

    let options = LaunchOptions::default();
    let kernels = LoraKernels::new(Arc::clone(backend), options);
    let spec = ScratchSpec {
        max_rows: ROWS as u32,
        max_rank: 16,
        max_sites: 1,
        max_k_in: HIDDEN as u32,
    };
    let mut scratch = Scratch::new(Arc::clone(&memory), spec).expect("scratch");
    let spec = RowGroupsSpec::new(ROWS as u32, 2, options.gemv_max_m);
    let mut groups = RowGroups::new(Arc::clone(&memory), spec).expect("groups");
    groups.build_host(&slots).expect("slots exist");
    let x_buffer = DeviceBuffer::from_slice(Arc::clone(&memory), &x).expect("upload");
    let x_view = x_buffer.mat(ROWS, HIDDEN, HIDDEN).expect("x");
    let mut run = |kernels: &LoraKernels, fold: Fold<'_>| {
        let mut out = DeviceBuffer::from_slice(Arc::clone(&memory), &base).expect("upload");
        let logits = out.mat_mut(ROWS, EXPERTS, EXPERTS).expect("logits");
        let mut ctx = LaunchContext {
            kernels,
            stream: Stream::OWN,
            scratch: &mut scratch,
        };
        let applied = match fold {
            Fold::Rows => apply_router_lora_rows(&mut ctx, tables.route(), &groups, x_view, logits)
                .map_err(Into::into),
            Fold::Pair(pair, max_rows) => {
                apply_router_lora(&mut ctx, *pair, x_view, logits, max_rows)
            }
        };
        backend.synchronize(Stream::OWN).expect("synchronize");
        let logits: Vec<bf16> = out.download(0, ROWS * EXPERTS).expect("download");
        (applied.expect("fold"), logits)
    };

    let (applied, routed) = run(&kernels, Fold::Rows);
    assert_eq!(applied, Applied::Launched { launches: 1 });
    for (slot, pair) in on_device.iter().map(|adapter| &adapter.pair).enumerate() {
        for (max_rows, launches) in [(0, ROWS as u32), (32, 3), (usize::MAX, 1)] {
            let (applied, alone) = run(&kernels, Fold::Pair(pair, max_rows));
            assert_eq!(applied, Applied::Launched { launches });
            for row in (0..ROWS).filter(|row| slots[*row] == slot as i32) {
                let same = bits(&alone, row) == bits(&routed, row);
                assert!(same, "slot {slot}, row {row}, {max_rows} rows a launch");
            }
        }
    }
    assert_near_reference(&adapters, &slots, &x, (&base, &routed));

    let off = LaunchOptions {
        no_apply: true,
        ..options
    };
    let kernels = LoraKernels::new(Arc::clone(backend), off);
    for fold in [Fold::Rows, Fold::Pair(&on_device[0].pair, 8)] {
        let (applied, untouched) = run(&kernels, fold);
        assert_eq!(applied, Applied::Skipped(Skip::NoApply));
        assert!(untouched == base, "a lever leaves every logit as it is");
    }
}

/// Asserts that logits lie where two loops in f64 say, and that base rows kept their bits.
fn assert_near_reference(
    adapters: &[TestAdapter],
    slots: &[i32],
    x: &[bf16],
    (base, routed): (&[bf16], &[bf16]),
) {
    for row in 0..ROWS {
        let Ok(slot) = usize::try_from(slots[row]) else {
            assert!(bits(routed, row) == bits(base, row), "base row {row}");
            continue;
        };
        let expected = naive_delta(&x[row * HIDDEN..][..HIDDEN], &adapters[slot]);
        for column in 0..EXPERTS {
            let at = row * EXPERTS + column;
            let (base, out) = (base[at].to_f64(), routed[at].to_f64());
            let allowed = 2.0 / 256.0 * (base.abs() + out.abs() + expected.magnitude[column]);
            let error = (out - base - expected.delta[column]).abs();
            assert!(error <= allowed, "row {row}, column {column}");
        }
    }
}

/// Which fold to run.
enum Fold<'a> {
    Rows,
    Pair(&'a lora_weights::device::LoraPair, usize),
}

fn bits(logits: &[bf16], row: usize) -> Vec<u16> {
    let row = &logits[row * EXPERTS..][..EXPERTS];
    row.iter().map(|value| value.to_bits()).collect()
}
