//! `lora audit`: everything there is to say of an adapter folder, without loading it.

use crate::options::{LoadOptions, rank_range, read_model};
use crate::report::write_audit;
use crate::{Answer, CliError, Console};
use lora_runtime::weights::{AuditReport, audit_dir};
use lora_runtime::whole_adapter_units;
use std::path::PathBuf;

/// Options of `lora audit`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The adapter's folder.
    #[arg(value_name = "DIR")]
    pub adapter: PathBuf,
    /// The base model's `config.json`.
    #[arg(long, value_name = "FILE")]
    pub model: PathBuf,
    /// What may load.
    #[command(flatten)]
    pub load: LoadOptions,
    /// Largest rank that the pool takes; the adapter's own where not given.
    #[arg(long, value_name = "N", value_parser = rank_range())]
    pub max_rank: Option<u32>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Audits and prints. A `config.json` that gives no geometry is a finding like any other.
///
/// # Errors
/// Output that cannot be written.
pub fn run(options: &Options, console: &mut Console<'_>) -> Result<Answer, CliError> {
    let adapter = options.adapter.display().to_string();
    let spinner = console.spinner(format!("auditing {adapter}"));
    let report = match read_model(&options.model) {
        Ok(model) => {
            let max_rank = options
                .load
                .max_rank_for(&options.adapter, options.max_rank);
            let units = whole_adapter_units(&model);
            let pool = options.load.pool_spec(1, max_rank, units, &console.levers);
            audit_dir(
                &options.adapter,
                &options.load.parse_options(),
                &model,
                &pool,
            )
        }
        Err(error) => AuditReport::unknown_model(adapter.as_str(), &error),
    };
    spinner.finish_and_clear();
    if options.json {
        serde_json::to_writer_pretty(&mut *console.out, &report)?;
        writeln!(console.out)?;
    } else {
        write_audit(console.out, &adapter, &report)?;
    }
    Ok(Answer::passed_if(report.ok()))
}
