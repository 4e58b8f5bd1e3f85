//! The facade, driven as an engine drives it, on real adapters.

mod experts;
mod installs;
mod life;
mod overlays;
mod parallel;
mod steps;

use half::bf16;
use lora_runtime::config::{BackendKind, ModelSpec};
use lora_runtime::kernels::{Applied, DeviceBuffer, Stream};
use lora_runtime::weights::LoraModule;
use lora_runtime::{Adapter, LoraRuntime, ModuleOut, RuntimeOptions};
use lora_tests::case_dir;

pub(crate) fn model(case: &str) -> ModelSpec {
    let text =
        std::fs::read_to_string(case_dir(case).join("config.json")).expect("config.json is there");
    ModelSpec::from_hf_config(&text).expect("a known family")
}

pub(crate) fn runtime(case: &str, options: RuntimeOptions) -> LoraRuntime {
    LoraRuntime::open(BackendKind::Host, model(case), options).expect("the host backend opens")
}

pub(crate) fn adapter(runtime: &LoraRuntime, case: &str) -> Adapter {
    runtime
        .adapter(case, &case_dir(case).join("adapter"))
        .expect("the adapter opens")
}

/// Four slots that may be rotated.
pub(crate) fn rotating() -> RuntimeOptions {
    let mut options = RuntimeOptions::new(4, 16);
    options.pool.policy.allow_rotation = true;
    options
}

/// A matrix on the device, values from a small deterministic sequence.
pub(crate) fn matrix(runtime: &LoraRuntime, rows: usize, cols: usize, seed: usize) -> DeviceBuffer {
    let value = |at: usize| bf16::from_f32((((at * 37 + seed * 11) % 64) as f32 - 31.5) / 32.0);
    let values: Vec<bf16> = (0..rows * cols).map(value).collect();
    runtime.buffer(&values).expect("memory")
}

pub(crate) fn bits(buffer: &DeviceBuffer, len: usize) -> Vec<u16> {
    buffer
        .download::<bf16>(0, len)
        .expect("reads back")
        .into_iter()
        .map(bf16::to_bits)
        .collect()
}

/// q of layer 0 for rows that make these requests: the bits of every row.
pub(crate) fn routed_q(runtime: &LoraRuntime, requests: &[i32]) -> Vec<Vec<u16>> {
    let rows = requests.len();
    let (x, mut out) = (matrix(runtime, rows, 32, 1), matrix(runtime, rows, 32, 2));
    let (mut batch, mut scratch) = (
        runtime.batch(64).expect("fits"),
        runtime.scratch(64).expect("fits"),
    );
    runtime
        .route(&mut batch, Stream::OWN, requests, rows)
        .expect("slots exist");
    let q = ModuleOut {
        module: LoraModule::QProj,
        out: out.mat_mut(rows, 32, 32).expect("fits"),
    };
    let mut ctx = runtime.context(Stream::OWN, &mut scratch);
    let applied = runtime
        .apply(&mut ctx, &batch, 0, x.mat(rows, 32, 32).expect("fits"), [q])
        .expect("launches");
    assert!(matches!(applied, Applied::Launched { .. }));
    bits(&out, rows * 32)
        .chunks(32)
        .map(<[u16]>::to_vec)
        .collect()
}
