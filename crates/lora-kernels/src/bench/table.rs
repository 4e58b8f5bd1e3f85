//! What was measured, as a table.

use super::{BenchDevice, DeltaShape, TimeGoal};
use crate::BytesMoved;
use std::fmt;

/// Times of one shape.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaTimes {
    /// What was timed.
    pub shape: DeltaShape,
    /// All sites of a layer, microseconds.
    pub layer_us: f64,
    /// Each site alone, microseconds.
    pub site_us: Vec<(&'static str, f64)>,
    /// What the layer moves.
    pub bytes: BytesMoved,
    /// Grouping the rows, once a step for all layers, microseconds.
    pub group_us: f64,
    /// The host's share of one call of a launcher, nanoseconds; `None` where a call does the work itself.
    pub host_ns: Option<f64>,
}

impl DeltaTimes {
    /// The floor's bytes over the time, 10^9 a second.
    pub fn rate(&self) -> f64 {
        self.bytes.floor() as f64 / self.layer_us / 1e3
    }
}

/// Bytes a microsecond that a large copy moves on a device, read plus written: the rate that floors are given at. An H200's is rounded up from what was
/// measured (docs/performance.md), a GB10's is that of its memory on paper. `None` for other devices.
pub fn copy_bandwidth(device: &str) -> Option<f64> {
    let known = [("H200", 4.3e6), ("GB10", 0.273e6)];
    known
        .into_iter()
        .find_map(|(name, bandwidth)| device.contains(name).then_some(bandwidth))
}

/// Times of several shapes on one device. Goals are shown for the device that they are for.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaTable {
    /// The device's own name.
    pub device: String,
    /// A line for each shape.
    pub lines: Vec<DeltaTimes>,
}

impl DeltaTable {
    /// An empty table for what is measured on `device`.
    pub fn new(device: &BenchDevice) -> Self {
        Self {
            device: device.backend().caps().name.clone(),
            lines: Vec::new(),
        }
    }

    /// The floor of `times` on this device, microseconds.
    pub fn floor_us(&self, times: &DeltaTimes) -> Option<f64> {
        Some(times.bytes.floor() as f64 / copy_bandwidth(&self.device)?)
    }

    /// What `times` should be, where that is known for this device. A rank in a pool of a larger one should take what it takes in a pool of
    /// its own, and a tenth more at most.
    pub fn goal(&self, times: &DeltaTimes) -> Option<TimeGoal> {
        let DeltaShape { rank, rows, .. } = times.shape;
        if times.shape.pool_rank == rank {
            return times.shape.goal.filter(|_| self.device.contains("H200"));
        }
        let own_pool = DeltaShape::new(rank, rows, times.shape.adapters);
        let in_own_pool = |line: &&DeltaTimes| {
            DeltaShape {
                goal: None,
                ..line.shape
            } == own_pool
        };
        let us = self.lines.iter().find(in_own_pool)?.layer_us;
        Some(TimeGoal {
            reach: 1.1 * us,
            aim: us,
        })
    }

    fn cells(&self, times: &DeltaTimes) -> Vec<String> {
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.1}"));
        let goal = self.goal(times);
        let moved = times.bytes.total() as f64 / times.bytes.floor().max(1) as f64;
        let mut cells = vec![
            times.shape.to_string(),
            number(Some(times.layer_us)),
            number(goal.map(|goal| goal.reach)),
            number(goal.map(|goal| goal.aim)),
            number(self.floor_us(times)),
            number(Some(times.rate())),
            format!("{moved:.3}"),
            number(Some(times.group_us)),
            times
                .host_ns
                .map_or("-".to_owned(), |nanoseconds| format!("{nanoseconds:.0}")),
        ];
        cells.extend(times.site_us.iter().map(|(_, us)| number(Some(*us))));
        cells
    }
}

impl fmt::Display for DeltaTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headings = [
            "shape",
            "us",
            "reach",
            "aim",
            "floor us",
            "GB/s",
            "moved/floor",
            "group us",
            "host ns",
        ];
        let mut rows = vec![headings.map(str::to_owned).to_vec()];
        let sites = self.lines.first().map_or(&[][..], |times| &times.site_us);
        rows[0].extend(sites.iter().map(|(name, _)| format!("{name} us")));
        rows.extend(self.lines.iter().map(|times| self.cells(times)));
        writeln!(f, "{}", self.device)?;
        grid(f, &rows)
    }
}

/// Cells in columns as wide as their widest, a rule below the first row; the first column flush left, the others right.
pub(super) fn grid(f: &mut fmt::Formatter<'_>, rows: &[Vec<String>]) -> fmt::Result {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(String::len).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    for (index, row) in rows.iter().enumerate() {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            match column {
                0 => write!(f, "| {cell:<width$} |")?,
                _ => write!(f, " {cell:>width$} |")?,
            }
        }
        writeln!(f)?;
        if index == 0 {
            let rule = |width: &usize| "-".repeat(width + 2);
            let rules: Vec<String> = widths.iter().map(rule).collect();
            writeln!(f, "|{}|", rules.join("|"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{H200_SHAPES, LLAMA_8B_LAYER};
    use super::*;

    fn table(device: &str) -> DeltaTable {
        let shape = H200_SHAPES[0];
        DeltaTable {
            device: device.into(),
            lines: vec![DeltaTimes {
                shape,
                layer_us: 12.0,
                site_us: vec![("qkv", 3.0)],
                bytes: shape.bytes(&LLAMA_8B_LAYER),
                group_us: 2.5,
                host_ns: Some(1234.0),
            }],
        }
    }

    #[test]
    fn lines_say_times_goals_and_floor() {
        let text = table("NVIDIA H200").to_string();
        let line = text.lines().nth(3).expect("a line below the rule");
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        assert_eq!(
            cells[1..5],
            ["rank 16, 1 rows, 1 adapters", "12.0", "15.0", "10.0"]
        );
        assert_eq!(cells[8..11], ["2.5", "1234", "3.0"]);
        let widths: Vec<usize> = text.lines().skip(1).map(str::len).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
    }

    #[test]
    fn a_rank_in_a_larger_pool_is_held_to_its_own_pool() {
        let mut table = table("any device");
        let mut in_pool = table.lines[0].clone();
        in_pool.shape.pool_rank = 64;
        let goal = TimeGoal {
            reach: 12.0 * 1.1,
            aim: 12.0,
        };
        assert_eq!(table.goal(&in_pool), Some(goal));
        table.lines.clear();
        assert_eq!(table.goal(&in_pool), None);
    }

    #[test]
    fn goals_and_floors_of_another_device_are_not_shown() {
        let table = table("some processor");
        assert_eq!(table.floor_us(&table.lines[0]), None);
        assert!(!table.to_string().contains("15.0"));
    }
}
