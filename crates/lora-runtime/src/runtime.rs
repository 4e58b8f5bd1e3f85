//! The object that an engine holds.

mod slots;

use crate::overlays::Vocabulary;
use crate::{Adapter, RoutedBatch, RuntimeError, RuntimeOptions, open_backend};
use bytemuck::Pod;
use lora_config::{BackendKind, ModelSpec, ParseOptions, RuntimeConfig};
use lora_kernels::{
    DeviceBuffer, LaunchContext, LoraBackend, LoraKernels, RowSlots, Scratch, ScratchSpec, Stream,
};
use lora_moe::{ExpertTables, ExpertTablesSpec};
use lora_weights::device::DeviceMemory;
use lora_weights::{
    AdapterSlot, AuditReport, LoraAdapterInput, LoraWeights, PoolLayout, PoolSpec, SlotExtension,
    SlotTarget,
};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Runtime LoRA for one model on one device: adapters in slots, and launches that add their deltas.
///
/// It may be used from several threads. Routing and launches of other slots never wait for a load, a promotion or a
/// swap.
///
/// Life of an adapter: [`load`](Self::load) fills slots at startup, [`promote`](Self::promote) brings one into a cache
/// slot, [`swap`](Self::swap) replaces the contents of a slot, [`rotate`](Self::rotate) makes another slot active,
/// [`unload`](Self::unload) empties one. A request holds its adapter by a [`lease`](Self::lease), or by
/// [`acquire`](Self::acquire), which brings it in where it has to.
///
/// A step: [`route`](Self::route) once, then [`apply`](Self::apply) at each projection.
#[derive(Debug)]
pub struct LoraRuntime {
    kernels: LoraKernels,
    weights: LoraWeights,
    experts: Option<Arc<ExpertTables>>,
    parse: ParseOptions,
    /// Held while [`acquire`](Self::acquire) promotes.
    promoting: Mutex<()>,
    /// The engine's own tables, once it has registered them.
    pub(crate) vocabulary: OnceLock<Vocabulary>,
    pub(crate) row_diff_threshold: f32,
}

impl LoraRuntime {
    /// Allocates the pool of `model` on `backend`, all slots placeholders, and expert tables where it has room for experts.
    ///
    /// # Errors
    /// As [`LoraWeights::new`] and [`ExpertTables::new`].
    pub fn new(
        backend: Arc<dyn LoraBackend>,
        model: ModelSpec,
        options: RuntimeOptions,
    ) -> Result<Self, RuntimeError> {
        let _span = tracing::info_span!("lora_build", max_loras = options.pool.max_loras).entered();
        let memory: Arc<dyn DeviceMemory> = Arc::clone(&backend) as Arc<_>;
        let mut pool = options.pool;
        // Whether there is something to apply overlays to is for this runtime's own audit to say; slots take no overlay without an extension.
        pool.policy.overlays = true;
        let weights = LoraWeights::new(Arc::clone(&memory), model, pool)?;
        weights.reserve_staging()?;
        let experts = ExpertTablesSpec::of_layout(weights.layout(), options.expert_residents)
            .map(|spec| ExpertTables::new(memory, spec))
            .transpose()?;
        Ok(Self {
            weights,
            experts: experts.map(Arc::new),
            kernels: LoraKernels::new(backend, options.launch),
            parse: options.parse,
            promoting: Mutex::new(()),
            vocabulary: OnceLock::new(),
            row_diff_threshold: options.row_diff_threshold,
        })
    }

    /// [`new`](Self::new) on a backend of this kind.
    ///
    /// # Errors
    /// As [`open_backend`] and [`new`](Self::new).
    pub fn open(
        kind: BackendKind,
        model: ModelSpec,
        options: RuntimeOptions,
    ) -> Result<Self, RuntimeError> {
        Self::new(open_backend(kind)?, model, options)
    }

    /// A runtime as a [`RuntimeConfig`] describes it (`lora.toml`, environment and code), startup adapters loaded.
    ///
    /// # Errors
    /// As [`RuntimeOptions::from_config`], [`open`](Self::open), [`adapter`](Self::adapter) and [`load`](Self::load).
    pub fn from_config(config: &RuntimeConfig, model: ModelSpec) -> Result<Self, RuntimeError> {
        let options = RuntimeOptions::from_config(config, &model)?;
        let runtime = Self::open(config.backend, model, options)?;
        runtime.load_configured(config)?;
        Ok(runtime)
    }

    /// Loads the startup adapters of a config: for a runtime that something is told first, the tables that the engine serves
    /// ([`serve_tables`](Self::serve_tables)) above all, without which adapters with token overlays are refused.
    ///
    /// # Errors
    /// As [`adapter`](Self::adapter) and [`load`](Self::load).
    pub fn load_configured(
        &self,
        config: &RuntimeConfig,
    ) -> Result<Vec<Arc<AdapterSlot>>, RuntimeError> {
        let mut adapters = Vec::with_capacity(config.adapters.len());
        for entry in &config.adapters {
            let adapter = self.adapter(entry.name.as_str(), &entry.path)?;
            adapters.push(if entry.pinned {
                adapter
            } else {
                adapter.unpinned()
            });
        }
        match adapters.is_empty() {
            true => Ok(Vec::new()),
            false => self.load(&adapters),
        }
    }

    /// The pool: slots, pairs, routes, leases, everything that does not launch.
    pub fn weights(&self) -> &LoraWeights {
        &self.weights
    }

    /// Backend and launch options.
    pub fn kernels(&self) -> &LoraKernels {
        &self.kernels
    }

    /// The model that the pool is laid out for.
    pub fn model(&self) -> &ModelSpec {
        self.weights.model()
    }

    /// Opens an adapter folder under this runtime's parse options. Nothing is loaded yet.
    ///
    /// # Errors
    /// As [`Adapter::open`].
    pub fn adapter(&self, name: impl Into<String>, dir: &Path) -> Result<Adapter, RuntimeError> {
        Adapter::open(name, dir, &self.parse)
    }

    /// Everything there is to say of an adapter for this pool. Touches no device. Rows and tables of the vocabulary load once
    /// [`serve_tables`](Self::serve_tables) has said what they replace.
    pub fn audit(&self, adapter: &Adapter) -> AuditReport {
        let policy = self.audited_pool().policy;
        self.weights.audit_under(&adapter.input(), policy)
    }

    /// The pool that adapters are audited for: with rows of the vocabulary once something applies them.
    pub(crate) fn audited_pool(&self) -> PoolSpec {
        let mut pool = *self.weights.pool();
        pool.policy.overlays = self.overlays().is_some();
        pool
    }

    /// [`audit`](Self::audit) of an adapter that loads: an engine refuses a bad one where it is named rather than at its first request.
    ///
    /// # Errors
    /// [`WeightsError::Refused`](lora_weights::WeightsError::Refused) with every finding.
    pub fn check(&self, adapter: &Adapter) -> Result<AuditReport, RuntimeError> {
        let report = self.audit(adapter);
        Ok(self.weights.accept(adapter.name(), report)?)
    }

    /// Device buffers for the row maps of steps of at most `max_rows` rows.
    ///
    /// # Errors
    /// What the allocation gives.
    pub fn batch(&self, max_rows: u32) -> Result<RoutedBatch, RuntimeError> {
        RoutedBatch::new(self, max_rows)
    }

    /// Routes a step: row `i` follows `requests[i]`, rows past them up to `padded_rows` take no delta. Not legal under graph
    /// capture: see [`route_from_device`](Self::route_from_device).
    ///
    /// # Errors
    /// A request that names a slot past the pool, and more rows than the batch has room for.
    pub fn route(
        &self,
        batch: &mut RoutedBatch,
        stream: Stream,
        requests: &[i32],
        padded_rows: usize,
    ) -> Result<(), RuntimeError> {
        batch.fill(self, stream, requests, padded_rows)
    }

    /// Groups the rows of a row map that is on the device already: legal under graph capture, where a replayed graph
    /// groups whatever the map then holds.
    ///
    /// # Errors
    /// More rows than the batch has room for.
    pub fn route_from_device(
        &self,
        batch: &mut RoutedBatch,
        stream: Stream,
        rows: RowSlots<'_>,
    ) -> Result<(), RuntimeError> {
        batch.fill_from_device(self, stream, rows)
    }

    /// Scratch for launches of at most `max_rows` rows at any site of this model. One for each stream.
    ///
    /// # Errors
    /// What the allocation gives.
    pub fn scratch(&self, max_rows: u32) -> Result<Scratch, RuntimeError> {
        let spec = scratch_spec(self.model(), self.weights.pool(), max_rows);
        Ok(Scratch::new(self.memory(), spec)?)
    }

    /// A copy of `values` in the backend's memory, for tools and tests: an engine has buffers of its own.
    ///
    /// # Errors
    /// What allocation and upload give.
    pub fn buffer<T: Pod>(&self, values: &[T]) -> Result<DeviceBuffer, RuntimeError> {
        Ok(DeviceBuffer::from_slice(self.memory(), values)?)
    }

    /// Blocks until everything enqueued on `stream` is done, before results are read back: for tools and tests, an engine has its own events.
    ///
    /// # Errors
    /// What the enqueued work failed with.
    pub fn synchronize(&self, stream: Stream) -> Result<(), RuntimeError> {
        Ok(self.kernels.backend().synchronize(stream)?)
    }

    /// The expert tables, which follow the slots by themselves; `None` where the pool has no room for experts.
    pub fn expert_tables(&self) -> Option<&ExpertTables> {
        self.experts.as_deref()
    }

    /// The backend as memory alone.
    pub(crate) fn memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::clone(self.kernels.backend()) as Arc<_>
    }

    /// Where launches go: this runtime's kernels, the engine's stream, and the scratch of that stream.
    pub fn context<'a>(&'a self, stream: Stream, scratch: &'a mut Scratch) -> LaunchContext<'a> {
        LaunchContext {
            kernels: &self.kernels,
            stream,
            scratch,
        }
    }

    fn bring_in(
        &self,
        adapter: &Adapter,
        target: SlotTarget,
    ) -> Result<Arc<AdapterSlot>, RuntimeError> {
        let staged = self.stage(adapter)?;
        Ok(self.weights.pack_store_into_slot(target, staged)?)
    }

    /// An audited adapter with what its slot will own beside its pairs: the one place that attaches extensions.
    fn input<'a>(
        &self,
        adapter: &'a Adapter,
        report: &'a AuditReport,
    ) -> Result<LoraAdapterInput<'a>, RuntimeError> {
        let mut input = adapter.input().with_report(report);
        if let Some(tables) = self.expert_extension() {
            input = input.with_extension(tables);
        }
        if let Some(overlay) = self.overlay_extension(adapter, report)? {
            input = input.with_extension(overlay);
        }
        Ok(input)
    }

    /// The expert tables, as every slot owns them.
    pub(crate) fn expert_extension(&self) -> Option<Arc<dyn SlotExtension>> {
        let tables = self.experts.as_ref()?;
        Some(Arc::clone(tables) as Arc<_>)
    }

    /// What this runtime asserts beside adapter configs.
    pub fn parse_options(&self) -> &ParseOptions {
        &self.parse
    }
}

/// The largest launch that a model's sites can ask for, with `max_rows` rows.
pub(crate) fn scratch_spec(model: &ModelSpec, pool: &PoolSpec, max_rows: u32) -> ScratchSpec {
    let expert_rank = pool.experts.map_or(0, |experts| experts.max_rank);
    let widths = (0..model.layers.len()).flat_map(|layer| {
        let dense = pool
            .modules
            .iter()
            .filter_map(move |module| module.dims(model, layer));
        let experts = pool
            .experts
            .into_iter()
            .flat_map(|_| lora_weights::ExpertProj::ALL);
        dense
            .chain(experts.filter_map(|proj| proj.dims(model)))
            .map(|(_, k_in)| k_in)
    });
    ScratchSpec {
        max_rows,
        max_rank: pool.max_rank.max(expert_rank),
        max_sites: lora_kernels::MAX_SITES as u32,
        max_k_in: widths.max().unwrap_or(1).try_into().unwrap_or(u32::MAX),
    }
}

/// Bytes of the expert tables of a pool, before anything is allocated: 0 where it has no room for experts. `residents` as in
/// [`RuntimeOptions::expert_residents`].
///
/// # Errors
/// [`MoeError::BadTables`](lora_moe::MoeError::BadTables) for sizes that cannot be.
pub fn plan_expert_tables(
    layout: &PoolLayout,
    residents: Option<u32>,
) -> Result<u64, RuntimeError> {
    let spec = ExpertTablesSpec::of_layout(layout, residents);
    Ok(spec.map_or(Ok(0), |spec| spec.bytes())?)
}

/// Bytes of scratch that batches of `max_rows` rows take, before anything is allocated.
///
/// # Errors
/// Ranks and widths that no launch takes.
pub fn plan_scratch(
    model: &ModelSpec,
    pool: &PoolSpec,
    max_rows: u32,
) -> Result<u64, RuntimeError> {
    Ok(scratch_spec(model, pool, max_rows).bytes()?)
}
