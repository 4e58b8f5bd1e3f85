//! `lora audit`: everything there is to say of an adapter, without loading it.

use crate::options::{LoadOptions, rank_range, read_model};
use crate::report::write_audit;
use crate::{Answer, CliError, Console};
use clap::builder::RangedU64ValueParser;
use lora_runtime::config::ModelSpec;
use lora_runtime::weights::source::{RemoteAdapter, SourceError, SourceOptions};
use lora_runtime::weights::{
    AuditReport, Finding, PoolSpec, audit_adapter, audit_dir, audit_manifest,
};
use lora_runtime::whole_adapter_units;
use std::path::PathBuf;
use std::time::Duration;

/// Options of `lora audit`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The adapter's folder, or its URL (http, https, file; s3, gs, az where built in): of a URL the config and the header are
    /// read, and no values.
    #[arg(value_name = "DIR|URL")]
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
    /// Of a URL, read the values too and look at every one.
    #[arg(long)]
    pub fetch: bool,
    /// Of a URL, time that each read may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = RangedU64ValueParser::<u64>::new().range(1..=86_400))]
    pub timeout: u64,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Audits and prints. A `config.json` that gives no geometry is a finding like any other, and so is a peer that fails.
///
/// # Errors
/// Output that cannot be written.
pub fn run(options: &Options, console: &mut Console<'_>) -> Result<Answer, CliError> {
    let adapter = options.adapter.display().to_string();
    let report = match read_model(&options.model) {
        Ok(model) if adapter.contains("://") => audit_remote(options, &adapter, &model, console)
            .unwrap_or_else(|error| {
                AuditReport::unreadable(adapter.as_str(), Finding::from(&error))
            }),
        Ok(model) => {
            let spinner = console.spinner(format!("auditing {adapter}"));
            let load = &options.load;
            let max_rank = load.max_rank_for(&options.adapter, options.max_rank);
            let pool = options.pool(&model, max_rank, console);
            let report = audit_dir(&options.adapter, &load.parse_options(), &model, &pool);
            spinner.finish_and_clear();
            report
        }
        Err(error) => AuditReport::unknown_model(adapter.as_str(), &error),
    };
    if options.json {
        serde_json::to_writer_pretty(&mut *console.out, &report)?;
        writeln!(console.out)?;
    } else {
        write_audit(console.out, &adapter, &report)?;
    }
    Ok(Answer::passed_if(report.ok()))
}

impl Options {
    fn pool(&self, model: &ModelSpec, max_rank: u32, console: &Console<'_>) -> PoolSpec {
        let units = whole_adapter_units(model);
        self.load.pool_spec(1, max_rank, units, &console.levers)
    }
}

/// Config and header of the adapter at `url`; its values where they are asked for and nothing else is wrong.
fn audit_remote(
    options: &Options,
    url: &str,
    model: &ModelSpec,
    console: &Console<'_>,
) -> Result<AuditReport, SourceError> {
    let spinner = console.spinner(format!("asking for {url}"));
    let source = SourceOptions {
        timeout: Duration::from_secs(options.timeout),
        settings: console.store_settings.clone(),
        ..SourceOptions::default()
    };
    let remote = RemoteAdapter::open(url, source);
    spinner.finish_and_clear();
    let remote = remote?;
    let manifest = remote.manifest();
    let parse = options.load.parse_options();
    let max_rank = options
        .max_rank
        .unwrap_or_else(|| options.load.own_rank(&manifest.config_json));
    let pool = options.pool(model, max_rank, console);
    let report = audit_manifest(manifest, &parse, model, &pool);
    let config = match manifest.config(&parse) {
        Ok(config) if options.fetch && report.ok() => config,
        _ => return Ok(report),
    };
    let bar = console.transfer(manifest.weights.file_bytes());
    let store = remote.fetch(&|progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.bytes);
    });
    bar.finish_and_clear();
    Ok(audit_adapter(&store?, &config, model, &pool))
}
