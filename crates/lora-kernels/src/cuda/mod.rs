//! The CUDA backend: driver API only, loaded when the program runs, so that nothing is needed at build time.
//!
//! Three layers: `driver` (calls that return results), owners (`module`, `memory`, `staging`, `upload`, [`Graph`]) and [`CudaBackend`] on top.

mod backend;
mod driver;
mod error;
mod graph;
mod memory;
mod module;
mod plan;
mod staging;
mod upload;

pub use backend::CudaBackend;
pub use error::CudaError;
pub use graph::{DeviceTimer, Graph};
pub use module::{Kernel, PtxTarget};
pub use plan::{
    DeltaPlan, GroupPlan, GroupSource, HeadClusters, ShrinkShares, SpreadPlan, plan, plan_delta,
    plan_delta_spread, plan_gather_rows, plan_group_rows, plan_head_logits, plan_replace_rows,
    plan_row_diff,
};
