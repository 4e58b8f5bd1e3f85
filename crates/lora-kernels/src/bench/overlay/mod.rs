//! Times of token overlays: building one, and applying them to a batch.

mod apply;
mod build;
mod table;

pub use table::{OverlayReport, OverlayTimes};

use super::{BenchDevice, Work};
use crate::testing::Verdict;
use crate::{KernelError, Stream};
use std::fmt;

/// Rows of random values that tables are filled with, again and again: making a whole vocabulary's would take longer than measuring.
const BLOCK_ROWS: usize = 2048;

/// What of an overlay is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlayWork {
    /// Row diff of two tables, and a gather of the rows that differ.
    Build {
        /// Rows that differ.
        changed: u32,
    },
    /// Embedding rows replaced and BF16 logits computed anew.
    Apply {
        /// Rows of the batch, shared evenly by the adapters.
        rows: u32,
        /// Adapters, each with an overlay of its own.
        adapters: u32,
        /// Ids of each overlay.
        ids: u32,
        /// Where in the vocabulary they are.
        places: IdPlaces,
    },
}

/// Where the ids of an overlay are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdPlaces {
    /// All over the vocabulary, evenly, as the rows that a fine-tune of a whole table changes most: each logit has a line of memory to itself.
    Spread,
    /// The last ones, as added tokens are.
    Last,
}

impl IdPlaces {
    /// The id in the `place`th place of `ids`.
    fn id(self, place: u32, ids: u32, vocab: u32) -> u32 {
        match self {
            Self::Spread => (u64::from(place) * u64::from(vocab) / u64::from(ids)) as u32,
            Self::Last => vocab - ids + place,
        }
    }
}

/// A measurement of overlays of one vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverlayShape {
    /// Rows of the served table.
    pub vocab: u32,
    /// Its columns.
    pub hidden: u32,
    /// What is done.
    pub work: OverlayWork,
}

const fn qwen(work: OverlayWork) -> OverlayShape {
    OverlayShape {
        vocab: 152_064,
        hidden: 4096,
        work,
    }
}

const fn whole(rows: u32) -> OverlayShape {
    qwen(OverlayWork::Apply {
        rows,
        adapters: 1,
        ids: 152_064,
        places: IdPlaces::Spread,
    })
}

/// What an H200 is measured by: a vocabulary of 152 thousand, some ids of it and all.
pub const H200_OVERLAYS: [OverlayShape; 7] = [
    qwen(OverlayWork::Build { changed: 1521 }),
    qwen(OverlayWork::Apply {
        rows: 256,
        adapters: 4,
        ids: 1024,
        places: IdPlaces::Spread,
    }),
    qwen(OverlayWork::Apply {
        rows: 256,
        adapters: 4,
        ids: 1024,
        places: IdPlaces::Last,
    }),
    qwen(OverlayWork::Apply {
        rows: 8,
        adapters: 8,
        ids: 16,
        places: IdPlaces::Spread,
    }),
    whole(1),
    whole(64),
    whole(256),
];

/// What a host is measured by.
pub const HOST_OVERLAYS: [OverlayShape; 2] = [
    OverlayShape {
        vocab: 32_000,
        hidden: 2048,
        work: OverlayWork::Build { changed: 320 },
    },
    OverlayShape {
        vocab: 32_000,
        hidden: 2048,
        work: OverlayWork::Apply {
            rows: 16,
            adapters: 4,
            ids: 256,
            places: IdPlaces::Spread,
        },
    },
];

/// Sizes that take no time: whether everything runs, not how fast.
pub const TINY_OVERLAYS: [OverlayShape; 3] = [
    OverlayShape {
        vocab: 500,
        hidden: 64,
        work: OverlayWork::Build { changed: 7 },
    },
    OverlayShape {
        vocab: 500,
        hidden: 64,
        work: OverlayWork::Apply {
            rows: 9,
            adapters: 3,
            ids: 20,
            places: IdPlaces::Spread,
        },
    },
    OverlayShape {
        vocab: 500,
        hidden: 64,
        work: OverlayWork::Apply {
            rows: 3,
            adapters: 1,
            ids: 500,
            places: IdPlaces::Spread,
        },
    },
];

impl OverlayShape {
    /// Names of its two launches.
    pub fn parts(&self) -> [&'static str; 2] {
        match self.work {
            OverlayWork::Build { .. } => ["row diff", "gather"],
            OverlayWork::Apply { .. } => ["embedding", "head"],
        }
    }

    /// Bytes that no implementation can go below: what it reads and writes, once.
    pub fn floor_bytes(&self) -> u64 {
        let row = u64::from(self.hidden) * 2;
        match self.work {
            OverlayWork::Build { changed } => {
                2 * u64::from(self.vocab) * row + 2 * u64::from(changed) * row
            }
            OverlayWork::Apply {
                rows,
                adapters,
                ids,
                ..
            } => {
                let (rows, ids) = (u64::from(rows), u64::from(ids));
                let overlays = u64::from(adapters) * ids * row;
                // Embedding rows read and written, hidden rows read, logits written.
                overlays + 3 * rows * row + rows * ids * 2
            }
        }
    }

    /// Multiplications and additions.
    pub fn flops(&self) -> u64 {
        match self.work {
            OverlayWork::Build { .. } => 0,
            OverlayWork::Apply { rows, ids, .. } => {
                2 * u64::from(rows) * u64::from(ids) * u64::from(self.hidden)
            }
        }
    }

    /// What it should take at most where a large copy moves `bandwidth` bytes a microsecond: once and a half the floor, and for launches that are
    /// over sooner than that 4 us more. A product of a whole table is not bound by bytes and has none.
    pub fn reach_us(&self, bandwidth: f64) -> Option<f64> {
        let floor = self.floor_bytes() as f64 / bandwidth;
        match self.work {
            OverlayWork::Build { .. } => Some(1.5 * floor),
            OverlayWork::Apply { ids, .. } => (ids < self.vocab).then_some(1.5 * floor + 4.0),
        }
    }
}

impl fmt::Display for OverlayShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.work {
            OverlayWork::Build { changed } => write!(f, "build, {changed} rows differ")?,
            OverlayWork::Apply {
                rows,
                adapters,
                ids,
                places,
            } => {
                let which = match places {
                    IdPlaces::Spread => "",
                    IdPlaces::Last => "the last ",
                };
                write!(f, "apply, {rows} rows, {adapters} of {which}{ids} ids")?;
            }
        }
        write!(f, ", {} x {}", self.vocab, self.hidden)
    }
}

/// One kind of work on the device: its two launches.
trait Launches {
    /// Copies of its data, so that each is cold when its turn comes again.
    fn copies(&self) -> usize;

    /// Enqueues launch `part` on copy `copy`.
    fn enqueue(&mut self, part: usize, copy: usize, stream: Stream) -> Result<(), KernelError>;

    /// Runs both and compares with the reference.
    fn check(&mut self) -> Result<Verdict, KernelError>;
}

/// An [`OverlayShape`] with its tables and rows on a device.
pub struct OverlayBench<'d> {
    device: &'d BenchDevice,
    shape: OverlayShape,
    launches: Box<dyn Launches>,
}

impl<'d> OverlayBench<'d> {
    /// Makes random tables and uploads them.
    ///
    /// # Errors
    /// What allocation and upload give.
    pub fn new(device: &'d BenchDevice, shape: OverlayShape) -> Result<Self, KernelError> {
        let launches: Box<dyn Launches> = match shape.work {
            OverlayWork::Build { changed } => {
                Box::new(build::Build::new(device.backend(), shape, changed)?)
            }
            OverlayWork::Apply { .. } => Box::new(apply::Apply::new(device.backend(), shape)?),
        };
        Ok(Self {
            device,
            shape,
            launches,
        })
    }

    /// Runs it once and compares: distances and copies exactly, some logits at a tolerance.
    ///
    /// # Errors
    /// What launching gives.
    pub fn check(&mut self) -> Result<Verdict, KernelError> {
        self.launches.check()
    }

    /// Times both launches together and each alone: medians of `runs` runs.
    ///
    /// # Errors
    /// What launching gives.
    pub fn measure(&mut self, runs: usize) -> Result<OverlayTimes, KernelError> {
        let [first, second] = self.shape.parts();
        Ok(OverlayTimes {
            shape: self.shape,
            us: self.part_us(&[0, 1], runs)?,
            parts: [
                (first, self.part_us(&[0], runs)?),
                (second, self.part_us(&[1], runs)?),
            ],
        })
    }

    fn part_us(&mut self, parts: &[usize], runs: usize) -> Result<f64, KernelError> {
        let copies = self.launches.copies() as f64;
        Ok(self.work(parts)?.median_us(runs)? / copies)
    }

    fn work(&mut self, parts: &[usize]) -> Result<Work<'_>, KernelError> {
        let Self {
            device, launches, ..
        } = self;
        let parts = parts.to_vec();
        device.record(move |stream| {
            for copy in 0..launches.copies() {
                for &part in &parts {
                    launches.enqueue(part, copy, stream)?;
                }
            }
            Ok(())
        })
    }
}

/// Whether two rows are the same, as a verdict: nothing off, or infinitely much.
fn exact(same: bool) -> Verdict {
    Verdict {
        worst: if same { 0.0 } else { f64::INFINITY },
        rms: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostBackend;

    #[test]
    fn checks_pass_and_measurements_have_both_parts() {
        let device = BenchDevice::host(HostBackend::new());
        for shape in TINY_OVERLAYS {
            let mut bench = OverlayBench::new(&device, shape).unwrap();
            let verdict = bench.check().unwrap();
            assert!(verdict.passes(), "{shape}: {verdict:?}");
            let times = bench.measure(1).unwrap();
            assert_eq!(times.parts.map(|(name, _)| name), shape.parts());
            assert!(times.us > 0.0);
        }
    }

    #[test]
    fn ids_are_different_ones_of_the_vocabulary() {
        for (places, first, last) in [(IdPlaces::Spread, 0, 666), (IdPlaces::Last, 997, 999)] {
            let ids: Vec<u32> = (0..3).map(|place| places.id(place, 3, 1000)).collect();
            assert!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
            assert_eq!((ids[0], ids[2]), (first, last));
        }
        let [_, spread, last, ..] = H200_OVERLAYS.map(|shape| shape.to_string());
        assert_eq!(spread, "apply, 256 rows, 4 of 1024 ids, 152064 x 4096");
        assert_eq!(
            last,
            "apply, 256 rows, 4 of the last 1024 ids, 152064 x 4096"
        );
    }

    #[test]
    fn a_floor_counts_every_byte_once() {
        let [build, apply, ..] = H200_OVERLAYS;
        assert_eq!(build.floor_bytes(), 2 * (152_064 + 1521) * 8192);
        let (overlays, rows) = (4 * 1024 * 8192, 256 * 8192);
        assert_eq!(apply.floor_bytes(), overlays + 3 * rows + 256 * 1024 * 2);
        assert_eq!(apply.flops(), 2 * 256 * 1024 * 4096);
        let whole = H200_OVERLAYS[6];
        assert_eq!(whole.reach_us(4.3e6), None);
    }
}
