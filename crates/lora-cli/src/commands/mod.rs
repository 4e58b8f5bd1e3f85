//! One file a command: its options and what it does.

pub mod audit;
pub mod bench;
pub mod plan;
pub mod verify;
