//! One pool, one batch a projection: the rows of every case and base rows, each through its own adapter.

use super::case::Case;
use super::compare::{Factors, Worst};
use super::golden::GoldenSite;
use crate::CliError;
use crate::options::LoadOptions;
use half::bf16;
use lora_runtime::config::{Levers, ModelSpec};
use lora_runtime::kernels::{DeviceBuffer, LoraBackend, Scratch, SiteKind, Stream};
use lora_runtime::weights::{BASE_SLOT, LoraTarget};
use lora_runtime::{LoraRuntime, ModuleOut, RuntimeError, RuntimeOptions};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Where and how to verify.
pub struct Setup<'a> {
    /// Device.
    pub backend: Arc<dyn LoraBackend>,
    /// What may load.
    pub options: &'a LoadOptions,
    /// Levers as read from the environment.
    pub levers: &'a Levers,
}

/// One recorded module of one case.
#[derive(Debug, Clone)]
pub struct ModuleResult {
    /// Path of the module.
    pub path: String,
    /// Global layer index.
    pub layer: usize,
    /// The module inside the layer.
    pub target: LoraTarget,
    /// Rows compared.
    pub rows: usize,
    /// The element furthest from what was recorded.
    pub worst: Worst,
}

/// All recorded modules of one case.
#[derive(Debug, Clone, Default)]
pub struct CaseResult {
    /// Modules compared, by layer.
    pub modules: Vec<ModuleResult>,
}

impl CaseResult {
    /// The module whose worst element lies furthest.
    pub fn worst(&self) -> Option<&ModuleResult> {
        self.modules
            .iter()
            .max_by(|a, b| a.worst.fraction.total_cmp(&b.worst.fraction))
    }

    /// Whether every element is within its tolerance.
    pub fn passes(&self) -> bool {
        self.modules.iter().all(|module| module.worst.passes())
    }
}

/// What became of the rows without an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BaseRows {
    /// Rows.
    pub rows: usize,
    /// Rows of which a bit changed.
    pub changed: usize,
}

/// A row of a batch: what it is made of and whose adapter it takes.
#[derive(Debug, Clone, Copy)]
struct Row {
    /// Position of the case, and of the recorded row in its site.
    source: (usize, usize),
    /// Takes no adapter.
    is_base: bool,
}

/// Recorded sites of one projection, by the position of their case.
type Recorded<'a> = BTreeMap<usize, &'a GoldenSite>;

/// Loads the adapters of `cases`, all of one base model, into one pool and compares every recorded projection. Results
/// are in the order of `cases`.
///
/// # Errors
/// A pool or a launch that is refused.
pub fn verify_together(
    setup: &Setup<'_>,
    cases: &[&Case],
) -> Result<(Vec<CaseResult>, BaseRows), CliError> {
    let mut results = vec![CaseResult::default(); cases.len()];
    let mut base = BaseRows::default();
    let Some(pool) = Pool::load(setup, cases)? else {
        return Ok((results, base));
    };
    let mut projections: BTreeMap<(usize, LoraTarget), Vec<(usize, &GoldenSite)>> = BTreeMap::new();
    for (position, case) in cases
        .iter()
        .enumerate()
        .filter(|(_, case)| case.adapter.is_some())
    {
        for site in &case.golden.sites {
            projections
                .entry((site.layer, site.target))
                .or_default()
                .push((position, site));
        }
    }
    for ((layer, target), sites) in projections {
        let recorded: Recorded<'_> = sites.into_iter().collect();
        let rows = interleave(&recorded);
        let got = pool.apply(layer, target, &recorded, &rows)?;
        for (row, values) in rows.iter().zip(&got).filter(|(row, _)| row.is_base) {
            base.rows += 1;
            let untouched = recorded[&row.source.0].base.row_bf16(row.source.1);
            base.changed += usize::from(
                !untouched
                    .map(bf16::to_bits)
                    .eq(values.iter().map(|v| v.to_bits())),
            );
        }
        for (position, site) in recorded {
            let factors = cases[position].factors(layer, target);
            let own = rows
                .iter()
                .zip(&got)
                .filter(|(row, _)| !row.is_base && row.source.0 == position);
            let worst = worst_of(
                site,
                factors.as_ref(),
                own.map(|(row, values)| (row.source.1, values.as_slice())),
            );
            let rows = site.x.shape().0;
            results[position]
                .modules
                .extend(worst.map(|worst| ModuleResult {
                    path: site.path.clone(),
                    layer,
                    target,
                    rows,
                    worst,
                }));
        }
    }
    Ok((results, base))
}

/// Row r of every site, then a base row made of the first of them, and so on.
fn interleave(recorded: &Recorded<'_>) -> Vec<Row> {
    let most = recorded
        .values()
        .map(|site| site.x.shape().0)
        .max()
        .unwrap_or(0);
    let mut rows = Vec::new();
    for at in 0..most {
        let first = rows.len();
        let with_row = recorded.iter().filter(|(_, site)| at < site.x.shape().0);
        rows.extend(with_row.map(|(position, _)| Row {
            source: (*position, at),
            is_base: false,
        }));
        rows.push(Row {
            is_base: true,
            ..rows[first]
        });
    }
    rows
}

/// The furthest of a site's own rows.
fn worst_of<'a>(
    site: &GoldenSite,
    factors: Option<&Factors>,
    rows: impl Iterator<Item = (usize, &'a [bf16])>,
) -> Option<Worst> {
    let of_row = |(row, values): (usize, &[bf16])| {
        let got: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
        let magnitude = factors
            .map(|f| f.magnitude(site.x.row(row)))
            .unwrap_or_default();
        Worst::of_row(row, &got, site.base.row(row), site.out.row(row), &magnitude)
    };
    rows.filter_map(of_row).reduce(Worst::further)
}

/// The adapters of all cases in one pool.
struct Pool {
    runtime: LoraRuntime,
    /// Slot of each case.
    slots: Vec<Option<u32>>,
    most_rows: u32,
}

impl Pool {
    /// `None` where no case has an adapter that loads.
    fn load(setup: &Setup<'_>, cases: &[&Case]) -> Result<Option<Self>, CliError> {
        let loading: Vec<&Case> = cases
            .iter()
            .copied()
            .filter(|case| case.adapter.is_some())
            .collect();
        let Some(model) = loading.first().and_then(|case| case.model.clone()) else {
            return Ok(None);
        };
        let options = runtime_options(setup, &loading);
        let runtime = LoraRuntime::new(Arc::clone(&setup.backend), model, options)?;
        let loaded = runtime.load(loading.iter().filter_map(|case| case.adapter.as_ref()))?;
        let mut loaded = loaded.into_iter().map(|adapter| adapter.slot());
        let slots = cases
            .iter()
            .map(|case| case.adapter.as_ref().and_then(|_| loaded.next()))
            .collect();
        let sites = loading.iter().flat_map(|case| &case.golden.sites);
        let most: usize =
            sites.map(|site| site.x.shape().0).max().unwrap_or(0) * (loading.len() + 1);
        let most_rows = u32::try_from(most).unwrap_or(u32::MAX).max(1);
        Ok(Some(Self {
            runtime,
            slots,
            most_rows,
        }))
    }

    /// Adds the deltas of one projection to the recorded base outputs and reads the result back, a vector a row.
    fn apply(
        &self,
        layer: usize,
        target: LoraTarget,
        recorded: &Recorded<'_>,
        rows: &[Row],
    ) -> Result<Vec<Vec<bf16>>, CliError> {
        // The rows of one expert and one adapter share a pair: those of a case lie together.
        let mut order: Vec<usize> = (0..rows.len()).collect();
        if matches!(target, LoraTarget::Expert { .. }) {
            order.sort_by_key(|at| (rows[*at].is_base, rows[*at].source));
        }
        let gather = |pick: fn(&GoldenSite) -> &super::Matrix| -> Vec<bf16> {
            let row = |at: &usize| pick(recorded[&rows[*at].source.0]).row_bf16(rows[*at].source.1);
            order.iter().flat_map(row).collect()
        };
        let mut batch = Batch {
            x: self.runtime.buffer(&gather(|site| &site.x))?,
            out: self.runtime.buffer(&gather(|site| &site.base))?,
            rows: order.iter().map(|at| rows[*at]).collect(),
            scratch: self.runtime.scratch(self.most_rows)?,
        };
        self.launch(layer, target, &mut batch)?;
        self.runtime
            .kernels()
            .backend()
            .synchronize(Stream::OWN)
            .map_err(RuntimeError::from)?;
        let width = width(self.runtime.model(), layer, target).0;
        let values = batch
            .out
            .download::<bf16>(0, rows.len() * width)
            .map_err(RuntimeError::from)?;
        let mut got = vec![Vec::new(); rows.len()];
        for (values, at) in values.chunks(width).zip(order) {
            got[at] = values.to_vec();
        }
        Ok(got)
    }

    fn launch(
        &self,
        layer: usize,
        target: LoraTarget,
        batch: &mut Batch,
    ) -> Result<(), RuntimeError> {
        let count = batch.rows.len();
        let (n_out, k_in) = width(self.runtime.model(), layer, target);
        let x = batch.x.mat(count, k_in, k_in)?;
        let mut ctx = self.runtime.context(Stream::OWN, &mut batch.scratch);
        if let LoraTarget::Expert { n, proj } = target {
            let mut first = 0;
            for group in batch
                .rows
                .chunk_by(|a, b| (a.is_base, a.source.0) == (b.is_base, b.source.0))
            {
                let range = first..first + group.len();
                first = range.end;
                let slot = self.slots[group[0].source.0].filter(|_| !group[0].is_base);
                let adapter = slot.and_then(|slot| self.runtime.weights().adapter(slot));
                let pair = adapter.and_then(|adapter| adapter.experts().get(layer)?.pair(n, proj));
                let out = batch
                    .out
                    .mat_mut(count, n_out, n_out)?
                    .row_range(range.clone())?;
                let _ = self.runtime.apply_pair(
                    &mut ctx,
                    SiteKind::Expert,
                    pair,
                    x.row_range(range)?,
                    out,
                )?;
            }
            return Ok(());
        }
        let mut routed = self.runtime.batch(self.most_rows)?;
        let requests: Vec<i32> = batch.rows.iter().map(|row| self.request(row)).collect();
        self.runtime
            .route(&mut routed, Stream::OWN, &requests, count)?;
        let out = batch.out.mat_mut(count, n_out, n_out)?;
        let _ = match target {
            LoraTarget::Attn(module) => {
                self.runtime
                    .apply(&mut ctx, &routed, layer, x, [ModuleOut { module, out }])?
            }
            _ => self
                .runtime
                .apply_router(&mut ctx, &routed, layer, x, out)?,
        };
        Ok(())
    }

    /// What a row's request names.
    fn request(&self, row: &Row) -> i32 {
        let slot = self.slots[row.source.0].filter(|_| !row.is_base);
        slot.and_then(|slot| i32::try_from(slot).ok())
            .unwrap_or(BASE_SLOT)
    }
}

/// Rows of one projection on the device.
struct Batch {
    x: DeviceBuffer,
    out: DeviceBuffer,
    rows: Vec<Row>,
    scratch: Scratch,
}

/// (out, in) of a recorded projection: the golden file was checked against the model when it was read.
fn width(model: &ModelSpec, layer: usize, target: LoraTarget) -> (usize, usize) {
    target.dims(model, layer).unwrap_or((0, 0))
}

/// A pool that holds every one of `cases`.
fn runtime_options(setup: &Setup<'_>, cases: &[&Case]) -> RuntimeOptions {
    let slots = u32::try_from(cases.len()).unwrap_or(u32::MAX);
    let max_rank = cases.iter().map(|case| case.max_rank).max().unwrap_or(1);
    let units = cases.iter().map(|case| case.expert_units()).sum();
    RuntimeOptions {
        pool: setup
            .options
            .pool_spec(slots, max_rank, units, setup.levers),
        parse: setup.options.parse_options(),
        ..RuntimeOptions::new(slots, max_rank)
    }
}
