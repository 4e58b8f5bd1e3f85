//! One batch through two adapters and the base model: all that an engine does, from the files to the deltas.
//!
//! `cargo run -p lora-runtime --example serve_mixed_batch`. The same file is the whole `main.rs` of a crate that depends on `lora-runtime` by path, its own paths put in.

use lora_runtime::config::{BackendKind, ModelSpec};
use lora_runtime::kernels::Stream;
use lora_runtime::weights::{BASE_SLOT, LoraModule};
use lora_runtime::{LoraRuntime, ModuleOut, RuntimeOptions, bf16};
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cases = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/data/cases"
    ));

    // Once: a pool of 8 slots of rank 16 for the model.
    let config = std::fs::read_to_string(cases.join("base_llama/config.json"))?;
    let model = ModelSpec::from_hf_config(&config)?;
    let lora = LoraRuntime::open(BackendKind::Host, model.clone(), RuntimeOptions::new(8, 16))?;
    let (mut batch, mut scratch) = (lora.batch(64)?, lora.scratch(64)?);

    // A request: its adapter, audited whole or refused, held until the lease is dropped.
    let plain = lora.acquire(&lora.adapter("plain", &cases.join("llama_plain/adapter"))?)?;
    let rslora = lora.acquire(&lora.adapter("rslora", &cases.join("llama_rslora/adapter"))?)?;

    // A step: four rows, each with the adapter of its request.
    let rows = [plain.slot(), rslora.slot(), BASE_SLOT, plain.slot()];
    lora.route(&mut batch, Stream::OWN, &rows, rows.len())?;

    // A projection: the base model's output, to which each row's own delta is added.
    let (hidden, width) = (model.hidden_size, model.q_width());
    let x = lora.buffer(&vec![bf16::ONE; rows.len() * hidden])?;
    let mut q = lora.buffer(&vec![bf16::ZERO; rows.len() * width])?;
    let module = LoraModule::QProj;
    let out = q.mat_mut(rows.len(), width, width)?;
    let x = x.mat(rows.len(), hidden, hidden)?;
    let mut ctx = lora.context(Stream::OWN, &mut scratch);
    lora.apply(&mut ctx, &batch, 0, x, [ModuleOut { module, out }])?;

    lora.synchronize(Stream::OWN)?; // only to read the result back here
    for (row, slot) in rows.iter().enumerate() {
        let first = q.download::<bf16>(row * width, 4)?;
        println!("row {row} of slot {slot}: {first:?}");
    }
    Ok(())
}
