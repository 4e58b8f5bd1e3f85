//! Development tasks of the workspace: `cargo xtask <command>`, one file a command.
//!
//! * `tidy` holds the rules that the compiler does not: layers, `unsafe`, argument counts, where names and
//!   environment reads may stand;
//! * `build-kernels` compiles `kernels/src/*.cu` to the PTX that is checked in, or checks that it is what the sources
//!   give;
//! * `public-items` lists what each crate offers, or checks the lists;
//! * `plots` draws the measured times of docs/performance.md beside their byte floors, or checks the drawings;
//! * `gpu-bundle` packs test and bench executables for a GPU machine that has no cargo.

#![forbid(unsafe_code)]

mod build_kernels;
mod generated;
mod gpu_bundle;
mod plots;
mod public_items;
mod tidy;
mod workspace;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Development tasks of the workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check the workspace's own rules and list files and functions that may be two things.
    Tidy,
    /// Compile the CUDA sources to checked-in PTX and report registers, spills and shared memory.
    BuildKernels(build_kernels::Args),
    /// Pack test and bench executables and the CLI for a GPU machine without cargo.
    GpuBundle(gpu_bundle::Args),
    /// Draw docs/performance.md's tables of times as docs/plots/*.svg.
    Plots(generated::Args),
    /// List each crate's public items in docs/public-items.
    PublicItems(generated::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Tidy => tidy::run(&workspace::root()),
        Command::BuildKernels(args) => build_kernels::run(&workspace::root(), &args),
        Command::GpuBundle(args) => gpu_bundle::run(&workspace::root(), &args),
        Command::Plots(args) => plots::run(&workspace::root(), &args),
        Command::PublicItems(args) => public_items::run(&workspace::root(), &args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
