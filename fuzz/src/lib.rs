//! The bodies of the fuzz targets: the same files that the replay of their corpus on a stable toolchain is built from.

#![forbid(unsafe_code)]

#[path = "../../tests/src/hostile/mod.rs"]
mod hostile;

pub use hostile::{Body, Seed, TARGETS, body, pack_corpus, seeds_of, unpack_corpus};
