//! An audit's report as people and as scripts read it.

use bytesize::ByteSize;
use comfy_table::{CellAlignment, Table, presets};
use lora_runtime::config::TokenTable;
use lora_runtime::weights::{AuditReport, OverlayRows, OverlayTableRows};
use std::io::{self, Write};

/// One adapted module. `module` is its path inside the layer, `expert` its number where it is an expert's.
struct ModuleRow {
    layer: usize,
    module: &'static str,
    expert: Option<usize>,
    rank: u32,
    scale: f32,
}

fn modules(report: &AuditReport) -> Vec<ModuleRow> {
    let module = |pair: &lora_runtime::weights::AuditedPair| ModuleRow {
        layer: pair.layer,
        module: pair.target.module_name(),
        expert: pair.target.expert(),
        rank: pair.rank,
        scale: pair.scale,
    };
    report.pairs.iter().map(module).collect()
}

/// Writes every finding on a line of its own, then what is applied, module by module.
///
/// # Errors
/// Those of `out`.
pub fn write_audit(out: &mut dyn Write, adapter: &str, report: &AuditReport) -> io::Result<()> {
    write_findings(out, report)?;
    if !report.pairs.is_empty() {
        writeln!(out, "{}", module_table(report))?;
    }
    for name in &report.ignored {
        writeln!(out, "ignored: {name}")?;
    }
    let OverlayRows { embed, lm_head } = report.overlay_rows;
    for (table, rows) in [(TokenTable::Embed, embed), (TokenTable::LmHead, lm_head)] {
        if rows != OverlayTableRows::default() {
            writeln!(
                out,
                "overlay of {}: {} rows replaced at most, {} past the vocabulary",
                table.peft_name(),
                rows.replaced,
                rows.extension
            )?;
        }
    }
    let errors = report.errors().count();
    let verdict = if report.ok() {
        "loads".to_owned()
    } else {
        format!("refused, {errors} error(s)")
    };
    let bytes = &report.bytes;
    writeln!(
        out,
        "{adapter}: {verdict}; applied {} of {} tensors; {} in its slot, {} for experts, {} for overlays",
        report.applied,
        report.tensors,
        ByteSize(bytes.slot),
        ByteSize(bytes.expert),
        ByteSize(bytes.overlay),
    )
}

/// Writes every finding on a line of its own.
///
/// # Errors
/// Those of `out`.
pub fn write_findings(out: &mut dyn Write, report: &AuditReport) -> io::Result<()> {
    report
        .findings
        .iter()
        .try_for_each(|finding| writeln!(out, "{finding}"))
}

/// Rank and scale by layer and module; the experts of one module that agree share a line.
fn module_table(report: &AuditReport) -> Table {
    let mut table = table(&["layer", "module", "experts", "rank", "scale"]);
    let mut modules = modules(report);
    // The audit lists an expert's three projections together; here the experts of one projection stand together.
    modules.sort_by_key(|module| {
        (
            module.layer,
            module.expert.is_some(),
            module.expert.map(|_| module.module),
        )
    });
    for group in modules.chunk_by(|a, b| {
        (a.layer, a.module, a.rank, a.scale) == (b.layer, b.module, b.rank, b.scale)
    }) {
        let first = &group[0];
        let experts = match first.expert {
            None => String::new(),
            Some(expert) if group.len() == 1 => expert.to_string(),
            Some(expert) => format!("{} from {expert}", group.len()),
        };
        table.add_row([
            first.layer.to_string(),
            first.module.to_owned(),
            experts,
            first.rank.to_string(),
            first.scale.to_string(),
        ]);
    }
    table
}

/// An empty table with these headings, numbers to the right of the first two columns.
pub(crate) fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(headings);
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
