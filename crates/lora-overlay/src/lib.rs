//! lora-overlay
