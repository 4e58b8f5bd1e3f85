//! `adapter_config.json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lora_fuzz::body("adapter_config")(data));
