//! One pool, one batch a projection: the rows of every case and base rows, each through its own adapter.

use super::block::{BlockOutcome, BlockRun};
use super::case::Case;
use super::compare::{Factors, Worst};
use super::golden::GoldenSite;
use super::overlay::{Loaded, serve_tables};
use crate::CliError;
use crate::options::LoadOptions;
use half::bf16;
use lora_runtime::config::{Levers, ModelSpec, TokenTable};
use lora_runtime::kernels::{
    DeviceBuffer, ExpertRouting, LaunchContext, LoraBackend, MatMut, MatRef, Scratch, Stream,
};
use lora_runtime::weights::{BASE_SLOT, ExpertProj, LoraTarget};
use lora_runtime::{LoraRuntime, ModuleOut, OverlayReport, RuntimeError, RuntimeOptions};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

/// Where and how to verify.
pub struct Setup<'a> {
    /// Device.
    pub backend: Arc<dyn LoraBackend>,
    /// What may load.
    pub options: &'a LoadOptions,
    /// Levers as read from the environment.
    pub levers: &'a Levers,
    /// Largest difference of an element up to which a row of an adapter's own table counts as that of the base.
    pub row_diff_threshold: f32,
}

/// Where a recorded module stands in its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In a layer.
    Layer {
        /// Global layer index.
        layer: usize,
        /// The module inside it.
        target: LoraTarget,
    },
    /// A whole expert block of a layer.
    Block {
        /// Global layer index.
        layer: usize,
    },
    /// Before or after the layers.
    Table(TokenTable),
}

/// One recorded module of one case.
#[derive(Debug, Clone)]
pub struct ModuleResult {
    /// Path of the module.
    pub path: String,
    /// Where it stands.
    pub place: Place,
    /// Rows compared.
    pub rows: usize,
    /// The element furthest from what was recorded.
    pub worst: Worst,
}

/// All recorded modules of one case.
#[derive(Debug, Clone, Default)]
pub struct CaseResult {
    /// Modules compared: by layer, then vocabulary tables.
    pub modules: Vec<ModuleResult>,
    /// What the adapter's overlay does to the vocabulary, where it has one.
    pub overlay: Option<OverlayReport>,
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
                    place: Place::Layer { layer, target },
                    rows,
                    worst,
                }));
        }
    }
    pool.verify_blocks(cases, &mut results, &mut base)?;
    pool.verify_tables(cases, &mut results, &mut base)?;
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
    /// Compares the recorded expert blocks whole.
    fn verify_blocks(
        &self,
        cases: &[&Case],
        results: &mut [CaseResult],
        base: &mut BaseRows,
    ) -> Result<(), CliError> {
        let slots = self
            .slots
            .iter()
            .map(|slot| slot.and_then(|slot| i32::try_from(slot).ok()));
        for ((case, slot), result) in cases.iter().zip(slots).zip(results) {
            let (Some(slot), Some(_)) = (slot, self.runtime.expert_tables()) else {
                continue;
            };
            for block in &case.golden.blocks {
                let run = BlockRun {
                    runtime: &self.runtime,
                    case,
                    block,
                    slot,
                };
                let BlockOutcome { worst, base_rows } = run.run()?;
                base.rows += base_rows.0;
                base.changed += base_rows.1;
                result.modules.extend(worst.map(|worst| ModuleResult {
                    path: block.path.clone(),
                    place: Place::Block { layer: block.layer },
                    rows: block.tokens(),
                    worst,
                }));
            }
        }
        Ok(())
    }

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
        if let Some(tables) = loading.iter().find_map(|case| case.tables.as_ref()) {
            serve_tables(&runtime, tables)?;
        }
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

    /// Compares vocabulary tables, and says what each overlay does.
    fn verify_tables(
        &self,
        cases: &[&Case],
        results: &mut [CaseResult],
        base: &mut BaseRows,
    ) -> Result<(), RuntimeError> {
        let loaded = Loaded {
            runtime: &self.runtime,
            cases,
            slots: &self.slots,
        };
        for table in [TokenTable::Embed, TokenTable::LmHead] {
            for (position, result) in loaded.verify(table, base)? {
                results[position].modules.push(result);
            }
        }
        let residents = self.runtime.report().adapters;
        for (result, slot) in results.iter_mut().zip(&self.slots) {
            let resident = residents
                .iter()
                .find(|resident| Some(resident.slot) == *slot);
            result.overlay = resident.and_then(|resident| resident.overlay);
        }
        Ok(())
    }

    /// Adds the deltas of one projection to the recorded base outputs and reads the result back, a vector a row.
    fn apply(
        &self,
        layer: usize,
        target: LoraTarget,
        recorded: &Recorded<'_>,
        rows: &[Row],
    ) -> Result<Vec<Vec<bf16>>, CliError> {
        let gather = |pick: fn(&GoldenSite) -> &super::Matrix| -> Vec<bf16> {
            let row = |row: &Row| pick(recorded[&row.source.0]).row_bf16(row.source.1);
            rows.iter().flat_map(row).collect()
        };
        let mut batch = Batch {
            x: self.runtime.buffer(&gather(|site| &site.x))?,
            out: self.runtime.buffer(&gather(|site| &site.base))?,
            rows: rows.to_vec(),
            scratch: self.runtime.scratch(self.most_rows)?,
        };
        self.launch(layer, target, &mut batch)?;
        self.runtime.synchronize(Stream::OWN)?;
        let width = width(self.runtime.model(), layer, target).0;
        let values = batch
            .out
            .download::<bf16>(0, rows.len() * width)
            .map_err(RuntimeError::from)?;
        Ok(values.chunks(width).map(<[bf16]>::to_vec).collect())
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
        let requests: Vec<i32> = batch.rows.iter().map(|row| self.request(row)).collect();
        let out = batch.out.mat_mut(count, n_out, n_out)?;
        if let LoraTarget::Expert { n, proj } = target {
            if self.runtime.expert_tables().is_none() {
                return Ok(());
            }
            let place = (layer, n, proj);
            return fold_expert(&self.runtime, &mut ctx, place, &requests, (x, out));
        }
        let mut routed = self.runtime.batch(self.most_rows)?;
        self.runtime
            .route(&mut routed, Stream::OWN, &requests, count)?;
        match target {
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

/// Folds rows that a router sent to one expert, top-1 and unsorted, each with the adapter that its request names.
fn fold_expert(
    runtime: &LoraRuntime,
    ctx: &mut LaunchContext<'_>,
    (layer, expert, proj): (usize, usize, ExpertProj),
    requests: &[i32],
    (x, out): (MatRef<'_>, MatMut<'_>),
) -> Result<(), RuntimeError> {
    let backend = ctx.kernels.backend();
    let count = requests.len();
    let chosen = vec![i32::try_from(expert).unwrap_or(i32::MAX); count];
    let chosen = DeviceBuffer::from_slice(backend.clone(), &chosen)?;
    let adapters = DeviceBuffer::from_slice(backend.clone(), requests)?;
    let routing = ExpertRouting::Unsorted {
        experts: chosen.expert_ids(count)?,
        top_k: NonZeroU32::MIN,
    };
    let mut rows = runtime.expert_rows(u32::try_from(count).unwrap_or(u32::MAX))?;
    runtime.route_experts(
        &mut rows,
        ctx.stream,
        routing,
        adapters.token_adapters(count)?,
    )?;
    let fold = runtime.expert_fold(layer)?;
    fold.apply_projection(ctx, &rows, proj, routing.token_x(x), out)?;
    // Before the buffers of this step go.
    backend.synchronize(ctx.stream)?;
    Ok(())
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
        row_diff_threshold: setup.row_diff_threshold,
        ..RuntimeOptions::new(slots, max_rank)
    }
}
