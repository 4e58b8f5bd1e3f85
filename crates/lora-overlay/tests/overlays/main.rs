//! Overlays from an adapter's tensors to the rows of a batch.

mod bodies;
mod cuda;
mod expected;
mod faulty;
mod host;
mod life;
mod refusals;
mod tied;
mod world;
