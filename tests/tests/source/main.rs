//! Adapters over HTTP, end to end: an honest peer, and one that fails in every way.

mod cli;
mod faults;
mod runtime;

use lora_runtime::config::{BackendKind, ModelSpec};
use lora_runtime::weights::source::{AdapterSource, RemoteAdapter, SourceOptions};
use lora_runtime::{LoraRuntime, RuntimeOptions};
use lora_tests::{case_dir, data_dir};
use std::path::PathBuf;
use std::time::Duration;

/// The folder of all cases: an adapter's id is `<case>/adapter`.
fn cases() -> PathBuf {
    data_dir().join("cases")
}

fn id(case: &str) -> String {
    format!("{case}/adapter")
}

/// Reads of 256 bytes, three at a time, so that small files take many.
fn small_pieces() -> SourceOptions {
    SourceOptions {
        piece_bytes: 256,
        parallel: 3,
        timeout: Duration::from_secs(20),
        ..SourceOptions::default()
    }
}

fn remote(location: &str, case: &str, options: SourceOptions) -> RemoteAdapter {
    let source = AdapterSource::open(location, options).expect("a location");
    source
        .adapter(&id(case))
        .expect("config and header are there")
}

/// A runtime of four slots for the model of a case, whose slots may be overwritten.
fn runtime(case: &str) -> LoraRuntime {
    let text = std::fs::read_to_string(case_dir(case).join("config.json")).expect("is there");
    let model = ModelSpec::from_hf_config(&text).expect("a known family");
    let mut options = RuntimeOptions::new(4, 16);
    options.pool.policy.allow_rotation = true;
    LoraRuntime::open(BackendKind::Host, model, options).expect("the host backend opens")
}
