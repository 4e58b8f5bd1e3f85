//! Launch plans, launchers and backends.

mod backend;
mod error;
mod params;
mod view;

pub use backend::{DeviceCaps, LoraBackend, Stream};
pub use error::KernelError;
pub use params::{DeltaParams, DeltaSite, GroupParams, MAX_SITES, Tile};
pub use view::{MatMut, MatRef};
