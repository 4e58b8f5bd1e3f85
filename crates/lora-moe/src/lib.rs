//! lora-moe
