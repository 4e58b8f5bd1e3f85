//! `lora bench`: this machine's times.

use crate::bench::{Shape, Synthetic, adapter_times, delta_times};
use crate::options::BackendArg;
use crate::report::table;
use crate::{Answer, CliError, Console};
use lora_runtime::open_backend;
use serde::Serialize;

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

/// Measures and prints.
///
/// # Errors
/// A backend that is not there, a disk without room for the synthetic adapter, output that cannot be written.
pub fn run(options: &Options, console: &mut Console<'_>) -> Result<Answer, CliError> {
    let backend = open_backend(options.backend.into())?;
    let shape = if options.quick {
        Shape::TINY
    } else {
        Shape::LLAMA_8B
    };
    let synthetic = Synthetic::write(shape, console)?;
    let mut timings = adapter_times(&synthetic, &backend)?;
    timings.extend(delta_times(shape, &backend)?);
    if options.json {
        serde_json::to_writer_pretty(&mut *console.out, &timings)?;
        writeln!(console.out)?;
        return Ok(Answer::Passed);
    }
    let mut rows = table(&["what", "size", "us", "GB/s"]);
    for timing in &timings {
        let time = format!("{:.1}", timing.microseconds);
        rows.add_row([
            timing.what.clone(),
            timing.size.clone(),
            time,
            timing.rate(),
        ]);
    }
    let caps = backend.caps();
    writeln!(console.out, "{} ({} units)\n{rows}", caps.name, caps.units)?;
    Ok(Answer::Passed)
}
