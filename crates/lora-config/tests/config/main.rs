//! What the crate promises, tested from outside. One executable, so that it links once.

mod adapter_fields;
mod adapter_targets;
mod common;
mod model;
mod model_refusals;
mod no_panic;
mod scaling;
