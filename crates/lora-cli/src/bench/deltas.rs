//! Deltas at the sites of one layer of a model.

use super::median_us;
use super::synthetic::{RandomBf16, Shape};
use crate::CliError;
use crate::commands::bench::Timing;
use half::bf16;
use lora_runtime::config::{ModelSpec, ParseOptions};
use lora_runtime::kernels::{LoraBackend, Scratch, Stream};
use lora_runtime::weights::{AdapterStore, LoraModule, MemoryTensor};
use lora_runtime::{Adapter, LoraRuntime, ModuleOut, RoutedBatch, RuntimeError, RuntimeOptions};
use std::sync::Arc;

/// Counted runs of each line.
const RUNS: usize = 20;

/// Projections that read the same x and go in one launch.
const SITES: [(&str, &[LoraModule]); 4] = [
    (
        "qkv",
        &[LoraModule::QProj, LoraModule::KProj, LoraModule::VProj],
    ),
    ("o", &[LoraModule::OProj]),
    ("gate_up", &[LoraModule::GateProj, LoraModule::UpProj]),
    ("down", &[LoraModule::DownProj]),
];

/// (rows, adapters) of a batch: a lone row, a few rows, many rows, each with one adapter and with several.
const BATCHES: [(usize, usize); 5] = [(1, 1), (8, 1), (8, 8), (64, 1), (64, 8)];

/// Times of routed deltas at the four sites of a layer of `shape`, by rank, rows and adapters. One layer's weights are
/// used over and over: they are warm where they fit a cache.
///
/// # Errors
/// A pool that the backend has no room for.
pub fn delta_times(shape: Shape, backend: &Arc<dyn LoraBackend>) -> Result<Vec<Timing>, CliError> {
    let mut timings = Vec::new();
    for rank in [16, 64] {
        for (rows, adapters) in BATCHES {
            let mut bench = DeltaBench::new(
                Shape {
                    layers: 1,
                    rank,
                    ..shape
                },
                backend,
                (rows, adapters),
            )?;
            for (name, modules) in SITES {
                timings.push(bench.time(name, modules)?);
            }
        }
    }
    Ok(timings)
}

/// One layer, its adapters loaded and a batch routed.
struct DeltaBench {
    runtime: LoraRuntime,
    batch: RoutedBatch,
    scratch: Scratch,
    rank: usize,
    rows: usize,
    adapters: usize,
}

impl DeltaBench {
    fn new(
        shape: Shape,
        backend: &Arc<dyn LoraBackend>,
        batch: (usize, usize),
    ) -> Result<Self, CliError> {
        let (rows, adapters) = batch;
        let model = ModelSpec::from_hf_config(&shape.model_config())?;
        let options = RuntimeOptions::new(adapters as u32, shape.rank as u32);
        let runtime = LoraRuntime::new(Arc::clone(backend), model, options)?;
        let loaded = (0..adapters)
            .map(|seed| in_memory(&shape, seed))
            .collect::<Result<Vec<_>, _>>()?;
        runtime.load(&loaded)?;
        let mut batch = runtime.batch(rows as u32)?;
        let requests: Vec<i32> = (0..rows).map(|row| (row % adapters) as i32).collect();
        runtime.route(&mut batch, Stream::OWN, &requests, rows)?;
        let scratch = runtime.scratch(rows as u32)?;
        Ok(Self {
            runtime,
            batch,
            scratch,
            rank: shape.rank,
            rows,
            adapters,
        })
    }

    /// One launch for all of `modules`, which read the same x.
    fn time(&mut self, name: &str, modules: &[LoraModule]) -> Result<Timing, CliError> {
        let Self {
            runtime,
            batch,
            scratch,
            rows,
            ..
        } = self;
        let rows = *rows;
        let model = runtime.model();
        let dims = modules
            .iter()
            .filter_map(|module| Some((*module, module.dims(model, 0)?)));
        let dims: Vec<(LoraModule, (usize, usize))> = dims.collect();
        let k_in = dims.first().map_or(0, |(_, (_, k_in))| *k_in);
        let buffer = |len: usize, seed: u64| runtime.buffer(&random(len, seed));
        let x = buffer(rows * k_in, 1)?;
        let outs = dims
            .iter()
            .map(|(module, (n_out, _))| Ok((*module, *n_out, buffer(rows * n_out, 2)?)));
        let mut outs = outs.collect::<Result<Vec<_>, RuntimeError>>()?;
        let microseconds = median_us(RUNS, || -> Result<(), RuntimeError> {
            let sites = outs.iter_mut().map(|(module, n_out, out)| {
                Ok(ModuleOut {
                    module: *module,
                    out: out.mat_mut(rows, *n_out, *n_out)?,
                })
            });
            let sites = sites.collect::<Result<Vec<_>, RuntimeError>>()?;
            let mut ctx = runtime.context(Stream::OWN, scratch);
            let _ = runtime.apply(&mut ctx, batch, 0, x.mat(rows, k_in, k_in)?, sites)?;
            Ok(runtime.kernels().backend().synchronize(Stream::OWN)?)
        })?;
        let n_out: usize = dims.iter().map(|(_, (n_out, _))| n_out).sum();
        let weights = self.adapters * self.rank * (dims.len() * k_in + n_out);
        Ok(Timing {
            what: format!("delta {name} {k_in} -> {n_out}"),
            size: format!(
                "rank {}, {rows} rows, {} adapters",
                self.rank, self.adapters
            ),
            microseconds,
            // Each adapter once, x once, out read and written.
            bytes: 2 * (weights + rows * (k_in + 2 * n_out)) as u64,
        })
    }
}

/// A whole adapter of `shape` in memory.
fn in_memory(shape: &Shape, seed: usize) -> Result<Adapter, CliError> {
    let tensors = shape
        .tensors()
        .into_iter()
        .zip(1u64..)
        .map(|((name, [rows, cols]), at)| {
            MemoryTensor::from_bf16(
                name,
                [rows, cols],
                &random(rows * cols, at + 1000 * seed as u64),
            )
        });
    let store = AdapterStore::from_tensors(shape.adapter_config(), tensors);
    let store = store.map_err(|error| CliError::Synthetic(error.to_string()))?;
    Ok(Adapter::from_store(
        format!("adapter {seed}"),
        store,
        &ParseOptions::default(),
    )?)
}

fn random(len: usize, seed: u64) -> Vec<bf16> {
    let mut values = RandomBf16::new(seed);
    (0..len).map(|_| bf16::from_bits(values.next())).collect()
}
