//! An adapter folder: config and weights file, opened, audited, packed.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lora_fuzz::body("adapter_folder")(data));
