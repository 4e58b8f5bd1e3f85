//! Parse, audit and pack of a synthetic adapter.

use super::median_us;
use super::synthetic::Shape;
use crate::commands::bench::Timing;
use crate::{CliError, Console};
use indicatif::ProgressStyle;
use lora_runtime::config::{ModelSpec, ParseOptions, parse_peft_adapter_config};
use lora_runtime::kernels::LoraBackend;
use lora_runtime::weights::{AdapterStore, LoraAdapterInput, LoraWeights, PoolSpec, SlotTarget};
use lora_runtime::{Adapter, RuntimeError};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// Counted runs of each stage.
const RUNS: usize = 5;

/// A synthetic adapter in a temporary folder, in the page cache since it was just written.
pub struct Synthetic {
    shape: Shape,
    dir: TempDir,
}

impl Synthetic {
    /// Writes it, with a progress bar where a person watches.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write(shape: Shape, console: &Console<'_>) -> Result<Self, CliError> {
        let dir = tempfile::tempdir()?;
        let bar = console.bar(shape.tensor_bytes());
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes} written")
        {
            bar.set_style(style);
        }
        shape.write(dir.path(), &mut |bytes| bar.inc(bytes))?;
        bar.finish_and_clear();
        Ok(Self { shape, dir })
    }

    /// Its sizes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Times of config, header, audit, and audit and pack together; the last also with the upload into a slot.
///
/// # Errors
/// A pool that the backend has no room for.
pub fn adapter_times(
    synthetic: &Synthetic,
    backend: &Arc<dyn LoraBackend>,
) -> Result<Vec<Timing>, CliError> {
    let Synthetic { shape, dir } = synthetic;
    let model = ModelSpec::from_hf_config(&shape.model_config())?;
    let adapter = Adapter::open("synthetic", dir.path(), &ParseOptions::default())?;
    let input = LoraAdapterInput::new("synthetic", adapter.store(), adapter.config());
    let pool = PoolSpec::new(1, shape.rank as u32);
    let memory = Arc::clone(backend) as Arc<_>;
    let weights = LoraWeights::new(memory, model, pool).map_err(RuntimeError::from)?;
    let json = adapter.store().config_json();
    let size = format!("{} MB", shape.tensor_bytes() / 1_000_000);
    let line = |what: &str, microseconds: f64, bytes: u64| Timing {
        what: what.to_owned(),
        size: size.clone(),
        microseconds,
        bytes,
    };
    let parse = median_us(RUNS, || {
        parse_peft_adapter_config(json, &ParseOptions::default()).map(drop)
    })?;
    let open = median_us(RUNS, || AdapterStore::open(dir.path()).map(drop)).map_err(|source| {
        RuntimeError::Store {
            adapter: "synthetic".to_owned(),
            source: Box::new(source),
        }
    })?;
    let audit = median_us::<CliError>(RUNS, || {
        std::hint::black_box(weights.audit(&input));
        Ok(())
    })?;
    let stage = median_us(RUNS, || weights.stage(&input).map(drop)).map_err(RuntimeError::from)?;
    let swap = median_us(RUNS, || {
        let staged = weights.stage(&input)?;
        weights.pack_store_into_slot(SlotTarget::Victim, staged)?;
        weights.unload(0).map(drop)
    })
    .map_err(RuntimeError::from)?;
    let bytes = shape.tensor_bytes();
    Ok(vec![
        line("parse config", parse, 0),
        line("open and check header", open, 0),
        line("audit", audit, bytes),
        line("audit and pack", stage, bytes),
        line("audit, pack, upload, unload", swap, bytes),
    ])
}
