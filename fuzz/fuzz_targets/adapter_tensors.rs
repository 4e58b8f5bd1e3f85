//! Adapters from a grammar, in memory: audited, packed.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lora_fuzz::body("adapter_tensors")(data));
