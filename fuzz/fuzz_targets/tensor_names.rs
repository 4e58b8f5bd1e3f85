//! Tensor names of adapter files.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lora_fuzz::body("tensor_names")(data));
