//! A weights file as a peer's: manifest and landing plan, beside opening and packing.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lora_fuzz::body("landing_plan")(data));
