//! A batch with everything in it, and the one way to run it.

use super::naive::Judge;
use super::{DeviceBatch, Fill, Rng, TestAdapter, TestBackend, Verdict, naive_delta};
use crate::{Applied, LaunchOptions, Stream};
use half::bf16;

/// Sizes of one site of a [`Batch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SiteShape {
    /// Width of out.
    pub n_out: u32,
    /// Elements from one row of out to the next, less `n_out`.
    pub gap: u32,
    /// Largest rank, before padding.
    pub max_rank: u32,
}

/// What a random [`Batch`] is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchShape {
    /// Seed of all its values.
    pub seed: u64,
    /// How values relate.
    pub fill: Fill,
    /// Width of x.
    pub k_in: u32,
    /// Elements from one row of x to the next, less `k_in`.
    pub x_gap: u32,
    /// Slots of the tables.
    pub slots: u32,
    /// Ranks that adapters have, in turn, at most each site's largest.
    pub ranks: Vec<u32>,
    /// The sites.
    pub sites: Vec<SiteShape>,
}

impl BatchShape {
    /// One site, one slot, no gaps: the plainest batch.
    pub fn single(seed: u64, rank: u32, (k_in, n_out): (u32, u32)) -> Self {
        Self {
            seed,
            fill: Fill::Signed,
            k_in,
            x_gap: 0,
            slots: 1,
            ranks: vec![rank],
            sites: vec![SiteShape {
                n_out,
                gap: 0,
                max_rank: rank,
            }],
        }
    }
}

/// Rows, their slots, and every slot's adapter at every site.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// What it was made from.
    pub shape: BatchShape,
    /// The slot of each row, as launches get it.
    pub row_slots: Vec<i32>,
    /// `[rows, k_in + x_gap]`; gaps are NaN, so that reading one shows.
    pub x: Vec<bf16>,
    /// For each site `[rows, n_out + gap]`: what out holds before.
    pub base: Vec<Vec<bf16>>,
    /// For each site, for each slot: the adapter, or `None` where the slot does not adapt it.
    pub adapters: Vec<Vec<Option<TestAdapter>>>,
}

/// Which launcher, and how rows are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Via {
    /// [`apply_lora_delta`](crate::apply_lora_delta) with slot 0's adapters, whatever the rows' slots.
    Pair,
    /// [`apply_lora_bgmv`](crate::apply_lora_bgmv), grouped on the device.
    Routed,
    /// [`apply_lora_bgmv`](crate::apply_lora_bgmv), grouped on the host.
    RoutedByHost,
    /// [`apply_lora_bgmv`](crate::apply_lora_bgmv), grouped on the device as the rows of a MoE block are.
    RoutedSpread,
}

impl Batch {
    /// A batch whose rows have the given slots. Every third adapter of a site after the first is absent.
    pub fn random(shape: &BatchShape, row_slots: &[i32]) -> Self {
        let mut rng = Rng::new(shape.seed);
        let rows = row_slots.len();
        let adapters = shape.sites.iter().enumerate().map(|(site, sizes)| {
            let slots = (0..shape.slots as usize).map(|slot| {
                let absent = site > 0 && (slot + site) % 3 == 0;
                let rank = shape.ranks[(slot + site) % shape.ranks.len()].min(sizes.max_rank);
                let dims = (shape.k_in, sizes.n_out);
                (!absent).then(|| TestAdapter::random(&mut rng, shape.fill, rank, dims))
            });
            slots.collect()
        });
        let adapters = adapters.collect();
        let x = padded_rows(&mut rng, shape.fill, (rows, shape.k_in, shape.x_gap));
        let base = shape
            .sites
            .iter()
            .map(|site| padded_rows(&mut rng, Fill::Signed, (rows, site.n_out, site.gap)))
            .collect();
        Self {
            shape: shape.clone(),
            row_slots: row_slots.to_vec(),
            x,
            base,
            adapters,
        }
    }

    /// The batch of only some of its rows, in the given order.
    pub fn select(&self, rows: &[usize]) -> Self {
        let pick = |values: &[bf16], stride: usize| -> Vec<bf16> {
            rows.iter()
                .flat_map(|&row| values[row * stride..][..stride].iter().copied())
                .collect()
        };
        let strides = self
            .shape
            .sites
            .iter()
            .map(|site| (site.n_out + site.gap) as usize);
        Self {
            shape: self.shape.clone(),
            row_slots: rows.iter().map(|&row| self.row_slots[row]).collect(),
            x: pick(&self.x, self.x_stride()),
            base: self
                .base
                .iter()
                .zip(strides)
                .map(|(base, stride)| pick(base, stride))
                .collect(),
            adapters: self.adapters.clone(),
        }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.row_slots.len()
    }

    /// Elements from one row of x to the next.
    pub fn x_stride(&self) -> usize {
        (self.shape.k_in + self.shape.x_gap) as usize
    }

    /// Row `row` of a site's values, without the gap.
    pub fn row_of<'a>(&self, site: usize, values: &'a [bf16], row: usize) -> &'a [bf16] {
        let sizes = &self.shape.sites[site];
        let stride = (sizes.n_out + sizes.gap) as usize;
        &values[row * stride..][..sizes.n_out as usize]
    }

    /// The adapter of a row at a site.
    pub fn adapter_of(&self, site: usize, row: usize, via: Via) -> Option<&TestAdapter> {
        let slot = match via {
            Via::Pair => 0,
            _ => usize::try_from(self.row_slots[row]).ok()?,
        };
        self.adapters[site].get(slot)?.as_ref()
    }

    /// Applies it on `backend` and gives each site's out, gaps included.
    pub fn run(&self, backend: &TestBackend, via: Via, options: LaunchOptions) -> Vec<Vec<bf16>> {
        let mut device = DeviceBatch::new(backend, self, via, options);
        device.group(Stream::OWN);
        let _: Applied = device.launch(Stream::OWN);
        device.outs()
    }

    /// Compares outputs with the naive reference. Rows without an adapter, and gaps, must have kept their bits.
    pub fn judge(&self, via: Via, outs: &[Vec<bf16>]) -> Verdict {
        let mut judge = Judge::default();
        for (site, (base, out)) in self.base.iter().zip(outs).enumerate() {
            self.check_gaps(site, base, out);
            for row in 0..self.rows() {
                let (base, out) = (self.row_of(site, base, row), self.row_of(site, out, row));
                match self.adapter_of(site, row, via) {
                    None => assert!(
                        same_bits(base, out),
                        "{}: base row {row} changed",
                        self.describe()
                    ),
                    Some(adapter) => {
                        let x = &self.x[row * self.x_stride()..][..self.shape.k_in as usize];
                        judge.row(base, out, &naive_delta(x, adapter));
                    }
                }
            }
        }
        judge.verdict()
    }

    /// Runs it and asserts that it is right.
    pub fn assert_correct(&self, backend: &TestBackend, via: Via) {
        let verdict = self.judge(via, &self.run(backend, via, LaunchOptions::default()));
        assert!(verdict.passes(), "{} {via:?}: {verdict:?}", self.describe());
    }

    /// Its sizes, for messages.
    pub fn describe(&self) -> String {
        format!("{} rows of {:?}", self.rows(), self.shape)
    }

    fn check_gaps(&self, site: usize, base: &[bf16], out: &[bf16]) {
        let sizes = &self.shape.sites[site];
        let (n, stride) = (sizes.n_out as usize, (sizes.n_out + sizes.gap) as usize);
        for (base, out) in base.chunks(stride).zip(out.chunks(stride)) {
            assert!(
                same_bits(&base[n..], &out[n..]),
                "{}: gap written",
                self.describe()
            );
        }
    }
}

/// Random rows with gaps of NaN between them.
fn padded_rows(rng: &mut Rng, fill: Fill, (rows, cols, gap): (usize, u32, u32)) -> Vec<bf16> {
    let mut values = Vec::with_capacity(rows * (cols + gap) as usize);
    for _ in 0..rows {
        values.extend(rng.values(cols as usize, fill, 1.0));
        values.extend(std::iter::repeat_n(bf16::NAN, gap as usize));
    }
    values
}

/// Whether two rows are the same to the bit.
pub(super) fn same_bits(a: &[bf16], b: &[bf16]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}
