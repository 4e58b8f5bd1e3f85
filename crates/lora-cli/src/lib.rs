//! The library behind the `lora` command: audit, plan, verify and bench PEFT adapters.
//!
//! [`run`] takes a command line and a [`Console`] and gives the exit code, so that tests call the commands in process:
//!
//! ```
//! use lora_cli::{Console, run};
//!
//! let (mut out, mut err) = (Vec::new(), Vec::new());
//! let code = run(["lora", "verify", "--help"], &mut Console::plain(&mut out, &mut err));
//! assert_eq!(code, 0);
//! assert!(String::from_utf8(out)?.contains("--mixed"));
//! # Ok::<(), std::string::FromUtf8Error>(())
//! ```
//!
//! Exit codes: 0 passed, 1 refused or missed (unreadable files included), 2 usage.

#![forbid(unsafe_code)]

pub mod bench;
pub mod commands;
mod error;
mod files;
pub mod options;
pub mod report;
pub mod verify;

pub use error::CliError;

use clap::{Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use lora_runtime::config::Levers;
use std::borrow::Cow;
use std::ffi::OsString;
use std::io::Write;
use std::time::Duration;

/// Where a command writes, and what it was told beside its arguments.
pub struct Console<'a> {
    /// The answer.
    pub out: &'a mut dyn Write,
    /// Errors, on one line each.
    pub err: &'a mut dyn Write,
    /// Whether a person watches: progress is shown.
    pub interactive: bool,
    /// Levers, as read from the environment.
    pub levers: Levers,
    /// Settings of cloud providers' stores, as read from the environment.
    pub store_settings: Vec<(String, String)>,
}

impl<'a> Console<'a> {
    /// A console for scripts: no progress, default levers.
    pub fn plain(out: &'a mut dyn Write, err: &'a mut dyn Write) -> Self {
        Self {
            out,
            err,
            interactive: false,
            levers: Levers::default(),
            store_settings: Vec::new(),
        }
    }
}

impl Console<'_> {
    /// A bar over `length` steps where a person watches, else nothing.
    pub(crate) fn bar(&self, length: u64) -> ProgressBar {
        if self.interactive {
            ProgressBar::new(length)
        } else {
            ProgressBar::hidden()
        }
    }

    /// A bar over the bytes of a transfer where a person watches, else nothing.
    pub(crate) fn transfer(&self, bytes: u64) -> ProgressBar {
        let template = "{bar:40} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}";
        match ProgressStyle::with_template(template) {
            Ok(style) => self.bar(bytes).with_style(style),
            Err(_) => self.bar(bytes),
        }
    }

    /// A moving sign that something goes on where a person watches, else nothing.
    pub(crate) fn spinner(&self, message: impl Into<Cow<'static, str>>) -> ProgressBar {
        if !self.interactive {
            return ProgressBar::hidden();
        }
        let spinner = ProgressBar::new_spinner().with_message(message);
        spinner.enable_steady_tick(Duration::from_millis(100));
        spinner
    }
}

/// What a command found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Exit code 0.
    Passed,
    /// Exit code 1.
    Refused,
}

impl Answer {
    /// [`Answer::Passed`] where `ok`.
    pub fn passed_if(ok: bool) -> Self {
        if ok { Self::Passed } else { Self::Refused }
    }
}

#[derive(Debug, Parser)]
#[command(
    name = "lora",
    version,
    about = "Audit, plan, verify and bench PEFT LoRA adapters"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Say everything there is to say of an adapter, in a folder or at a URL; exit 1 if it would not load.
    Audit(commands::audit::Options),
    /// Bytes that a pool takes for a model, a rank and a slot count, and what fits in a memory size.
    Plan(commands::plan::Options),
    /// Run recorded rows through real adapters and compare with recorded outputs; exit 1 on a miss.
    Verify(commands::verify::Options),
    /// Time parse, audit, pack and deltas on this machine.
    Bench(commands::bench::Options),
}

/// Runs one command line (the program's name first) and gives its exit code.
pub fn run<A>(arguments: impl IntoIterator<Item = A>, console: &mut Console<'_>) -> u8
where
    A: Into<OsString> + Clone,
{
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => return usage(&error, console),
    };
    let answer = match &cli.command {
        Command::Audit(options) => commands::audit::run(options, console),
        Command::Plan(options) => commands::plan::run(options, console),
        Command::Verify(options) => commands::verify::run(options, console),
        Command::Bench(options) => commands::bench::run(options, console),
    };
    match answer {
        Ok(Answer::Passed) => 0,
        Ok(Answer::Refused) => 1,
        Err(error) => {
            // Nothing is left to do where even the error cannot be written.
            let _ = writeln!(console.err, "lora: {error}");
            1
        }
    }
}

/// Prints help or what is wrong with the command line: 0 or 2.
fn usage(error: &clap::Error, console: &mut Console<'_>) -> u8 {
    let text = error.render();
    let _ = match error.use_stderr() {
        true => write!(console.err, "{text}"),
        false => write!(console.out, "{text}"),
    };
    u8::try_from(error.exit_code()).unwrap_or(2)
}
