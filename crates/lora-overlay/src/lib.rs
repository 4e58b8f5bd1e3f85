//! lora-overlay

#![forbid(unsafe_code)]
