//! A batch on a device, to launch as often as one likes.

use super::{Batch, DeviceAdapter, DeviceTables, SiteShape, TestAdapter, TestBackend, Via};
use crate::{
    Applied, DeviceBuffer, KernelError, LaunchContext, LaunchOptions, LoraKernels, MatMut, MatRef,
    PairSite, RouteSite, RoutedX, RowGroups, RowGroupsSpec, Scratch, ScratchSpec, SiteKind, Stream,
    apply_lora_bgmv, apply_lora_delta,
};
use half::bf16;
use lora_weights::device::{DeviceMemory, LoraPair};
use lora_weights::padded_rank;
use std::sync::Arc;

/// A [`Batch`] uploaded, with everything a launch needs allocated. Its methods panic where the backend gives an error.
pub struct DeviceBatch<'a> {
    batch: &'a Batch,
    via: Via,
    kernels: LoraKernels,
    scratch: Scratch,
    groups: RowGroups,
    row_slots: DeviceBuffer,
    x: DeviceBuffer,
    outs: Vec<DeviceBuffer>,
    /// By site and slot; they own what the tables point to.
    adapters: Vec<Vec<Option<DeviceAdapter>>>,
    tables: Vec<DeviceTables>,
}

impl<'a> DeviceBatch<'a> {
    /// Uploads `batch`, with out at its base, and scratch for all its rows.
    pub fn new(backend: &TestBackend, batch: &'a Batch, via: Via, options: LaunchOptions) -> Self {
        let sites = &batch.shape.sites;
        let scratch = ScratchSpec {
            max_rows: batch.rows() as u32,
            max_rank: sites.iter().map(|s| s.max_rank).max().unwrap_or(1),
            max_sites: sites.len().clamp(1, crate::MAX_SITES) as u32,
            max_k_in: batch.shape.k_in,
        };
        Self::with_scratch(backend, batch, via, (options, scratch))
    }

    /// The same with scratch of another size.
    pub fn with_scratch(
        backend: &TestBackend,
        batch: &'a Batch,
        via: Via,
        (options, scratch): (LaunchOptions, ScratchSpec),
    ) -> Self {
        let upload = || -> Result<Self, KernelError> {
            let memory = || Arc::clone(backend) as Arc<dyn DeviceMemory>;
            let buffer = |values: &[bf16]| DeviceBuffer::from_slice(memory(), values);
            let adapters = upload_adapters(&memory(), batch)?;
            let tables = adapters.iter().zip(&batch.shape.sites);
            let tables = tables
                .map(|(slots, site)| upload_tables(&memory(), slots, (batch.shape.k_in, site)));
            let spec = match via {
                Via::RoutedSpread => RowGroupsSpec::experts,
                _ => RowGroupsSpec::new,
            };
            let rows = batch.rows().max(1) as u32;
            let groups = spec(rows, batch.shape.slots, options.gemv_max_m);
            Ok(Self {
                x: buffer(&batch.x)?,
                outs: batch
                    .base
                    .iter()
                    .map(|base| buffer(base))
                    .collect::<Result<_, _>>()?,
                row_slots: DeviceBuffer::from_slice(memory(), &batch.row_slots)?,
                groups: RowGroups::new(memory(), groups)?,
                scratch: Scratch::new(memory(), scratch)?,
                kernels: LoraKernels::new(Arc::clone(backend), options),
                tables: tables.collect::<Result<_, _>>()?,
                adapters,
                batch,
                via,
            })
        };
        upload().expect("upload a batch")
    }

    /// Sets out to the base again.
    pub fn reset(&mut self) {
        for (out, base) in self.outs.iter_mut().zip(&self.batch.base) {
            out.upload(0, base).expect("upload out");
        }
    }

    /// Replaces the slots of its rows in the device buffer, for the next [`group`](Self::group) or graph replay.
    pub fn set_row_slots(&mut self, row_slots: &[i32]) {
        self.row_slots.upload(0, row_slots).expect("upload slots");
    }

    /// Groups the rows the way [`Via`] says; a pair needs none.
    pub fn group(&mut self, stream: Stream) {
        let grouped = match self.via {
            Via::Pair => Ok(()),
            Via::RoutedByHost => self.groups.build_host(&self.batch.row_slots),
            Via::Routed | Via::RoutedSpread => self
                .row_slots
                .row_slots(self.batch.rows())
                .and_then(|slots| self.groups.build(&**self.kernels.backend(), stream, slots)),
        };
        grouped.expect("group rows");
    }

    /// Enqueues the deltas, and nothing else.
    pub fn launch(&mut self, stream: Stream) -> Applied {
        let (rows, k_in) = (self.batch.rows(), self.batch.shape.k_in as usize);
        let x = self.x.mat(rows, k_in, self.batch.x_stride()).expect("x");
        let outs = self.outs.iter_mut().zip(&self.batch.shape.sites);
        let outs = outs.map(|(out, site)| out_of(out, rows, site));
        let mut ctx = LaunchContext {
            kernels: &self.kernels,
            stream,
            scratch: &mut self.scratch,
        };
        let applied = if self.via == Via::Pair {
            let pairs = self.adapters.iter().map(|slots| slots[0].as_ref());
            let mut sites: Vec<_> = outs
                .zip(pairs)
                .filter_map(|(out, adapter)| {
                    Some(PairSite {
                        pair: adapter?.pair,
                        out,
                    })
                })
                .collect();
            apply_lora_delta(&mut ctx, SiteKind::Attention, x, &mut sites)
        } else {
            let mut sites: Vec<_> = outs
                .zip(&self.tables)
                .map(|(out, tables)| RouteSite {
                    route: tables.route(),
                    out,
                })
                .collect();
            apply_lora_bgmv(&mut ctx, SiteKind::Attention, x, &self.groups, &mut sites)
        };
        applied.expect("launch")
    }

    /// Enqueues the deltas of the first site with another x than the batch's own; not for pairs.
    pub fn launch_with(&mut self, stream: Stream, x: RoutedX<'_>) -> Applied {
        let out = out_of(
            &mut self.outs[0],
            self.batch.rows(),
            &self.batch.shape.sites[0],
        );
        let route = self.tables[0].route();
        let mut ctx = LaunchContext {
            kernels: &self.kernels,
            stream,
            scratch: &mut self.scratch,
        };
        let mut sites = [RouteSite { route, out }];
        apply_lora_bgmv(&mut ctx, SiteKind::Expert, x, &self.groups, &mut sites).expect("launch")
    }

    /// What every site's out holds once the backend's own stream is done.
    pub fn outs(&self) -> Vec<Vec<bf16>> {
        let backend = self.kernels.backend();
        backend.synchronize(Stream::OWN).expect("synchronize");
        let outs = self.outs.iter().zip(&self.batch.base);
        outs.map(|(out, base)| out.download(0, base.len()).expect("download out"))
            .collect()
    }

    /// Its x.
    pub fn x(&self) -> MatRef<'_> {
        let (rows, k_in) = (self.batch.rows(), self.batch.shape.k_in as usize);
        self.x.mat(rows, k_in, self.batch.x_stride()).expect("x")
    }
}

fn out_of<'b>(out: &'b mut DeviceBuffer, rows: usize, site: &SiteShape) -> MatMut<'b> {
    let (n, stride) = (site.n_out as usize, (site.n_out + site.gap) as usize);
    out.mat_mut(rows, n, stride).expect("out")
}

fn upload_adapters(
    memory: &Arc<dyn DeviceMemory>,
    batch: &Batch,
) -> Result<Vec<Vec<Option<DeviceAdapter>>>, KernelError> {
    let upload = |slot: &Option<TestAdapter>| {
        slot.as_ref()
            .map(|adapter| adapter.upload(memory))
            .transpose()
    };
    let sites = batch.adapters.iter();
    sites
        .map(|slots| slots.iter().map(upload).collect())
        .collect()
}

fn upload_tables(
    memory: &Arc<dyn DeviceMemory>,
    slots: &[Option<DeviceAdapter>],
    (k_in, site): (u32, &SiteShape),
) -> Result<DeviceTables, KernelError> {
    let pair = |slot: &Option<DeviceAdapter>| slot.as_ref().map(|adapter| adapter.pair);
    let pairs: Vec<Option<LoraPair>> = slots.iter().map(pair).collect();
    DeviceTables::upload(
        memory,
        &pairs,
        (k_in, site.n_out, padded_rank(site.max_rank)),
    )
}
