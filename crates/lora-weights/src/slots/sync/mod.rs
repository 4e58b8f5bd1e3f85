//! The lock over slot states: a real one, or, for this crate's own interleaving tests, one that lets the shuttle scheduler decide
//! who takes it next.

#[cfg(not(feature = "shuttle"))]
mod native;
#[cfg(feature = "shuttle")]
mod scheduled;

#[cfg(not(feature = "shuttle"))]
pub(super) use native::Mutex;
#[cfg(feature = "shuttle")]
pub(super) use scheduled::Mutex;
