//! `lora bench`: this machine's times.

use crate::bench::{Shape, Synthetic, adapter_times, bench_device, delta_times, overlay_times};
use crate::options::BackendArg;
use crate::report::table;
use crate::{Answer, CliError, Console};
use lora_kernels::bench::{DeltaTable, DeltaTimes, OverlayReport, OverlayTimes};
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
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
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
    adapters: Vec<Timing>,
    deltas: Vec<DeltaJson>,
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

/// Measures and prints.
///
/// # Errors
/// A backend that is not there, a disk without room for the synthetic adapter, a delta or an overlay that is wrong, output that cannot
/// be written.
pub fn run(options: &Options, console: &mut Console<'_>) -> Result<Answer, CliError> {
    let device = bench_device(options.backend)?;
    let shape = if options.quick {
        Shape::TINY
    } else {
        Shape::LLAMA_8B
    };
    let synthetic = Synthetic::write(shape, console)?;
    let adapters = adapter_times(&synthetic, device.backend())?;
    let deltas = delta_times(&device, options.quick)?;
    let overlays = overlay_times(&device, options.quick)?;
    if options.json {
        let lines = deltas.lines.iter();
        let overlay_lines = overlays.lines.iter();
        let json = BenchJson {
            device: &deltas.device,
            adapters,
            deltas: lines.map(|times| DeltaJson::new(&deltas, times)).collect(),
            overlays: overlay_lines
                .map(|times| OverlayJson::new(&overlays, times))
                .collect(),
        };
        serde_json::to_writer_pretty(&mut *console.out, &json)?;
        writeln!(console.out)?;
        return Ok(Answer::Passed);
    }
    let mut rows = table(&["what", "size", "us", "GB/s"]);
    for timing in &adapters {
        let time = format!("{:.1}", timing.microseconds);
        rows.add_row([
            timing.what.clone(),
            timing.size.clone(),
            time,
            timing.rate(),
        ]);
    }
    writeln!(console.out, "{rows}\n\n{deltas}\n{overlays}")?;
    Ok(Answer::Passed)
}
