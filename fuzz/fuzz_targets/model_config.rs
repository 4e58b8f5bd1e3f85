//! A model's `config.json`, and the pool laid out for it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lora_fuzz::body("model_config")(data));
