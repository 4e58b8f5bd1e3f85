//! What `ptxas -v` says of each kernel.

use super::manifest::{Manifest, Target};
use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};

/// What one kernel takes of a multiprocessor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct KernelUse {
    /// Symbol.
    pub(super) name: String,
    /// Registers a thread.
    registers: u64,
    /// Bytes of local stack a thread.
    stack: u64,
    /// Bytes of spill stores and loads a thread.
    spills: u64,
    /// Bytes of static shared memory a block.
    shared: u64,
}

impl KernelUse {
    /// What forbids this kernel on `target`.
    pub(super) fn problems(&self, target: &Target, manifest: &Manifest) -> Vec<String> {
        let mut found = Vec::new();
        if self.spills > 0 {
            found.push(format!(
                "{} for {} spills {} bytes",
                self.name, target.name, self.spills
            ));
        }
        if self.stack > 0 {
            found.push(format!(
                "{} for {} uses {} bytes of stack",
                self.name, target.name, self.stack
            ));
        }
        let shared = self.shared + manifest.dynamic_shared(&self.name, target);
        if shared > target.shared_bytes {
            found.push(format!(
                "{} for {} takes {shared} bytes of shared memory a block, the chip has {}",
                self.name, target.name, target.shared_bytes
            ));
        }
        found
    }
}

/// Parses the report that `ptxas -v` prints to its standard error.
pub(super) fn parse(report: &str) -> Result<Vec<KernelUse>> {
    let mut kernels: Vec<KernelUse> = Vec::new();
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(KernelUse {
                name,
                ..KernelUse::default()
            });
        }
        let Some(kernel) = kernels.last_mut() else {
            continue;
        };
        // A non-inlined device function has properties of its own; its stack and spills are its caller's cost.
        if line.contains("bytes stack frame") {
            kernel.stack +=
                number_before(line, " bytes stack frame").context("ptxas: stack frame")?;
            kernel.spills +=
                number_before(line, " bytes spill stores").context("ptxas: spill stores")?;
            kernel.spills +=
                number_before(line, " bytes spill loads").context("ptxas: spill loads")?;
        }
        if line.contains(" registers") {
            kernel.registers = number_before(line, " registers").context("ptxas: registers")?;
            kernel.shared = number_before(line, " bytes smem").unwrap_or(0);
        }
    }
    Ok(kernels)
}

/// The number that stands right before `unit` in `line`.
fn number_before(line: &str, unit: &str) -> Option<u64> {
    let (before, _) = line.split_once(unit)?;
    before
        .rsplit(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// The report as a table.
pub(super) fn table(uses: &[(&Target, KernelUse)], manifest: &Manifest) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "target",
        "kernel",
        "registers",
        "stack",
        "spills",
        "static smem",
        "dynamic smem",
        "smem limit",
    ]);
    for (target, kernel) in uses {
        table.add_row([
            target.name.clone(),
            kernel.name.clone(),
            kernel.registers.to_string(),
            kernel.stack.to_string(),
            kernel.spills.to_string(),
            kernel.shared.to_string(),
            manifest.dynamic_shared(&kernel.name, target).to_string(),
            target.shared_bytes.to_string(),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'shrink' for 'sm_90'
ptxas info    : Function properties for shrink
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 256 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'expand' for 'sm_90'
ptxas info    : Function properties for expand
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers
";

    #[test]
    fn report_is_read() {
        let kernels = parse(REPORT).expect("a report");
        let shrink = KernelUse {
            name: "shrink".into(),
            registers: 40,
            stack: 0,
            spills: 0,
            shared: 256,
        };
        let expand = KernelUse {
            name: "expand".into(),
            registers: 255,
            stack: 16,
            spills: 20,
            shared: 0,
        };
        assert_eq!(kernels, [shrink, expand]);
    }
}
