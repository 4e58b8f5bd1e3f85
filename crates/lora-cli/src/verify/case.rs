//! A case: an adapter, its base model, and recorded outputs.

use super::compare::Factors;
use super::golden::Golden;
use super::matrix::Matrix;
use super::tables::BaseTables;
use crate::options::{LoadOptions, read_model};
use crate::{CliError, Console};
use half::bf16;
use lora_runtime::config::{ModelSpec, ParseOptions};
use lora_runtime::weights::{AuditReport, AuditedPair, LoraTarget, audit_dir};
use lora_runtime::{Adapter, whole_adapter_units};
use std::path::Path;

/// A case as read from its folder.
pub struct Case {
    /// The folder, as given.
    pub name: String,
    /// The base model, where its config gives a geometry.
    pub model: Option<ModelSpec>,
    /// What the audit says of the adapter.
    pub report: AuditReport,
    /// Rank that the adapter needs.
    pub max_rank: u32,
    /// The adapter, where the audit lets it load.
    pub adapter: Option<Adapter>,
    /// What PEFT gave.
    pub golden: Golden,
    /// Why an adapter that may load is not compared: a recorded file that does not hold together, a file that is gone.
    pub error: Option<CliError>,
    /// The base model's vocabulary tables, where the adapter overrides rows of them.
    pub tables: Option<BaseTables>,
}

impl Case {
    /// Reads and audits the case in `dir`. What is wrong with the model or the adapter is in [`report`](Self::report), what is
    /// wrong with the recorded outputs in [`error`](Self::error): a case that is broken does not keep others from being compared.
    pub fn read(
        dir: &Path,
        options: &LoadOptions,
        max_rank: Option<u32>,
        console: &Console<'_>,
    ) -> Self {
        let name = dir.display().to_string();
        let model = match read_model(&dir.join("config.json")) {
            Ok(model) => model,
            Err(error) => {
                let report = AuditReport::unknown_model(name.as_str(), &error);
                return Self {
                    name,
                    model: None,
                    report,
                    max_rank: 1,
                    adapter: None,
                    golden: Golden::default(),
                    error: None,
                    tables: None,
                };
            }
        };
        let folder = dir.join("adapter");
        let parse = options.parse_options();
        let max_rank = options.max_rank_for(&folder, max_rank);
        let pool = options.pool_spec(1, max_rank, whole_adapter_units(&model), &console.levers);
        let report = audit_dir(&folder, &parse, &model, &pool);
        let mut case = Self {
            name,
            report,
            max_rank,
            adapter: None,
            golden: Golden::default(),
            error: None,
            tables: None,
            model: Some(model),
        };
        case.error = case.open(dir, &parse).err();
        case
    }

    /// Opens an adapter that may load, and what was recorded of it: both or neither.
    fn open(&mut self, dir: &Path, parse: &ParseOptions) -> Result<(), CliError> {
        let Some(model) = self.model.as_ref().filter(|_| self.report.ok()) else {
            return Ok(());
        };
        let golden = Golden::read(&dir.join("golden.safetensors"), model)?;
        if !self.report.overlays.is_empty() {
            self.tables = Some(BaseTables::find(dir, &golden.tables, model)?);
        }
        self.adapter = Some(Adapter::open(
            self.name.clone(),
            &dir.join("adapter"),
            parse,
        )?);
        self.golden = golden;
        Ok(())
    }

    /// Whether the adapter loads and its recorded outputs can be read.
    pub fn is_whole(&self) -> bool {
        self.report.ok() && self.error.is_none()
    }

    /// Whether one pool and one pair of served tables serve both cases.
    pub fn shares_base(&self, other: &Self) -> bool {
        let same_tables = match (&self.tables, &other.tables) {
            (Some(own), Some(other)) => own == other,
            _ => true,
        };
        self.model.is_some() && self.model == other.model && same_tables
    }

    /// The audited pair of a target; `None` where the adapter leaves it alone.
    pub fn pair(&self, layer: usize, target: LoraTarget) -> Option<&AuditedPair> {
        self.report
            .pairs
            .iter()
            .find(|pair| pair.layer == layer && pair.target == target)
    }

    /// A and B of a target as packing reads them, in f32; `None` where the adapter leaves it alone.
    pub fn factors(&self, layer: usize, target: LoraTarget) -> Option<Factors> {
        let pair = self.pair(layer, target)?;
        let store = self.adapter.as_ref()?.store();
        let rank = pair.rank as usize;
        let mut a = vec![bf16::ZERO; rank * pair.k_in];
        let mut b = vec![bf16::ZERO; pair.n_out * rank];
        pair.source.read_a(store, &mut a);
        pair.source.read_b(store, &mut b, rank);
        let wide = |values: Vec<bf16>| values.into_iter().map(bf16::to_f32).collect();
        Some(Factors {
            a: Matrix::new(rank, pair.k_in, wide(a)),
            b: Matrix::new(pair.n_out, rank, wide(b)),
            scale: pair.scale,
        })
    }

    /// Units of the expert region that the adapter takes.
    pub fn expert_units(&self) -> u64 {
        self.report
            .pairs
            .iter()
            .filter(|pair| !pair.target.is_dense())
            .count() as u64
    }
}
