//! An adapter's trained tokens over an engine's own embedding: `cargo run -p lora-overlay --example trained_tokens`.
use half::bf16;
use lora_config::{ModelSpec, ParseOptions, parse_peft_adapter_config};
use lora_kernels::overlay::{OverlayTokens, SlotOfRow};
use lora_kernels::{host::HostBackend, *};
use lora_overlay::*;
use lora_weights::{AdapterStore, PoolSpec, audit_adapter};
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cases = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/cases");
    let case = format!("{cases}/llama_tokens_unsorted");
    let model =
        ModelSpec::from_hf_config(&std::fs::read_to_string(format!("{case}/config.json"))?)?;
    let store = AdapterStore::open(format!("{case}/adapter").as_ref())?;
    let config = parse_peft_adapter_config(store.config_json(), &ParseOptions::default())?;
    // The audit finds the rows; a policy says that this engine applies them.
    let mut pool = PoolSpec::new(1, 16);
    pool.policy.overlays = true;
    let report = audit_adapter(&store, &config, &model, &pool);
    assert!(report.ok(), "{:?}", report.findings);

    // What the engine serves: two tables of zeros here.
    let (rows, hidden) = (model.vocab_size, model.hidden_size);
    let backend: Arc<dyn LoraBackend> = Arc::new(HostBackend::new());
    let memory = backend.clone() as Arc<_>;
    let zeros = vec![bf16::ZERO; rows * hidden];
    let table = DeviceBuffer::from_slice(backend.clone(), &zeros)?;
    let view = || table.mat(rows, hidden, hidden).map(ServedTable::view);
    let served = ServedTables::untied(view()?, view()?);
    let raw = stage_overlay_raw(&memory, &store, &config, &report.overlays, hidden)?;
    let builder = OverlayBuilder {
        backend: &backend,
        stream: Stream::OWN,
        threshold: ROWDIFF_THRESH,
    };
    let overlay = build_overlay(builder, raw.ok_or("no rows in the file")?, &served)?;
    let set = TokenOverlaySet::from_slots(memory, served.shape(hidden)?, [overlay.map(Arc::new)])?;

    // A step of tokens 9, 2 and 1, gathered by the engine: 9 and 1 are trained.
    let ids = DeviceBuffer::from_slice(backend.clone(), &[9, 2, 1])?;
    let slots = DeviceBuffer::from_slice(backend.clone(), &[0, 0, 0])?;
    let mut out = DeviceBuffer::from_slice(backend.clone(), &zeros[..3 * hidden])?;
    let tokens = OverlayTokens {
        ids: ids.token_ids(3)?,
        slots: SlotOfRow::Each(slots.row_slots(3)?),
    };
    let kernels = LoraKernels::new(backend.clone(), LaunchOptions::default());
    set.apply_embeddings(
        (&kernels, Stream::OWN),
        tokens,
        out.mat_mut(3, hidden, hidden)?,
    )?;
    backend.synchronize(Stream::OWN)?;
    let rows: Vec<bf16> = out.download(0, 3 * hidden)?;
    let replaced: Vec<bool> = rows.chunks(hidden).map(|r| r != &zeros[..hidden]).collect();
    assert_eq!(replaced, [true, false, true]);
    Ok(())
}
