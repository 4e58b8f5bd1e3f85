//! lora-runtime
