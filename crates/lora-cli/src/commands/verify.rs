//! `lora verify`: real adapters against what PEFT recorded.

use crate::options::{BackendArg, LoadOptions, rank_range};
use crate::report::{table, write_findings};
use crate::verify::{BaseRows, Case, CaseResult, ModuleResult, Place, Setup, verify_together};
use crate::{Answer, CliError, Console};
use bytesize::ByteSize;
use lora_runtime::weights::Finding;
use lora_runtime::{OverlayReport, open_backend};
use serde::Serialize;
use std::path::PathBuf;

/// Options of `lora verify`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Case folders: `adapter/`, `config.json` and, to compare with, `golden.safetensors`.
    #[arg(value_name = "CASE", required = true)]
    pub cases: Vec<PathBuf>,
    /// Put all cases of one base model into one pool, and their rows and base rows into one batch.
    #[arg(long)]
    pub mixed: bool,
    /// Where to run.
    #[arg(long, value_enum, default_value_t = BackendArg::Host)]
    pub backend: BackendArg,
    /// What may load.
    #[command(flatten)]
    pub load: LoadOptions,
    /// Largest rank that the pool takes; the adapters' own where not given.
    #[arg(long, value_name = "N", value_parser = rank_range())]
    pub max_rank: Option<u32>,
    /// Largest difference of an element up to which a row of an adapter's own vocabulary table counts as the base model's.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub row_diff_threshold: f32,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Verifies and prints; refused where an adapter does not load, a golden file does not hold together, an element misses its
/// tolerance, or a base row changed.
///
/// # Errors
/// A backend that is not there, output that cannot be written.
pub fn run(options: &Options, console: &mut Console<'_>) -> Result<Answer, CliError> {
    let backend = open_backend(options.backend.into())?;
    let mut cases = Vec::new();
    for dir in &options.cases {
        cases.push(Case::read(dir, &options.load, options.max_rank, console));
    }
    let levers = console.levers.clone();
    let setup = Setup {
        backend,
        options: &options.load,
        levers: &levers,
        row_diff_threshold: options.row_diff_threshold,
    };
    let progress = console.bar(cases.len() as u64);
    let mut results: Vec<CaseResult> = vec![CaseResult::default(); cases.len()];
    let mut base = BaseRows::default();
    for group in groups(&cases, options.mixed) {
        let members: Vec<&Case> = group.iter().map(|at| &cases[*at]).collect();
        let (of_group, base_of_group) = verify_together(&setup, &members)?;
        for (at, result) in group.iter().zip(of_group) {
            results[*at] = result;
            progress.inc(1);
        }
        base.rows += base_of_group.rows;
        base.changed += base_of_group.changed;
    }
    progress.finish_and_clear();
    let ok = base.changed == 0
        && cases
            .iter()
            .zip(&results)
            .all(|(case, result)| case.is_whole() && result.passes());
    let outcome = Outcome {
        cases: &cases,
        results: &results,
        base,
        ok,
    };
    if options.json {
        serde_json::to_writer_pretty(&mut *console.out, &outcome.json(options))?;
        writeln!(console.out)?;
    } else {
        outcome.write(console)?;
    }
    Ok(Answer::passed_if(ok))
}

/// Positions of the cases that share a pool: those of one base model with `--mixed`, else each its own.
fn groups(cases: &[Case], mixed: bool) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for at in 0..cases.len() {
        let shares = |group: &Vec<usize>| {
            mixed
                && group
                    .iter()
                    .all(|other| cases[*other].shares_base(&cases[at]))
        };
        let same = groups.iter_mut().find(|group| shares(group));
        match same {
            Some(group) => group.push(at),
            None => groups.push(vec![at]),
        }
    }
    groups
}

/// Everything that was found.
struct Outcome<'a> {
    cases: &'a [Case],
    results: &'a [CaseResult],
    base: BaseRows,
    ok: bool,
}

#[derive(Serialize)]
struct OutcomeJson<'a> {
    ok: bool,
    backend: &'static str,
    worst: Option<f64>,
    cases: Vec<CaseJson<'a>>,
    base_rows: BaseRowsJson,
}

#[derive(Serialize)]
struct BaseRowsJson {
    rows: usize,
    changed: usize,
}

#[derive(Serialize)]
struct CaseJson<'a> {
    case: &'a str,
    ok: bool,
    findings: &'a [Finding],
    error: Option<String>,
    worst: Option<f64>,
    modules: Vec<ModuleJson<'a>>,
    overlay: Option<OverlayJson>,
    skipped: &'a [String],
}

#[derive(Serialize)]
struct ModuleJson<'a> {
    path: &'a str,
    layer: Option<usize>,
    module: &'static str,
    expert: Option<usize>,
    rows: usize,
    worst: f64,
    row: usize,
    column: usize,
    got: f32,
    wanted: f32,
}

#[derive(Serialize)]
struct OverlayJson {
    embed_tokens: OverlayTableJson,
    lm_head: OverlayTableJson,
    rows_under_threshold: u32,
    bytes: u64,
}

#[derive(Serialize)]
struct OverlayTableJson {
    replaced: u32,
    extension: u32,
}

impl OverlayJson {
    fn new(overlay: &OverlayReport) -> Self {
        let (embed, head) = overlay.extension_rows;
        let table = |replaced, extension| OverlayTableJson {
            replaced,
            extension,
        };
        Self {
            embed_tokens: table(overlay.embed_rows, embed),
            lm_head: table(overlay.head_rows, head),
            rows_under_threshold: overlay.rows_under_threshold,
            bytes: overlay.bytes,
        }
    }
}

impl<'a> ModuleJson<'a> {
    fn new(module: &'a ModuleResult) -> Self {
        let (layer, name, expert) = match module.place {
            Place::Layer { layer, target } => (Some(layer), target.module_name(), target.expert()),
            Place::Block { layer } => (Some(layer), "experts", None),
            Place::Table(table) => (None, table.peft_name(), None),
        };
        Self {
            path: &module.path,
            layer,
            module: name,
            expert,
            rows: module.rows,
            worst: module.worst.fraction,
            row: module.worst.row,
            column: module.worst.column,
            got: module.worst.got,
            wanted: module.worst.wanted,
        }
    }
}

impl<'a> Outcome<'a> {
    /// The module whose worst element lies furthest, over all cases, with its case.
    fn worst(&self) -> Option<(&'a Case, &'a ModuleResult)> {
        let worst = self
            .cases
            .iter()
            .zip(self.results)
            .filter_map(|(case, result)| Some((case, result.worst()?)));
        worst.max_by(|(_, a), (_, b)| a.worst.fraction.total_cmp(&b.worst.fraction))
    }

    fn json(&self, options: &Options) -> OutcomeJson<'a> {
        let case = |(case, result): (&'a Case, &'a CaseResult)| CaseJson {
            case: &case.name,
            ok: case.is_whole() && result.passes(),
            findings: &case.report.findings,
            error: case.error.as_ref().map(ToString::to_string),
            worst: result.worst().map(|module| module.worst.fraction),
            modules: result.modules.iter().map(ModuleJson::new).collect(),
            overlay: result.overlay.as_ref().map(OverlayJson::new),
            skipped: &case.golden.skipped,
        };
        OutcomeJson {
            ok: self.ok,
            backend: match options.backend {
                BackendArg::Host => "host",
                BackendArg::Cuda => "cuda",
            },
            worst: self.worst().map(|(_, module)| module.worst.fraction),
            cases: self.cases.iter().zip(self.results).map(case).collect(),
            base_rows: BaseRowsJson {
                rows: self.base.rows,
                changed: self.base.changed,
            },
        }
    }

    fn write(&self, console: &mut Console<'_>) -> Result<(), CliError> {
        for (case, result) in self.cases.iter().zip(self.results) {
            write_case(case, result, console)?;
        }
        if self.base.rows > 0 {
            let BaseRows { rows, changed } = self.base;
            writeln!(
                console.out,
                "base rows: {} of {rows} kept every bit",
                rows - changed
            )?;
        }
        if let Some((case, module)) = self.worst() {
            let worst = module.worst;
            writeln!(
                console.out,
                "worst element: {:.3} of its tolerance ({}: {}, row {}, column {}: {} where PEFT gave {})",
                worst.fraction,
                case.name,
                module.path,
                worst.row,
                worst.column,
                worst.got,
                worst.wanted,
            )?;
        }
        writeln!(
            console.out,
            "verify: {}",
            if self.ok { "passed" } else { "FAILED" }
        )?;
        Ok(())
    }
}

/// Findings, then a line a module, or that there is nothing to compare.
fn write_case(case: &Case, result: &CaseResult, console: &mut Console<'_>) -> Result<(), CliError> {
    let rank_and_scale = |module: &ModuleResult| {
        let pair = match module.place {
            Place::Layer { layer, target } => case.pair(layer, target),
            Place::Block { .. } | Place::Table(_) => None,
        };
        pair.map_or(("-".to_owned(), "-".to_owned()), |pair| {
            (pair.rank.to_string(), pair.scale.to_string())
        })
    };
    writeln!(console.out, "{}", case.name)?;
    write_findings(console.out, &case.report)?;
    if !case.report.ok() {
        writeln!(console.out, "refused")?;
    } else if let Some(error) = &case.error {
        writeln!(console.out, "not compared: {error}")?;
    } else if result.modules.is_empty() {
        writeln!(console.out, "nothing to compare")?;
    } else {
        let mut rows = table(&[
            "module",
            "verdict",
            "rank",
            "scale",
            "rows",
            "worst / tolerance",
        ]);
        for module in &result.modules {
            let verdict = if module.worst.passes() { "ok" } else { "MISS" };
            let (rank, scale) = rank_and_scale(module);
            let worst = format!("{:.3}", module.worst.fraction);
            rows.add_row([
                module.path.clone(),
                verdict.to_owned(),
                rank,
                scale,
                module.rows.to_string(),
                worst,
            ]);
        }
        writeln!(console.out, "{rows}")?;
    }
    if let Some(overlay) = &result.overlay {
        let (embed, head) = overlay.extension_rows;
        writeln!(
            console.out,
            "overlay: {} rows of embed_tokens and {} of lm_head replaced, {embed} and {head} past the vocabulary, {} left for the threshold; {}",
            overlay.embed_rows,
            overlay.head_rows,
            overlay.rows_under_threshold,
            ByteSize(overlay.bytes),
        )?;
    }
    for path in &case.golden.skipped {
        writeln!(console.out, "not a delta, not compared: {path}")?;
    }
    Ok(())
}
