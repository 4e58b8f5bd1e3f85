//! Launch plans, launchers and backends.

mod backend;
pub mod cuda;
mod error;
mod params;
mod view;

pub use backend::{DeviceCaps, LoraBackend, Stream};
pub use error::KernelError;
pub use params::{
    BLOCK_K, CHUNK_K, DeltaParams, DeltaSite, FLAG_TILES_READY, GroupParams, LARGE_TILE_ROWS,
    MAX_SITES, RANKS_A_BLOCK, SMALL_TILE_ROWS, Tile, counter_bytes, site_scratch_bytes,
};
pub use view::{MatMut, MatRef};
