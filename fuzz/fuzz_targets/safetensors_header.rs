//! The header of a safetensors file, beside the reference reader.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lora_fuzz::body("safetensors_header")(data));
