//! Device memory, models and adapters for tests and benches.

// Every test and bench uses its own part of this.
#![allow(dead_code, unused_imports, unreachable_pub)]

mod adapters;
mod memory;
mod observe;
mod world;

pub use adapters::{Adapter, Geometry, moe_model, tiny_model};
pub use memory::TestMemory;
pub use observe::{Recorder, SlotBytes, assert_placeholder, assert_serves};
pub use world::{GIB, World, pool};
