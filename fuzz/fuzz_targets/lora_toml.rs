//! `lora.toml`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lora_fuzz::body("lora_toml")(data));
