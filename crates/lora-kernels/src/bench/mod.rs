//! Times of the deltas of one layer, dense or MoE, and of token overlays, with weights cold in the L2 cache, checked before they are timed.
//!
//! A [`DeltaBench`] holds a [`DeltaShape`] on a [`BenchDevice`]: enough copies of its adapters that four times the L2 is read
//! between two uses of one. On a GPU the launches of all copies are captured in one graph, whose replays device events time; on the host calls are
//! timed one after the other. [`DeltaTable`] prints what came out next to what memory allows. A [`MoeBench`] does the same for a [`MoeShape`], whose rows are
//! routed and grouped in every layer, which is timed with it, an [`OverlayBench`] for building and applying overlays. The benches of the CUDA backend and
//! `lora bench` use them.
//!
//! ```
//! use lora_kernels::bench::{BenchDevice, DeltaBench, DeltaTable, TINY_LAYER, TINY_SHAPES};
//! use lora_kernels::host::HostBackend;
//!
//! let device = BenchDevice::host(HostBackend::new());
//! let mut table = DeltaTable::new(&device);
//! for shape in TINY_SHAPES {
//!     let mut bench = DeltaBench::new(&device, shape, &TINY_LAYER)?;
//!     assert!(bench.check()?.passes());
//!     table.lines.push(bench.measure(3)?);
//! }
//! println!("{table}");
//! # Ok::<(), lora_kernels::KernelError>(())
//! ```

mod data;
mod delta;
mod device;
mod moe;
mod overlay;
mod shapes;
mod table;

pub use delta::DeltaBench;
pub use device::{BenchDevice, Work};
pub use moe::{
    H200_MOE_SHAPES, HOST_MOE_SHAPES, MoeBench, MoeLayer, MoeShape, MoeTable, MoeTimes,
    QWEN3_30B_LAYER, TINY_MOE_LAYER, TINY_MOE_SHAPES,
};
pub use overlay::{
    H200_OVERLAYS, HOST_OVERLAYS, IdPlaces, OverlayBench, OverlayReport, OverlayShape,
    OverlayTimes, OverlayWork, TINY_OVERLAYS,
};
pub use shapes::{
    DeltaShape, H200_SHAPES, HOST_SHAPES, LLAMA_8B_LAYER, LayerSite, TINY_LAYER, TINY_SHAPES,
    TimeGoal,
};
pub use table::{DeltaTable, DeltaTimes, copy_bandwidth};

use table::grid;
