//! The `lora` command.

#![forbid(unsafe_code)]

fn main() {}
