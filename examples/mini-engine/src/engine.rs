//! Requests in, tokens out: a scheduler that puts prefill and decode of any adapters into one step.

use crate::math::Rows;
use crate::model::{Model, Step, StepRow};
use crate::prefix::PrefixCache;
use crate::sequence::Sequence;
use crate::{Deltas, EngineError, SequenceCache};
use half::bf16;
use lora_runtime::config::BackendKind;
use lora_runtime::overlay::{ServedTable, ServedTables};
use lora_runtime::weights::{BASE_SLOT, SlotLease};
use lora_runtime::{Adapter, LoraRuntime, RuntimeError, RuntimeOptions};
use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

/// How an engine is set up.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Where deltas run.
    pub backend: BackendKind,
    /// Adapters that can be resident at once.
    pub slots: u32,
    /// Largest rank of an adapter.
    pub max_rank: u32,
    /// Rows of a step: prompt tokens and decoding sequences together.
    pub max_rows: u32,
    /// Prompts that the prefix cache keeps.
    pub cached_prompts: usize,
}

/// A request.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Its name, for reports.
    pub name: String,
    /// The adapter it is for; `None` for the base model.
    pub adapter: Option<String>,
    /// Tokens to start from.
    pub prompt: Vec<u32>,
    /// Tokens to generate, greedily.
    pub max_tokens: usize,
    /// Keep the logits of every prompt token. The prefix cache, which has none, is passed over.
    pub keep_logits: bool,
}

impl Request {
    /// What is prefilled, and may come from the prefix cache: all of the prompt but its last token.
    pub(crate) fn prefix(&self) -> &[u32] {
        self.prompt.split_last().map_or(&[], |(_, prefix)| prefix)
    }
}

/// What became of a request.
#[derive(Debug, Clone)]
pub struct Response {
    /// The request.
    pub request: Request,
    /// Tokens generated.
    pub tokens: Vec<u32>,
    /// The slot that its rows followed: [`BASE_SLOT`] for the base model.
    pub slot: i32,
    /// Prefix-cache key.
    pub adapter_id: u64,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: usize,
    /// Logits of each prompt token, where they were to be kept.
    pub logits: Vec<Vec<f32>>,
}

/// A model, the adapters it may be asked for, and the requests under way.
#[derive(Debug)]
pub struct Engine {
    model: Model,
    deltas: Deltas,
    /// Adapters that requests may name. One takes a slot when a request for it is admitted.
    adapters: HashMap<String, Adapter>,
    waiting: VecDeque<Request>,
    running: Vec<Sequence>,
    prefixes: PrefixCache,
    max_rows: usize,
    last_slots: Vec<i32>,
}

impl Engine {
    /// Loads a model folder: `config.json` and safetensors.
    ///
    /// # Errors
    /// As [`Model::open`] and [`LoraRuntime::open`].
    pub fn open(model: &Path, options: EngineOptions) -> Result<Self, EngineError> {
        let model = Model::open(model)?;
        // This engine's blocks have a place for every module, so the pool has room for every module.
        let spec = model.config().spec.clone();
        let mut lora = RuntimeOptions::new(options.slots, options.max_rank).with_everything(&spec);
        // A row of a table that an adapter saved whole counts where it differs at all.
        lora.row_diff_threshold = 0.0;
        let runtime = LoraRuntime::open(options.backend, spec, lora)?;
        runtime.serve_tables(served_tables(&model, &runtime)?)?;
        Ok(Self {
            deltas: Deltas::new(runtime, options.max_rows)?,
            model,
            adapters: HashMap::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            prefixes: PrefixCache::new(options.cached_prompts),
            max_rows: options.max_rows as usize,
            last_slots: Vec::new(),
        })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The adapters' runtime, for reports and metrics.
    pub fn runtime(&self) -> &LoraRuntime {
        self.deltas.runtime()
    }

    /// Makes the adapter in `dir` one that requests can name. In place of an earlier one of that name, requests admitted from now on get
    /// this one, while those that run keep theirs.
    ///
    /// # Errors
    /// [`EngineError::Lora`] for an adapter that does not load, with every reason: the earlier one stays.
    pub fn register(&mut self, name: &str, dir: &Path) -> Result<(), EngineError> {
        let runtime = self.deltas.runtime();
        let adapter = runtime.adapter(name, dir)?;
        runtime.check(&adapter)?;
        if let Some(slot) = runtime.weights().slot_of(name) {
            runtime.unload(slot)?;
        }
        self.adapters.insert(name.to_owned(), adapter);
        Ok(())
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`EngineError::Request`] for an adapter that is not registered, an empty prompt, a token past the vocabulary.
    pub fn submit(&mut self, request: Request) -> Result<(), EngineError> {
        let vocab = self.model.config().spec.vocab_size;
        let unknown = request
            .adapter
            .as_ref()
            .filter(|name| !self.adapters.contains_key(*name));
        let past = request
            .prompt
            .iter()
            .find(|token| **token as usize >= vocab);
        let problem = match (unknown, past) {
            (Some(name), _) => format!("no adapter {name} is registered"),
            (_, Some(token)) => format!("token {token}, and the vocabulary has {vocab}"),
            _ if request.prompt.is_empty() => "the prompt is empty".to_owned(),
            _ => {
                self.waiting.push_back(request);
                return Ok(());
            }
        };
        Err(EngineError::Request {
            request: request.name,
            problem,
        })
    }

    /// Whether nothing waits and nothing runs.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// The slot that each row of the last step followed.
    pub fn last_slots(&self) -> &[i32] {
        &self.last_slots
    }

    /// Serves until nothing waits and nothing runs.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn run(&mut self) -> Result<Vec<Response>, EngineError> {
        let mut responses = Vec::new();
        while !self.is_idle() {
            responses.extend(self.step()?);
        }
        Ok(responses)
    }

    /// One step: admits what can be admitted, passes the next rows of every running sequence through the model, and gives back
    /// what has ended.
    ///
    /// # Errors
    /// An adapter that cannot be brought in although nothing runs that it could wait for; a launch that is refused.
    pub fn step(&mut self) -> Result<Vec<Response>, EngineError> {
        self.admit()?;
        let rows = self.next_rows();
        let slots = rows.iter();
        let slots = slots.map(|row| self.running[row.sequence].lease.slot());
        self.last_slots = slots.collect();
        self.deltas.route(&self.last_slots)?;
        let caches = self.running.iter_mut().map(|sequence| &mut sequence.cache);
        let logits = self.model.forward(Step {
            rows: &rows,
            caches: caches.collect(),
            deltas: &mut self.deltas,
        })?;
        for (row, logits) in rows.iter().zip(logits.iter()) {
            self.running[row.sequence].accept(row.position, logits);
        }
        for sequence in &self.running {
            if let Some(prefix) = sequence.prefilled() {
                let adapter_id = sequence.lease.adapter_id();
                self.prefixes.insert(adapter_id, prefix, &sequence.cache);
            }
        }
        let ended = self.running.extract_if(.., |sequence| sequence.has_ended());
        Ok(ended.map(Sequence::into_response).collect())
    }

    /// The step boundary, where adapters come and go: a request that waits is admitted once its adapter holds a slot.
    fn admit(&mut self) -> Result<(), EngineError> {
        let mut waiting = 0;
        while self.running.len() < self.max_rows && waiting < self.waiting.len() {
            let Some(lease) = self.lease(self.waiting[waiting].adapter.as_deref())? else {
                waiting += 1;
                continue;
            };
            if let Some(request) = self.waiting.remove(waiting) {
                let sequence = self.begin(request, lease);
                self.running.push(sequence);
            }
        }
        Ok(())
    }

    /// A request that holds its adapter, with what the prefix cache has of its prompt.
    fn begin(&self, request: Request, lease: SlotLease) -> Sequence {
        let prefix = match request.keep_logits {
            true => None,
            false => self.prefixes.longest(lease.adapter_id(), request.prefix()),
        };
        let cache = prefix.unwrap_or_else(|| SequenceCache::new(self.model.config()));
        Sequence::new(request, lease, cache)
    }

    /// Holds the adapter called `name`, or the base model; `None` where it has to wait for a request that runs.
    fn lease(&self, name: Option<&str>) -> Result<Option<SlotLease>, EngineError> {
        let runtime = self.deltas.runtime();
        let Some(name) = name else {
            return Ok(runtime.lease(BASE_SLOT));
        };
        match runtime.acquire(&self.adapters[name]) {
            Ok(lease) => Ok(Some(lease)),
            Err(error) if error.is_busy() && !self.running.is_empty() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The rows of the next step: one of every running sequence, and with the room that is left more of the prompts.
    fn next_rows(&self) -> Vec<StepRow> {
        let mut spare = self.max_rows - self.running.len();
        let mut rows = Vec::with_capacity(self.max_rows);
        for (index, sequence) in self.running.iter().enumerate() {
            let count = sequence.rows_ready().min(1 + spare);
            spare -= count - 1;
            rows.extend(sequence.rows(index, count));
        }
        rows
    }
}

/// The model's tables as BF16 on the device, which the tables and tokens of adapters are compared with.
fn served_tables(
    model: &Model,
    runtime: &LoraRuntime,
) -> Result<ServedTables<'static>, RuntimeError> {
    let [embedding, head] = model.vocabulary();
    let table = |rows: &Rows<f32>| {
        let values: Vec<bf16> = rows.values().iter().copied().map(bf16::from_f32).collect();
        let buffer = Arc::new(runtime.buffer(&values)?);
        Ok::<_, RuntimeError>(ServedTable::shared(buffer, rows.len(), rows.width())?)
    };
    Ok(match runtime.model().tied_embeddings {
        true => ServedTables::tied(table(embedding)?),
        false => ServedTables::untied(table(embedding)?, table(head)?),
    })
}
