//! What the crate promises, tested from outside. One executable, so that it links once.

mod adapter_fields;
mod common;
mod model;
mod no_panic;
mod scaling;
