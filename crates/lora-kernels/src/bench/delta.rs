//! A layer's deltas on a device, to check and to time.

use super::data::{Matrix, Projection, cold_copies};
use super::{BenchDevice, DeltaShape, DeltaTimes, LayerSite, Work};
use crate::testing::{Fill, Rng, TestAdapter, Verdict, naive::Judge, naive_delta};
use crate::{
    DeviceBuffer, KernelError, LaunchContext, LaunchOptions, LoraKernels, MAX_SITES, RowGroups,
    RowGroupsSpec, Scratch, ScratchSpec, SiteKind, Stream, apply_lora_bgmv,
};
use arrayvec::ArrayVec;
use half::bf16;
use lora_weights::device::DeviceMemory;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Rows of each site that are compared with the reference.
const CHECKED_ROWS: usize = 12;

/// Groupings in one timed graph: one alone is too short for the events' resolution.
const GROUPINGS: u32 = 20;

/// Calls whose host time is taken, of which each is two kernels: fewer than a stream takes before it makes the host wait.
const HOST_CALLS: usize = 200;

/// A [`DeltaShape`] with its rows, its copies of adapters and everything launches need, on a device.
pub struct DeltaBench<'d> {
    device: &'d BenchDevice,
    shape: DeltaShape,
    layer: &'d [LayerSite],
    copies: usize,
    kernels: LoraKernels,
    scratch: Scratch,
    groups: RowGroups,
    row_slots: DeviceBuffer,
    sites: Vec<Site>,
}

/// Projections that read the same x.
struct Site {
    x: Matrix,
    outs: Vec<Projection>,
}

impl<'d> DeltaBench<'d> {
    /// Makes random rows and adapters, uploads them, and groups the rows.
    ///
    /// # Errors
    /// What allocation and upload give.
    pub fn new(
        device: &'d BenchDevice,
        shape: DeltaShape,
        layer: &'d [LayerSite],
    ) -> Result<Self, KernelError> {
        let backend = device.backend();
        let memory = || Arc::clone(backend) as Arc<dyn DeviceMemory>;
        let copies = cold_copies(shape.bytes(layer), backend.caps().l2_bytes);
        let options = LaunchOptions::default();
        let groups = RowGroupsSpec::new(shape.rows, shape.adapters, options.gemv_max_m);
        let scratch = ScratchSpec {
            max_rows: shape.rows,
            max_rank: shape.pool_rank,
            max_sites: MAX_SITES as u32,
            max_k_in: layer.iter().map(|site| site.k_in).max().unwrap_or(1),
        };
        let row_slots: Vec<i32> = (0..shape.rows)
            .map(|row| (row % shape.adapters) as i32)
            .collect();
        let mut rng = Rng::new(u64::from(shape.rank));
        let sites = layer
            .iter()
            .map(|site| upload_site(&memory(), &mut rng, (&shape, site), copies));
        let mut bench = Self {
            sites: sites.collect::<Result<_, _>>()?,
            kernels: LoraKernels::new(Arc::clone(backend), options),
            scratch: Scratch::new(memory(), scratch)?,
            groups: RowGroups::new(memory(), groups)?,
            row_slots: DeviceBuffer::from_slice(memory(), &row_slots)?,
            device,
            shape,
            layer,
            copies,
        };
        bench.group(Stream::OWN)?;
        backend.synchronize(Stream::OWN)?;
        Ok(bench)
    }

    /// Layers that [`work`](Self::work) runs: one for each copy of the adapters.
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// Applies the first and the last copy to the first out, and compares rows of every projection with the reference.
    ///
    /// # Errors
    /// What launching gives.
    pub fn check(&mut self) -> Result<Verdict, KernelError> {
        let mut judge = Judge::default();
        let mut copies = vec![0, self.copies - 1];
        copies.dedup();
        for copy in copies {
            for out in self.sites.iter_mut().flat_map(|site| &mut site.outs) {
                out.reset()?;
            }
            self.enqueue(0..self.sites.len(), copy, Stream::OWN)?;
            self.device.backend().synchronize(Stream::OWN)?;
            self.judge(&mut judge)?;
        }
        Ok(judge.verdict())
    }

    fn judge(&self, judge: &mut Judge) -> Result<(), KernelError> {
        let rows = self.shape.rows as usize;
        let step = rows.div_ceil(CHECKED_ROWS).max(1);
        for site in &self.sites {
            for Projection { out, adapters, .. } in &site.outs {
                for row in (0..rows).step_by(step) {
                    let expected = naive_delta(site.x.row(row), &adapters[row % adapters.len()]);
                    let found: Vec<bf16> = out.buffer.download(row * out.cols, out.cols)?;
                    judge.row(out.row(row), &found, &expected);
                }
            }
        }
        Ok(())
    }

    /// The given sites of every copy, in the order of the copies.
    ///
    /// # Errors
    /// What launching gives.
    pub fn work(&mut self, sites: Range<usize>) -> Result<Work<'_>, KernelError> {
        let copies = self.copies;
        self.device.record(move |stream| {
            (0..copies).try_for_each(|copy| self.enqueue(sites.clone(), copy, stream))
        })
    }

    /// Times the layer, each of its sites, the grouping of rows, and the host's share of a launch: medians of `runs` runs.
    ///
    /// # Errors
    /// What launching gives.
    pub fn measure(&mut self, runs: usize) -> Result<DeltaTimes, KernelError> {
        let group_us = self.group_work()?.median_us(runs)? / f64::from(GROUPINGS);
        let host_ns = self.host_ns()?;
        let copies = self.copies as f64;
        let layer_us = self.work(0..self.sites.len())?.median_us(runs)? / copies;
        let mut site_us = Vec::new();
        for (index, site) in self.layer.iter().enumerate() {
            let us = self.work(index..index + 1)?.median_us(runs)? / copies;
            site_us.push((site.name, us));
        }
        Ok(DeltaTimes {
            shape: self.shape,
            layer_us,
            site_us,
            bytes: self.shape.bytes(self.layer),
            group_us,
            host_ns,
        })
    }

    fn group_work(&mut self) -> Result<Work<'_>, KernelError> {
        self.device
            .record(|stream| (0..GROUPINGS).try_for_each(|_| self.group(stream)))
    }

    fn group(&mut self, stream: Stream) -> Result<(), KernelError> {
        let slots = self.row_slots.row_slots(self.shape.rows as usize)?;
        self.groups.build(&**self.kernels.backend(), stream, slots)
    }

    /// The host's share of a call, nanoseconds, where launches only enqueue.
    fn host_ns(&mut self) -> Result<Option<f64>, KernelError> {
        let rounds = HOST_CALLS / self.sites.len().max(1);
        let sites = 0..self.sites.len();
        self.enqueue(sites.clone(), 0, Stream::OWN)?;
        self.device.backend().synchronize(Stream::OWN)?;
        if !self.device.is_asynchronous() {
            return Ok(None);
        }
        let start = Instant::now();
        for round in 0..rounds {
            self.enqueue(sites.clone(), round % self.copies, Stream::OWN)?;
        }
        let taken = start.elapsed();
        self.device.backend().synchronize(Stream::OWN)?;
        Ok(Some(
            taken.as_secs_f64() * 1e9 / (rounds * self.sites.len()) as f64,
        ))
    }

    fn enqueue(
        &mut self,
        sites: Range<usize>,
        copy: usize,
        stream: Stream,
    ) -> Result<(), KernelError> {
        for Site { x, outs } in &mut self.sites[sites] {
            let routes = outs.iter_mut().map(|projection| projection.site(copy));
            let mut routes = routes.collect::<Result<ArrayVec<_, MAX_SITES>, KernelError>>()?;
            let mut ctx = LaunchContext {
                kernels: &self.kernels,
                stream,
                scratch: &mut self.scratch,
            };
            let x = x.view()?;
            apply_lora_bgmv(&mut ctx, SiteKind::Attention, x, &self.groups, &mut routes)?;
        }
        Ok(())
    }
}

fn upload_site(
    memory: &Arc<dyn DeviceMemory>,
    rng: &mut Rng,
    (shape, site): (&DeltaShape, &LayerSite),
    copies: usize,
) -> Result<Site, KernelError> {
    let x = Matrix::random(memory, rng, (shape.rows, site.k_in))?;
    let outs = site.n_outs.iter().map(|&n_out| {
        let adapter = |_| TestAdapter::random(rng, Fill::Signed, shape.rank, (site.k_in, n_out));
        let adapters = (0..shape.adapters).map(adapter).collect();
        let out = Matrix::random(memory, rng, (shape.rows, n_out))?;
        Projection::upload(memory, out, adapters, (shape.pool_rank, copies))
    });
    Ok(Site {
        outs: outs.collect::<Result<_, KernelError>>()?,
        x,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{H200_SHAPES, LLAMA_8B_LAYER, TINY_LAYER, TINY_SHAPES};
    use super::*;
    use crate::host::HostBackend;

    #[test]
    fn a_check_passes_once_and_fails_on_a_delta_added_twice() {
        let device = BenchDevice::host(HostBackend::new());
        for shape in TINY_SHAPES {
            let mut bench = DeltaBench::new(&device, shape, &TINY_LAYER).unwrap();
            assert!(bench.check().unwrap().passes(), "{shape}");
            let sites = 0..bench.sites.len();
            bench.enqueue(sites, 0, Stream::OWN).unwrap();
            let mut judge = Judge::default();
            bench.judge(&mut judge).unwrap();
            assert!(!judge.verdict().passes(), "{shape}");
        }
    }

    #[test]
    fn a_measurement_has_a_time_for_each_site() {
        let device = BenchDevice::host(HostBackend::new());
        let mut bench = DeltaBench::new(&device, TINY_SHAPES[0], &TINY_LAYER).unwrap();
        let times = bench.measure(1).unwrap();
        let names: Vec<&str> = times.site_us.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["qkv", "o", "gate_up", "down"]);
        assert!(times.layer_us > 0.0 && times.group_us > 0.0);
        assert_eq!(times.host_ns, None);
    }

    #[test]
    fn copies_put_four_times_the_cache_between_two_uses() {
        let l2 = 50 << 20;
        for shape in H200_SHAPES {
            let bytes = shape.bytes(&LLAMA_8B_LAYER);
            let copies = cold_copies(bytes, l2);
            let between = (copies as u64 - 1) * bytes.adapters;
            assert!(
                between >= 4 * l2 || bytes.x + bytes.out >= 4 * l2,
                "{shape}"
            );
        }
        let bytes = H200_SHAPES[0].bytes(&LLAMA_8B_LAYER);
        assert_eq!(cold_copies(bytes, 0), 1);
    }
}
