//! Batched LoRA deltas on BF16 activations: launchers, plans and backends.
//!
//! For each row of a batch, `out += scale * (x @ A^T) @ B^T`, in place, with the row's own adapter. [`apply_lora_delta`] applies one packed
//! adapter to all rows, [`apply_lora_bgmv`] the adapter that each row's slot names; several projections that read the same x go in one launch.
//! [`host::HostBackend`] runs launches on the CPU: it is the default where there is no GPU, and the reference in tests.
//! [`cuda::CudaBackend`] runs them on an NVIDIA GPU.
//!
//! Operands are typed views ([`MatRef`], [`MatMut`]); a launch on any backend is one plain value ([`DeltaParams`]). Rounding follows docs/numerics.md:
//! the rank vector and the delta are rounded to BF16 once, the fold once, sums are FP32, and a row's bits depend on nothing but its own
//! x, adapter and base row.
//!
//! ```
//! use half::bf16;
//! use lora_kernels::host::HostBackend;
//! use lora_kernels::*;
//! use lora_weights::device::LoraPair;
//! use std::sync::Arc;
//!
//! // An adapter of rank 1, padded to 16, on a projection from 2 columns to 3.
//! let backend = Arc::new(HostBackend::new());
//! let upload = |values: &[f32]| {
//!     let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
//!     DeviceBuffer::from_slice(backend.clone(), &values)
//! };
//! let mut a = vec![0.0; 16 * 2];
//! a[..2].copy_from_slice(&[1.0, 2.0]);
//! let mut b = vec![0.0; 3 * 16];
//! (b[0], b[16], b[32]) = (1.0, 10.0, 100.0);
//! let (a, b) = (upload(&a)?, upload(&b)?);
//! let pair = LoraPair { a: a.ptr(), b: b.ptr(), rank: 1, k_in: 2, n_out: 3, scale: 0.5, max_rank: 16 };
//!
//! // Two rows.
//! let x = upload(&[1.0, 1.0, 0.0, 4.0])?;
//! let mut out = upload(&[0.0; 6])?;
//! let kernels = LoraKernels::new(backend.clone(), LaunchOptions::default());
//! let spec = ScratchSpec { max_rows: 2, max_rank: 16, max_sites: 1, max_k_in: 2 };
//! let mut scratch = Scratch::new(backend.clone(), spec)?;
//! let mut ctx = LaunchContext { kernels: &kernels, stream: Stream::OWN, scratch: &mut scratch };
//! let mut sites = [PairSite { pair, out: out.mat_mut(2, 3, 3)? }];
//! let applied = apply_lora_delta(&mut ctx, SiteKind::Attention, x.mat(2, 2, 2)?, &mut sites)?;
//! assert_eq!(applied, Applied::Launched { launches: 1 });
//!
//! backend.synchronize(Stream::OWN)?;
//! let rows: Vec<f32> = out.download::<bf16>(0, 6)?.iter().map(|v| v.to_f32()).collect();
//! assert_eq!(rows, [1.5, 15.0, 150.0, 4.0, 40.0, 400.0]);
//! # Ok::<(), KernelError>(())
//! ```
//!
//! # Features
//! * `testing` adds the module `testing`: data makers, a naive reference and test bodies that run on any backend.
//! * `bench` adds the module `bench`: the deltas of a layer, checked against that reference and then timed, on any backend.

mod backend;
#[cfg(feature = "bench")]
pub mod bench;
mod buffer;
pub mod cuda;
mod error;
mod groups;
pub mod host;
mod launch;
mod limits;
pub mod overlay;
mod params;
mod plan;
mod scratch;
mod strided;
#[cfg(feature = "testing")]
pub mod testing;
mod view;
mod weights;

pub use backend::{DeviceCaps, LoraBackend, Stream};
pub use buffer::DeviceBuffer;
pub use error::{KernelError, Operand};
pub use groups::{ExpertRouting, ExpertSpace, Grouping, RowGroups, RowGroupsSpec};
pub use launch::{
    Applied, LaunchContext, LaunchOptions, LoraKernels, PairSite, RouteSite, RoutedX, SiteKind,
    Skip, apply_lora_bgmv, apply_lora_delta,
};
pub use limits::{MAX_ENTRIES, MAX_RANK, MAX_ROWS, MAX_WIDTH, PAIR_ALIGN};
pub use params::{
    BLOCK_K, CHUNK_K, DeltaParams, DeltaSite, EntryParams, FLAG_F32_LOGITS, FLAG_MULTIPLY,
    FLAG_OPEN_SUMS, FLAG_SPREAD, FLAG_TILES_READY, GatherRowsParams, GroupParams, LARGE_TILE_ROWS,
    LOGIT_PARTS, LogitsParams, MAX_SITES, OverlaySlot, RANKS_A_BLOCK, ReplaceRowsParams,
    RowDiffParams, SMALL_TILE_ROWS, Tile, site_scratch_bytes,
};
pub use plan::{
    BytesMoved, HostKernel, KernelPlan, LaunchPlan, Problem, ProblemSite, bytes_moved, plan,
};
pub use scratch::{Scratch, ScratchSpec};
pub use view::{
    ExpertIds, F32MatMut, MatMut, MatRef, ResidentOfSlot, RowIndices, RowSlots, TokenAdapters,
    TokenIds,
};
pub use weights::{GateUpOut, LoraAttnWeights, LoraFfnWeights, LoraRows, LoraSite, QkvOut};
