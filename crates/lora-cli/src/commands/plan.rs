//! `lora plan`: what a pool takes, before anything is allocated.

use crate::files::read_json;
use crate::options::{LoadOptions, rank_range};
use crate::report::table;
use crate::{Answer, CliError, Console};
use bytesize::ByteSize;
use lora_runtime::config::ModelSpec;
use lora_runtime::weights::PoolLayout;
use lora_runtime::{RuntimeError, plan_expert_tables, plan_scratch, whole_adapter_units};
use serde::Serialize;
use std::path::PathBuf;

/// Options of `lora plan`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The base model's `config.json`.
    #[arg(long, value_name = "FILE")]
    pub model: PathBuf,
    /// Slots of the pool.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_loras: u32,
    /// Largest rank of a slot.
    #[arg(long, value_name = "R", value_parser = rank_range())]
    pub max_rank: u32,
    /// What a slot holds.
    #[command(flatten)]
    pub load: LoadOptions,
    /// Padded expert pairs (one projection of one expert, or one router) to reserve; with `--experts`. One whole
    /// adapter's where not given.
    #[arg(long, value_name = "UNITS")]
    pub expert_units: Option<u64>,
    /// Rows of the largest batch that scratch is sized for.
    #[arg(long, value_name = "ROWS", default_value_t = 4096)]
    pub max_rows: u32,
    /// Say how many slots fit in this much memory, such as `16GiB`.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// What `lora plan` found, as its JSON.
#[derive(Debug, Serialize)]
struct Plan {
    slot: u64,
    slots: u64,
    tables: u64,
    expert_unit: u64,
    expert_units: u64,
    experts: u64,
    expert_tables: u64,
    scratch: u64,
    total: u64,
    memory: Option<u64>,
    slots_that_fit: Option<u32>,
}

/// Plans and prints; refused where `--memory` is given and the pool does not fit it.
///
/// # Errors
/// A model file that cannot be read or gives no geometry, numbers that no pool can have, output that cannot be written.
pub fn run(options: &Options, console: &mut Console<'_>) -> Result<Answer, CliError> {
    let path = &options.model;
    let text = read_json(path).map_err(|error| CliError::read(path, error))?;
    let model = ModelSpec::from_hf_config(&text).map_err(|source| CliError::Model {
        path: path.clone(),
        source,
    })?;
    let plan = plan(options, &model, console)?;
    if options.json {
        serde_json::to_writer_pretty(&mut *console.out, &plan)?;
        writeln!(console.out)?;
    } else {
        write_plan(&plan, options, console)?;
    }
    let fits = plan
        .slots_that_fit
        .is_none_or(|slots| slots >= options.max_loras);
    Ok(Answer::passed_if(fits))
}

fn plan(options: &Options, model: &ModelSpec, console: &Console<'_>) -> Result<Plan, CliError> {
    let units = options
        .expert_units
        .unwrap_or_else(|| whole_adapter_units(model));
    let spec = |slots: u32| {
        options
            .load
            .pool_spec(slots, options.max_rank, units, &console.levers)
    };
    let layout = |slots: u32| PoolLayout::new(model, &spec(slots)).map_err(RuntimeError::from);
    let pool = layout(options.max_loras)?;
    let bytes = pool.bytes();
    let tables = plan_expert_tables(&pool, None)?;
    let scratch = plan_scratch(model, &spec(options.max_loras), options.max_rows)?;
    let fitting = options.memory.map(|memory| {
        let takes = |slots: u32| {
            let layout = layout(slots).ok()?;
            let tables = plan_expert_tables(&layout, None).ok()?;
            let bytes = layout.bytes().total().checked_add(tables)?;
            bytes.checked_add(scratch)
        };
        slots_that_fit(memory.as_u64(), takes)
    });
    Ok(Plan {
        slot: bytes.slot,
        slots: bytes.slots,
        tables: bytes.tables,
        expert_unit: bytes.expert_unit,
        expert_units: pool.experts().map_or(0, |experts| experts.units()),
        experts: bytes.experts,
        expert_tables: tables,
        scratch,
        total: bytes.total() + tables + scratch,
        memory: options.memory.map(|memory| memory.as_u64()),
        slots_that_fit: fitting,
    })
}

/// The largest slot count whose bytes are at most `memory`, by bisection: bytes grow with slots.
fn slots_that_fit(memory: u64, takes: impl Fn(u32) -> Option<u64>) -> u32 {
    let fits = |slots: u32| takes(slots).is_some_and(|bytes| bytes <= memory);
    let (mut low, mut high) = (0, i32::MAX as u32);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle
        } else {
            high = middle - 1
        }
    }
    low
}

fn write_plan(plan: &Plan, options: &Options, console: &mut Console<'_>) -> Result<(), CliError> {
    let mut rows = table(&["part", "what", "bytes", ""]);
    let slots = options.max_loras;
    for (part, what, bytes) in [
        (
            "slots",
            format!("{slots} of {}", ByteSize(plan.slot)),
            plan.slots,
        ),
        (
            "tables",
            format!("{slots} entries a module and layer"),
            plan.tables,
        ),
        (
            "experts",
            format!(
                "{} units of {}",
                plan.expert_units,
                ByteSize(plan.expert_unit)
            ),
            plan.experts,
        ),
        (
            "expert tables",
            format!("{slots} adapters with experts"),
            plan.expert_tables,
        ),
        (
            "scratch",
            format!("batches of {} rows", options.max_rows),
            plan.scratch,
        ),
        ("total", String::new(), plan.total),
    ] {
        rows.add_row([
            part.to_owned(),
            what,
            bytes.to_string(),
            ByteSize(bytes).to_string(),
        ]);
    }
    writeln!(console.out, "{rows}")?;
    if let (Some(memory), Some(fitting)) = (plan.memory, plan.slots_that_fit) {
        let verdict = if fitting >= slots {
            "fits"
        } else {
            "does not fit"
        };
        writeln!(
            console.out,
            "{slots} slots: {verdict} in {}, where {fitting} slots fit",
            ByteSize(memory)
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::slots_that_fit;

    #[test]
    fn most_slots_that_fit_are_found() {
        assert_eq!(
            slots_that_fit(1000, |slots| Some(100 + u64::from(slots) * 90)),
            10
        );
        assert_eq!(slots_that_fit(99, |slots| Some(100 + u64::from(slots))), 0);
        assert_eq!(
            slots_that_fit(u64::MAX, |slots| (slots <= 12345).then_some(1)),
            12345
        );
    }
}
