//! One adapter's experts on rows that an engine has sorted by expert: `cargo run -p lora-moe --example sorted_experts`.
use half::bf16;
use lora_kernels::{host::HostBackend, *};
use lora_moe::{SortedExperts, apply_expert_lora_sorted, apply_router_lora};
use lora_weights::{ExpertLoraLayer, ExpertProj, device::LoraPair};
use std::sync::Arc;

const HIDDEN: usize = 16;
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let backend = Arc::new(HostBackend::new());
    let filled = |elements: usize, value: f32| {
        DeviceBuffer::from_slice(backend.clone(), &vec![bf16::from_f32(value); elements])
    };
    // A pair of rank 16 whose delta of a row of ones is 0.5 * 16 * 16 = 128; a pool of `lora-weights` has the real ones.
    let ones = filled(16 * HIDDEN, 1.0)?;
    let pair = LoraPair {
        a: ones.ptr(),
        b: ones.ptr(),
        rank: 16,
        k_in: HIDDEN as u32,
        n_out: HIDDEN as u32,
        scale: 0.5,
        max_rank: 16,
    };
    let router = LoraPair { n_out: 2, ..pair };
    let layer = &ExpertLoraLayer::from_pairs(Some(router), [(1, ExpertProj::Up, pair)]);

    let kernels = LoraKernels::new(backend.clone(), LaunchOptions::default());
    let spec = ScratchSpec {
        max_rows: 3,
        max_rank: 16,
        max_sites: 1,
        max_k_in: HIDDEN as u32,
    };
    let mut scratch = Scratch::new(backend.clone(), spec)?;
    let mut ctx = LaunchContext {
        kernels: &kernels,
        stream: Stream::OWN,
        scratch: &mut scratch,
    };
    // Before top-k: the router's delta on the logits of three tokens and two experts.
    let (x, mut logits) = (filled(3 * HIDDEN, 1.0)?, filled(3 * 2, 0.0)?);
    let (x, out) = (x.mat(3, HIDDEN, HIDDEN)?, logits.mat_mut(3, 2, 2)?);
    apply_router_lora(&mut ctx, router, x, out, 1024)?;
    // After up's grouped product, before the activation: one row went to expert 0, two to expert 1.
    let mut up = filled(3 * HIDDEN, 0.0)?;
    let (proj, offsets) = (ExpertProj::Up, &[0, 1, 3]);
    let experts = SortedExperts {
        layer,
        proj,
        offsets,
    };
    apply_expert_lora_sorted(&mut ctx, experts, x, up.mat_mut(3, HIDDEN, HIDDEN)?, 1024)?;
    backend.synchronize(Stream::OWN)?;
    let row = |at: usize| up.download::<bf16>(at * HIDDEN, HIDDEN);
    assert_eq!(row(0)?, [bf16::ZERO; HIDDEN]);
    assert_eq!(row(2)?, [bf16::from_f32(128.0); HIDDEN]);
    Ok(())
}
