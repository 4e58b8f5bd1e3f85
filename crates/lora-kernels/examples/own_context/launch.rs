//! The launch, from addresses alone.
use lora_kernels::*;
use lora_weights::device::{DevicePtr, LoraPair};
use std::sync::Arc;

/// Rows of x and out, columns of both, rank.
pub(crate) const ROWS: usize = 2;
pub(crate) const K: usize = 16;
pub(crate) const RANK: usize = 16;

/// `out += 0.5 * (x @ A^T) @ B^T` on an engine's addresses.
pub(crate) fn launch(
    backend: Arc<dyn LoraBackend>,
    stream: Stream,
    (x, out): (DevicePtr, DevicePtr),
    (a, b): (DevicePtr, DevicePtr),
) -> Result<(), KernelError> {
    let pair = LoraPair {
        a,
        b,
        rank: RANK as u32,
        k_in: K as u32,
        n_out: K as u32,
        scale: 0.5,
        max_rank: RANK as u32,
    };
    // Sized once, for the largest step, and reused by every layer.
    let spec = ScratchSpec {
        max_rows: ROWS as u32,
        max_rank: RANK as u32,
        max_sites: 1,
        max_k_in: K as u32,
    };
    let mut scratch = Scratch::new(backend.clone(), spec)?;
    let kernels = LoraKernels::new(backend.clone(), LaunchOptions::default());
    let mut ctx = LaunchContext {
        kernels: &kernels,
        stream,
        scratch: &mut scratch,
    };
    // SAFETY: callers pass BF16 matrices of these sizes that live until the stream has been waited for.
    let x = unsafe { MatRef::from_raw(x, ROWS, K, K)? };
    // SAFETY: as above, and nothing else touches `out` meanwhile.
    let out = unsafe { MatMut::from_raw(out, ROWS, K, K)? };
    let applied = apply_lora_delta(
        &mut ctx,
        SiteKind::Attention,
        x,
        &mut [PairSite { pair, out }],
    )?;
    assert_eq!(applied, Applied::Launched { launches: 1 });
    backend.synchronize(stream)
}
