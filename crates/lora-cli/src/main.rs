//! The `lora` command. Everything it does is in the library beside it.

#![forbid(unsafe_code)]

use lora_cli::{Console, run};
use lora_runtime::config::{LEVER_PREFIX, Levers, store_settings_from_env};
use std::io::{IsTerminal, stderr, stdout};
use std::process::ExitCode;

fn main() -> ExitCode {
    // Warnings of the libraries (a lever that was not understood, deltas left out), on standard error.
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(stderr)
        .without_time()
        .init();
    let levers = match Levers::from_env(LEVER_PREFIX) {
        Ok(levers) => levers,
        Err(error) => {
            eprintln!("lora: {error}");
            return ExitCode::from(2);
        }
    };
    let interactive = stderr().is_terminal();
    let mut console = Console {
        out: &mut stdout().lock(),
        err: &mut stderr(),
        interactive,
        levers,
        store_settings: store_settings_from_env(),
    };
    ExitCode::from(run(std::env::args_os(), &mut console))
}
