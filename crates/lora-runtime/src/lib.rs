//! lora-runtime

#![forbid(unsafe_code)]
