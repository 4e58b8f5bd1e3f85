//! Slot life against a plain model of its rules: exactly, step by step, on one thread; by invariants on several.

#[path = "../common/mod.rs"]
mod common;
mod plain;
mod sequential;
mod stress;
