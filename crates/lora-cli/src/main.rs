//! The `lora` command.

fn main() {}
