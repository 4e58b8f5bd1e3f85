//! What MoE blocks are timed, and how times are shown.

use crate::BytesMoved;
use crate::bench::table::{copy_bandwidth, grid};
use crate::bench::{BenchDevice, TimeGoal};
use std::fmt;

/// A MoE block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeLayer {
    /// Width of the block's x and out.
    pub hidden: u32,
    /// Width of an expert.
    pub width: u32,
    /// Experts.
    pub experts: u32,
    /// Experts a token.
    pub top_k: u32,
}

/// A block of Qwen3-30B-A3B.
pub const QWEN3_30B_LAYER: MoeLayer = MoeLayer {
    hidden: 2048,
    width: 768,
    experts: 128,
    top_k: 8,
};

/// One that takes no time: whether everything runs, not how fast.
pub const TINY_MOE_LAYER: MoeLayer = MoeLayer {
    hidden: 256,
    width: 64,
    experts: 8,
    top_k: 2,
};

/// A batch: tokens shared evenly by adapters of one rank, token i having adapter `i % adapters`, each sent to random experts. The tables have room
/// for these adapters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoeShape {
    /// True rank of every pair.
    pub rank: u32,
    /// Tokens.
    pub tokens: u32,
    /// Adapters, each with all experts.
    pub adapters: u32,
    /// What to reach, where that is known.
    pub goal: Option<TimeGoal>,
}

impl MoeShape {
    /// `tokens` tokens of `adapters` adapters of rank `rank`.
    pub const fn new(rank: u32, tokens: u32, adapters: u32) -> Self {
        Self {
            rank,
            tokens,
            adapters,
            goal: None,
        }
    }

    const fn goal(self, reach: f64, aim: f64) -> Self {
        let goal = Some(TimeGoal { reach, aim });
        Self { goal, ..self }
    }
}

impl fmt::Display for MoeShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            tokens,
            adapters,
            ..
        } = self;
        write!(f, "rank {rank}, {tokens} rows, {adapters} adapters")
    }
}

/// What an H200 is measured by, microseconds for [`QWEN3_30B_LAYER`].
pub const H200_MOE_SHAPES: [MoeShape; 13] = [
    MoeShape::new(16, 1, 1).goal(9.0, 7.0),
    MoeShape::new(16, 8, 1).goal(14.0, 11.0),
    MoeShape::new(16, 8, 4).goal(14.0, 11.0),
    MoeShape::new(16, 64, 1).goal(18.0, 15.0),
    MoeShape::new(16, 64, 4).goal(32.0, 28.0),
    MoeShape::new(16, 1024, 1).goal(58.0, 50.0),
    MoeShape::new(16, 1024, 4).goal(90.0, 78.0),
    MoeShape::new(32, 64, 4).goal(54.0, 48.0),
    MoeShape::new(32, 1024, 4).goal(120.0, 108.0),
    MoeShape::new(16, 4096, 1),
    MoeShape::new(16, 4096, 4),
    MoeShape::new(32, 4096, 1),
    MoeShape::new(64, 1024, 1),
];

/// What a host is measured by.
pub const HOST_MOE_SHAPES: [MoeShape; 3] = [
    MoeShape::new(16, 1, 1),
    MoeShape::new(16, 8, 4),
    MoeShape::new(16, 64, 4),
];

/// For [`TINY_MOE_LAYER`]: rows that are sorted and rows that are counted.
pub const TINY_MOE_SHAPES: [MoeShape; 2] = [MoeShape::new(16, 3, 2), MoeShape::new(8, 600, 1)];

/// Times of one shape.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeTimes {
    /// What was timed.
    pub shape: MoeShape,
    /// Grouping, gate and up, down: microseconds.
    pub layer_us: f64,
    /// Grouping alone.
    pub group_us: f64,
    /// Gate and up alone.
    pub gate_up_us: f64,
    /// Down alone.
    pub down_us: f64,
    /// What the two launches move.
    pub bytes: BytesMoved,
}

/// Times of several shapes on one device. Goals are shown for the device that they are for.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeTable {
    /// The device's own name.
    pub device: String,
    /// A line for each shape.
    pub lines: Vec<MoeTimes>,
}

impl MoeTable {
    /// An empty table for what is measured on `device`.
    pub fn new(device: &BenchDevice) -> Self {
        Self {
            device: device.backend().caps().name.clone(),
            lines: Vec::new(),
        }
    }

    /// The floor of `times` on this device, microseconds.
    pub fn floor_us(&self, times: &MoeTimes) -> Option<f64> {
        Some(times.bytes.floor() as f64 / copy_bandwidth(&self.device)?)
    }

    /// What `times` should be, where that is known for this device.
    pub fn goal(&self, times: &MoeTimes) -> Option<TimeGoal> {
        times.shape.goal.filter(|_| self.device.contains("H200"))
    }

    fn cells(&self, times: &MoeTimes) -> Vec<String> {
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.1}"));
        let goal = self.goal(times);
        let mut cells = vec![times.shape.to_string()];
        let values = [
            Some(times.layer_us),
            goal.map(|goal| goal.reach),
            goal.map(|goal| goal.aim),
            self.floor_us(times),
            Some(times.bytes.floor() as f64 / times.layer_us / 1e3),
            Some(times.group_us),
            Some(times.gate_up_us),
            Some(times.down_us),
        ];
        cells.extend(values.map(number));
        cells
    }
}

impl fmt::Display for MoeTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headings = [
            "experts",
            "us",
            "reach",
            "aim",
            "floor us",
            "GB/s",
            "group us",
            "gate_up us",
            "down us",
        ];
        let mut rows = vec![headings.map(str::to_owned).to_vec()];
        rows.extend(self.lines.iter().map(|times| self.cells(times)));
        writeln!(f, "{}", self.device)?;
        grid(f, &rows)
    }
}
