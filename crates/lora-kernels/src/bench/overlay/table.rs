//! What was measured of overlays, as a table.

use super::OverlayShape;
use crate::bench::{BenchDevice, copy_bandwidth, grid};
use std::fmt;

/// Times of one shape.
#[derive(Debug, Clone, PartialEq)]
pub struct OverlayTimes {
    /// What was timed.
    pub shape: OverlayShape,
    /// Both launches, microseconds.
    pub us: f64,
    /// Each launch alone, microseconds.
    pub parts: [(&'static str, f64); 2],
}

/// Times of several shapes on one device.
#[derive(Debug, Clone, PartialEq)]
pub struct OverlayReport {
    /// The device's own name.
    pub device: String,
    /// A line for each shape.
    pub lines: Vec<OverlayTimes>,
}

impl OverlayReport {
    /// An empty table for what is measured on `device`.
    pub fn new(device: &BenchDevice) -> Self {
        Self {
            device: device.backend().caps().name.clone(),
            lines: Vec::new(),
        }
    }

    /// The byte floor of `times` on this device, microseconds.
    pub fn floor_us(&self, times: &OverlayTimes) -> Option<f64> {
        Some(times.shape.floor_bytes() as f64 / copy_bandwidth(&self.device)?)
    }

    /// What `times` should take at most on this device, microseconds.
    pub fn reach_us(&self, times: &OverlayTimes) -> Option<f64> {
        times.shape.reach_us(copy_bandwidth(&self.device)?)
    }

    fn cells(&self, times: &OverlayTimes) -> Vec<String> {
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.1}"));
        let rate = |amount: u64| amount as f64 / times.us / 1e3;
        let flops = Some(times.shape.flops()).filter(|flops| *flops > 0);
        let [(first, first_us), (second, second_us)] = times.parts;
        vec![
            times.shape.to_string(),
            number(Some(times.us)),
            number(self.reach_us(times)),
            number(self.floor_us(times)),
            number(Some(rate(times.shape.floor_bytes()))),
            number(flops.map(|flops| rate(flops) / 1e3)),
            format!("{first} {first_us:.1}"),
            format!("{second} {second_us:.1}"),
        ]
    }
}

impl fmt::Display for OverlayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headings = [
            "overlay", "us", "reach", "floor us", "GB/s", "TFLOP/s", "first", "second",
        ];
        let mut rows = vec![headings.map(str::to_owned).to_vec()];
        rows.extend(self.lines.iter().map(|times| self.cells(times)));
        writeln!(f, "{}", self.device)?;
        grid(f, &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::H200_OVERLAYS;

    #[test]
    fn lines_say_time_goal_floor_and_rates() {
        let report = OverlayReport {
            device: "NVIDIA H200".into(),
            lines: vec![OverlayTimes {
                shape: H200_OVERLAYS[1],
                us: 16.0,
                parts: [("embedding", 3.0), ("head", 13.0)],
            }],
        };
        let text = report.to_string();
        let line = text.lines().nth(3).expect("a line below the rule");
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        assert_eq!(cells[1], "apply, 256 rows, 4 of 1024 ids, 152064 x 4096");
        assert_eq!(cells[2..5], ["16.0", "18.1", "9.4"]);
        assert_eq!(cells[7..9], ["embedding 3.0", "head 13.0"]);
    }
}
