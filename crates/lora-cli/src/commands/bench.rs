//! `lora bench`: this machine's times.

use crate::bench::{
    Shape, SwapTimes, Synthetic, adapter_times, bench_device, delta_times, expert_times,
    overlay_times, swap_times,
};
use crate::options::BackendArg;
use crate::report::table;
use crate::{Answer, CliError, Console};
use lora_kernels::bench::{
    BenchDevice, DeltaTable, DeltaTimes, MoeTable, MoeTimes, OverlayReport, OverlayTimes,
};
use lora_runtime::launch_options;
use serde::Serialize;
use std::collections::BTreeMap;

/// Options of `lora bench`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Where to run the deltas.
    #[arg(long, value_enum, default_value_t = BackendArg::Host)]
    pub backend: BackendArg,
    /// Tiny sizes: whether it runs, not how fast.
    #[arg(long)]
    pub quick: bool,
    /// Measure these alone; may be given more than once.
    #[arg(long, value_enum)]
    pub only: Vec<Part>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// What `lora bench` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Reading, auditing, packing and uploading an adapter.
    Adapters,
    /// A swap while other slots decode: on a GPU, whose steps are short enough to see it, or with `--quick`.
    Swap,
    /// Deltas of a dense layer.
    Deltas,
    /// Deltas of the experts of a MoE block.
    Experts,
    /// Token overlays.
    Overlays,
}

impl Options {
    fn measures(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

/// One measured line.
#[derive(Debug, Clone, Serialize)]
pub struct Timing {
    /// What was timed.
    pub what: String,
    /// Its size.
    pub size: String,
    /// Median of the runs, microseconds.
    pub microseconds: f64,
    /// Bytes that must move at least once; 0 where nothing is moved.
    pub bytes: u64,
}

impl Timing {
    /// Bytes over time in 10^9 a second, for what moves bytes.
    fn rate(&self) -> String {
        match self.bytes {
            0 => String::new(),
            bytes => format!("{:.2}", bytes as f64 / self.microseconds / 1e3),
        }
    }
}

/// The JSON of `lora bench --json`.
#[derive(Debug, Serialize)]
struct BenchJson<'a> {
    device: &'a str,
    adapters: &'a [Timing],
    swap: &'a Option<SwapTimes>,
    deltas: Vec<DeltaJson>,
    experts: Vec<ExpertJson>,
    overlays: Vec<OverlayJson>,
}

/// Times of the deltas of a layer in JSON, microseconds where nothing else is said.
#[derive(Debug, Serialize)]
struct DeltaJson {
    rank: u32,
    pool_rank: u32,
    rows: u32,
    adapters: u32,
    microseconds: f64,
    sites: BTreeMap<&'static str, f64>,
    reach: Option<f64>,
    aim: Option<f64>,
    floor: Option<f64>,
    floor_bytes: u64,
    moved_bytes: u64,
    group_rows: f64,
    host_nanoseconds_a_call: Option<f64>,
}

impl DeltaJson {
    fn new(table: &DeltaTable, times: &DeltaTimes) -> Self {
        let goal = table.goal(times);
        Self {
            rank: times.shape.rank,
            pool_rank: times.shape.pool_rank,
            rows: times.shape.rows,
            adapters: times.shape.adapters,
            microseconds: times.layer_us,
            sites: times.site_us.iter().copied().collect(),
            reach: goal.map(|goal| goal.reach),
            aim: goal.map(|goal| goal.aim),
            floor: table.floor_us(times),
            floor_bytes: times.bytes.floor(),
            moved_bytes: times.bytes.total(),
            group_rows: times.group_us,
            host_nanoseconds_a_call: times.host_ns,
        }
    }
}

/// Times of building or applying overlays in JSON, microseconds where nothing else is said.
#[derive(Debug, Serialize)]
struct OverlayJson {
    what: String,
    microseconds: f64,
    parts: BTreeMap<&'static str, f64>,
    reach: Option<f64>,
    floor: Option<f64>,
    floor_bytes: u64,
    flops: u64,
}

impl OverlayJson {
    fn new(report: &OverlayReport, times: &OverlayTimes) -> Self {
        Self {
            what: times.shape.to_string(),
            microseconds: times.us,
            parts: times.parts.into(),
            reach: report.reach_us(times),
            floor: report.floor_us(times),
            floor_bytes: times.shape.floor_bytes(),
            flops: times.shape.flops(),
        }
    }
}

/// Times of the experts of a MoE block in JSON, microseconds.
#[derive(Debug, Serialize)]
struct ExpertJson {
    rank: u32,
    rows: u32,
    adapters: u32,
    microseconds: f64,
    group_rows: f64,
    gate_up: f64,
    down: f64,
    reach: Option<f64>,
    aim: Option<f64>,
    floor: Option<f64>,
    floor_bytes: u64,
    moved_bytes: u64,
}

impl ExpertJson {
    fn new(table: &MoeTable, times: &MoeTimes) -> Self {
        let goal = table.goal(times);
        Self {
            rank: times.shape.rank,
            rows: times.shape.tokens,
            adapters: times.shape.adapters,
            microseconds: times.layer_us,
            group_rows: times.group_us,
            gate_up: times.gate_up_us,
            down: times.down_us,
            reach: goal.map(|goal| goal.reach),
            aim: goal.map(|goal| goal.aim),
            floor: table.floor_us(times),
            floor_bytes: times.bytes.floor(),
            moved_bytes: times.bytes.total(),
        }
    }
}

/// Swaps that are timed, and steps before the first.
const SWAPS: (usize, usize) = (20, 500);

/// The same where only whether it runs is asked.
const QUICK_SWAPS: (usize, usize) = (2, 5);

/// What was measured; a part that was not asked for has no lines.
struct Measured {
    adapters: Vec<Timing>,
    swap: Option<SwapTimes>,
    deltas: DeltaTable,
    experts: MoeTable,
    overlays: OverlayReport,
}

/// Measures and prints.
///
/// # Errors
/// A backend that is not there, a disk without room for the synthetic adapter, a result that is wrong, output that cannot
/// be written.
pub fn run(options: &Options, console: &mut Console<'_>) -> Result<Answer, CliError> {
    let device = bench_device(options.backend)?;
    let measured = measure(options, &device, console)?;
    if options.json {
        write_json(&measured, console)?;
    } else {
        write_text(&measured, console)?;
    }
    Ok(Answer::Passed)
}

fn measure(
    options: &Options,
    device: &BenchDevice,
    console: &Console<'_>,
) -> Result<Measured, CliError> {
    let quick = options.quick;
    let shape = if quick { Shape::TINY } else { Shape::LLAMA_8B };
    let launch = launch_options(&console.levers);
    let with_adapters = options.measures(Part::Adapters);
    let with_swap = options.measures(Part::Swap) && (quick || device.is_asynchronous());
    let synthetic = match with_adapters || with_swap {
        true => Some(Synthetic::write(shape, console)?),
        false => None,
    };
    let swaps = if quick { QUICK_SWAPS } else { SWAPS };
    Ok(Measured {
        adapters: match &synthetic {
            Some(synthetic) if with_adapters => adapter_times(synthetic, device.backend())?,
            _ => Vec::new(),
        },
        swap: match &synthetic {
            Some(synthetic) if with_swap => Some(swap_times(synthetic, device, swaps)?),
            _ => None,
        },
        deltas: match options.measures(Part::Deltas) {
            true => delta_times(device, quick)?,
            false => DeltaTable::new(device),
        },
        experts: match options.measures(Part::Experts) {
            true => expert_times(device, launch, quick)?,
            false => MoeTable::new(device),
        },
        overlays: match options.measures(Part::Overlays) {
            true => overlay_times(device, quick)?,
            false => OverlayReport::new(device),
        },
    })
}

fn write_json(measured: &Measured, console: &mut Console<'_>) -> Result<(), CliError> {
    let Measured {
        adapters,
        swap,
        deltas,
        experts,
        overlays,
    } = measured;
    let (delta_lines, expert_lines) = (deltas.lines.iter(), experts.lines.iter());
    let overlay_lines = overlays.lines.iter();
    let json = BenchJson {
        device: &deltas.device,
        adapters,
        swap,
        deltas: delta_lines
            .map(|times| DeltaJson::new(deltas, times))
            .collect(),
        experts: expert_lines
            .map(|times| ExpertJson::new(experts, times))
            .collect(),
        overlays: overlay_lines
            .map(|times| OverlayJson::new(overlays, times))
            .collect(),
    };
    serde_json::to_writer_pretty(&mut *console.out, &json)?;
    writeln!(console.out)?;
    Ok(())
}

fn write_text(measured: &Measured, console: &mut Console<'_>) -> Result<(), CliError> {
    if !measured.adapters.is_empty() {
        let mut rows = table(&["what", "size", "us", "GB/s"]);
        for timing in &measured.adapters {
            let time = format!("{:.1}", timing.microseconds);
            rows.add_row([
                timing.what.clone(),
                timing.size.clone(),
                time,
                timing.rate(),
            ]);
        }
        writeln!(console.out, "{rows}\n")?;
    }
    if let Some(swap) = &measured.swap {
        writeln!(console.out, "{swap}\n")?;
    }
    if !measured.deltas.lines.is_empty() {
        writeln!(console.out, "{}", measured.deltas)?;
    }
    if !measured.experts.lines.is_empty() {
        writeln!(console.out, "{}", measured.experts)?;
    }
    if !measured.overlays.lines.is_empty() {
        writeln!(console.out, "{}", measured.overlays)?;
    }
    Ok(())
}
