//! Test data, a naive reference, and test bodies that run on any backend.
//!
//! The same bodies hold every backend to the numerics contract:
//!
//! ```
//! use lora_kernels::host::HostBackend;
//! use lora_kernels::testing::{TestBackend, bits, correctness};
//! use std::sync::Arc;
//!
//! let backend: TestBackend = Arc::new(HostBackend::new());
//! correctness::base_rows_keep_their_bits(&backend);
//! bits::a_row_alone_equals_itself_in_a_batch(&backend);
//! ```
//!
//! A body panics on the first miss, with the shape in its message. Everything is seeded, so a failure repeats.

mod adapter;
mod batch;
pub mod bits;
pub mod correctness;
mod data;
mod device;
pub mod experts;
mod gpu;
pub(crate) mod naive;
pub mod overlay;
mod watched;

pub use adapter::{DeviceAdapter, DeviceTables, TestAdapter};
pub use batch::{Batch, BatchShape, SiteShape, Via};
pub use data::{Fill, Rng};
pub use device::DeviceBatch;
pub use gpu::GpuTest;
pub use naive::{ExpectedRow, Verdict, naive_delta};
pub use watched::{HostHooks, WatchedHost};

use crate::LoraBackend;
use std::sync::Arc;

/// What test bodies run on.
pub type TestBackend = Arc<dyn LoraBackend>;
