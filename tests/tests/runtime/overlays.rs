//! Adapters with vocabulary rows through the facade: refused until the engine's tables are known, then bound to their slots.

use crate::{adapter, bits, model, rotating, routed_q};
use half::bf16;
use lora_runtime::config::RuntimeConfig;
use lora_runtime::kernels::host::{HostBackend, HostOptions};
use lora_runtime::kernels::overlay::LogitsMut;
use lora_runtime::kernels::{Applied, DeviceBuffer, Stream};
use lora_runtime::overlay::{ServedTable, ServedTables};
use lora_runtime::weights::{BASE_SLOT, Unloaded, WeightsError};
use lora_runtime::{LoraRuntime, RuntimeError, RuntimeOptions};
use lora_tests::{case_dir, read_f32};
use std::path::Path;
use std::sync::Arc;

const TOKENS: &str = "llama_tokens_unsorted";
const SAVED: &str = "llama_modules_to_save";
/// Rows and columns of the base model's tables.
const VOCAB: usize = 48;
const HIDDEN: usize = 32;

/// A tensor of a safetensors file, rounded to BF16.
fn tensor(path: &Path, name: &str) -> Vec<bf16> {
    read_f32(path, name)
        .into_iter()
        .map(bf16::from_f32)
        .collect()
}

fn base(name: &str) -> Vec<bf16> {
    tensor(&case_dir("base_llama").join("model.safetensors"), name)
}

fn of_adapter(case: &str, name: &str) -> Vec<bf16> {
    let file = case_dir(case).join("adapter/adapter_model.safetensors");
    tensor(&file, &format!("base_model.model.{name}"))
}

/// An engine's runtime on a host of 64 MiB, its tables not registered yet.
fn runtime(options: RuntimeOptions) -> LoraRuntime {
    let host = HostBackend::with_options(HostOptions {
        memory_limit: Some(64 << 20),
        ..HostOptions::default()
    });
    let backend = Arc::new(host.expect("a host"));
    LoraRuntime::new(backend, model("base_llama"), options).expect("a runtime")
}

/// The base model's own tables.
fn tables(runtime: &LoraRuntime) -> ServedTables<'static> {
    let shared = |name| {
        let buffer = Arc::new(runtime.buffer(&base(name)).expect("memory"));
        ServedTable::shared(buffer, VOCAB, HIDDEN).expect("fits")
    };
    ServedTables::untied(
        shared("model.embed_tokens.weight"),
        shared("lm_head.weight"),
    )
}

fn serving() -> LoraRuntime {
    let runtime = runtime(rotating());
    runtime.serve_tables(tables(&runtime)).expect("registers");
    runtime
}

fn free(runtime: &LoraRuntime) -> u64 {
    let info = runtime.kernels().backend().memory_info();
    info.expect("counts").free
}

/// Embedding rows of these tokens, gathered from the base and overlaid: the bits of every row.
fn embedded(runtime: &LoraRuntime, requests: &[i32], tokens: &[i32]) -> Vec<Vec<u16>> {
    let table = base("model.embed_tokens.weight");
    let gathered = tokens
        .iter()
        .flat_map(|id| &table[*id as usize * HIDDEN..][..HIDDEN]);
    let gathered: Vec<bf16> = gathered.copied().collect();
    let count = tokens.len();
    let mut out = runtime.buffer(&gathered).expect("memory");
    let ids = device(runtime, tokens);
    let mut batch = runtime.batch(64).expect("fits");
    runtime
        .route(&mut batch, Stream::OWN, requests, count)
        .expect("slots exist");
    let applied = runtime
        .apply_embedding_overlay(
            Stream::OWN,
            &batch,
            ids.token_ids(count).expect("fits"),
            out.mat_mut(count, HIDDEN, HIDDEN).expect("fits"),
        )
        .expect("applies");
    assert_eq!(applied, Applied::Launched { launches: 1 });
    let all = bits(&out, count * HIDDEN);
    all.chunks(HIDDEN).map(<[u16]>::to_vec).collect()
}

fn device<T: bytemuck::Pod>(runtime: &LoraRuntime, values: &[T]) -> DeviceBuffer {
    runtime.buffer(values).expect("memory")
}

/// Row `row` of a table of `HIDDEN` columns.
fn row_bits(table: &[bf16], row: usize) -> Vec<u16> {
    let row = &table[row * HIDDEN..][..HIDDEN];
    row.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn without_served_tables_overlays_are_refused_by_name_with_the_way_out() {
    let runtime = runtime(rotating());
    for case in [TOKENS, SAVED] {
        let refused = adapter(&runtime, case);
        let report = runtime.audit(&refused);
        assert!(report.errors().all(|f| f.reason == "overlay-unapplied"));
        for error in [
            runtime.load([&refused]).expect_err("refused"),
            runtime.promote(&refused).expect_err("refused"),
            runtime.swap(1, &refused).expect_err("refused"),
        ] {
            let error = error.to_string();
            assert!(
                error.contains("REJECT[overlay-unapplied]")
                    && error.contains("LoraRuntime::serve_tables"),
                "{error}"
            );
        }
    }
    let reasons = runtime.metrics().refusal_reasons;
    assert_eq!(reasons["overlay-unapplied"], 3 * (1 + 2));
    runtime.serve_tables(tables(&runtime)).expect("registers");
    assert!(runtime.audit(&adapter(&runtime, TOKENS)).ok());
    runtime.load([&adapter(&runtime, TOKENS)]).expect("loads");
}

#[test]
fn tables_that_are_not_the_models_are_not_registered() {
    let runtime = runtime(rotating());
    let opaque = |rows| ServedTable::opaque(rows);
    let tied = runtime.serve_tables(ServedTables::tied(opaque(VOCAB)));
    assert!(
        matches!(tied, Err(RuntimeError::ServedTable { .. })),
        "{tied:?}"
    );
    let short = runtime.serve_tables(ServedTables::untied(opaque(VOCAB), opaque(VOCAB - 1)));
    let short = short.expect_err("one row short").to_string();
    assert!(
        short.contains("47 rows") && short.contains("48 tokens"),
        "{short}"
    );
    runtime.serve_tables(tables(&runtime)).expect("registers");
    let again = runtime.serve_tables(tables(&runtime));
    assert!(matches!(again, Err(RuntimeError::TablesRegistered)));
}

/// The k-th id takes the k-th row, whatever the order; every other row, and rows of other slots, are the base model's.
#[test]
fn each_row_of_a_batch_has_its_own_adapters_rows() {
    let runtime = serving();
    let adapters = ["llama_plain", TOKENS, SAVED].map(|case| adapter(&runtime, case));
    runtime.load(&adapters).expect("loads");
    let trained = of_adapter(
        TOKENS,
        "model.embed_tokens.token_adapter.trainable_tokens_delta",
    );
    let saved = of_adapter(SAVED, "model.embed_tokens.weight");
    let table = base("model.embed_tokens.weight");
    let mut requests = Vec::new();
    let mut tokens = Vec::new();
    for token in [9, 1, 3, 20, 47] {
        for request in [0, 1, 2, BASE_SLOT] {
            requests.push(request);
            tokens.push(token);
        }
    }
    let rows = embedded(&runtime, &requests, &tokens);
    for ((request, token), row) in requests.iter().zip(&tokens).zip(rows) {
        let place = [9, 1, 3].iter().position(|id| id == token);
        let wanted = match (request, place) {
            (1, Some(place)) => row_bits(&trained, place),
            (2, _) => row_bits(&saved, *token as usize),
            _ => row_bits(&table, *token as usize),
        };
        assert_eq!(row, wanted, "token {token} of slot {request}");
    }
}

#[test]
fn logits_of_overridden_ids_follow_each_rows_adapter() {
    let runtime = serving();
    let adapters = ["llama_plain", TOKENS, SAVED].map(|case| adapter(&runtime, case));
    runtime.load(&adapters).expect("loads");
    let saved = of_adapter(SAVED, "lm_head.weight");
    let requests = [2, 1, BASE_SLOT, 0];
    let x: Vec<bf16> = (0..4 * HIDDEN)
        .map(|at| bf16::from_f32(((at * 7 % 31) as f32 - 15.0) / 16.0))
        .collect();
    let hidden = runtime.buffer(&x).expect("memory");
    let mut logits = device(&runtime, &[-7.0f32; 4 * VOCAB]);
    let mut batch = runtime.batch(4).expect("fits");
    runtime
        .route(&mut batch, Stream::OWN, &requests, 4)
        .expect("slots exist");
    let _ = runtime
        .apply_logits_overlay(
            Stream::OWN,
            &batch,
            hidden.mat(4, HIDDEN, HIDDEN).expect("fits"),
            LogitsMut::F32(logits.f32_mat_mut(4, VOCAB, VOCAB).expect("fits")),
        )
        .expect("applies");
    let logits: Vec<f32> = logits.download(0, 4 * VOCAB).expect("reads back");
    assert!(
        logits[VOCAB..].iter().all(|logit| *logit == -7.0),
        "untouched"
    );
    for (id, logit) in logits[..VOCAB].iter().enumerate() {
        let terms = x.iter().zip(&saved[id * HIDDEN..][..HIDDEN]);
        let sum: f64 = terms
            .map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32()))
            .sum();
        assert!(
            (f64::from(*logit) - sum).abs() < 1e-4,
            "id {id}: {logit} for {sum}"
        );
    }
}

#[test]
fn overlays_come_and_go_with_their_slots_and_reports_say_so() {
    let runtime = serving();
    let plain = adapter(&runtime, "llama_plain");
    let (tokens, saved) = (adapter(&runtime, TOKENS), adapter(&runtime, SAVED));
    runtime.load([&plain]).expect("loads");
    let empty = free(&runtime);
    let records = runtime.report().overlays;
    let slot = runtime.promote(&tokens).expect("promotes").slot();
    let report = runtime.report();
    let overlay = report.adapters[1].overlay.expect("it has one");
    assert_eq!((overlay.embed_rows, overlay.head_rows), (3, 0));
    assert_eq!(report.overlays, records + overlay.bytes);
    assert!(report.adapters[0].overlay.is_none());
    assert_eq!(empty - free(&runtime), overlay.bytes);

    runtime.swap(slot, &saved).expect("swaps");
    let report = runtime.report();
    let overlay = report.adapters[1].overlay.expect("it has one");
    assert_eq!((overlay.embed_rows, overlay.head_rows), (48, 48));
    assert_eq!(empty - free(&runtime), overlay.bytes);

    let lease = runtime.lease(slot as i32).expect("held");
    let busy = runtime.swap(slot, &tokens);
    assert!(matches!(
        busy,
        Err(RuntimeError::Weights(WeightsError::SlotBusy { .. }))
    ));
    assert_eq!(
        empty - free(&runtime),
        overlay.bytes,
        "the refused swap's is gone"
    );
    drop(lease);
    let unloaded = runtime.unload(slot).expect("unloads");
    assert!(matches!(unloaded, Unloaded::Freed(freed) if freed.extension_bytes == overlay.bytes));
    assert_eq!(
        (free(&runtime), runtime.report().overlays),
        (empty, records)
    );
}

/// Startup adapters of a config, once the tables that theirs replace are known.
#[test]
fn configured_adapters_with_overlays_load_after_the_tables_are_registered() {
    let text = format!(
        "max_loras = 2\nmax_rank = 8\n[[adapters]]\nname = \"tokens\"\npath = {:?}\n",
        case_dir(TOKENS).join("adapter").display().to_string(),
    );
    let config = RuntimeConfig::from_toml(&text).expect("valid");
    let refused = LoraRuntime::from_config(&config, model("base_llama")).expect_err("no tables");
    assert!(
        refused.to_string().contains("overlay-unapplied"),
        "{refused}"
    );
    let options = RuntimeOptions::from_config(&config, &model("base_llama")).expect("valid");
    let runtime = runtime(options);
    runtime.serve_tables(tables(&runtime)).expect("registers");
    let loaded = runtime.load_configured(&config).expect("loads");
    assert_eq!((loaded.len(), loaded[0].name()), (1, "tokens"));
    assert!(runtime.report().adapters[0].overlay.is_some());
}

/// Deltas and overlay of one adapter are both applied.
#[test]
fn an_adapter_with_overlay_keeps_its_deltas() {
    let runtime = serving();
    runtime.load([&adapter(&runtime, TOKENS)]).expect("loads");
    let rows = routed_q(&runtime, &[0, BASE_SLOT]);
    let plain = LoraRuntime::open(
        lora_runtime::config::BackendKind::Host,
        model("base_llama"),
        rotating(),
    );
    let base_rows = routed_q(&plain.expect("a runtime"), &[BASE_SLOT, BASE_SLOT]);
    assert_eq!(rows[1], base_rows[1]);
    assert_ne!(rows[0], base_rows[0]);
}

/// A row map that is the engine's own is not the runtime's to read.
#[test]
fn a_batch_routed_from_the_device_names_the_way_to_its_embedding_overlay() {
    let runtime = serving();
    let mut batch = runtime.batch(4).expect("fits");
    let (map, ids) = (device(&runtime, &[-1i32; 2]), device(&runtime, &[3i32; 2]));
    runtime
        .route_from_device(&mut batch, Stream::OWN, map.row_slots(2).expect("fits"))
        .expect("routes");
    let mut out = device(&runtime, &[0u16; 2 * HIDDEN]);
    let refused = runtime.apply_embedding_overlay(
        Stream::OWN,
        &batch,
        ids.token_ids(2).expect("fits"),
        out.mat_mut(2, HIDDEN, HIDDEN).expect("fits"),
    );
    assert!(matches!(refused, Err(RuntimeError::RowMapElsewhere)));
}
