//! lora-moe

#![forbid(unsafe_code)]
