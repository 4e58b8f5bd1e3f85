//! Where the engine meets `lora-runtime`: activations of this engine's blocks, which live on the host, and the device that adds
//! deltas to them. An engine whose activations are on the device hands out views of them instead and copies nothing.

use crate::math::Rows;
use half::bf16;
use lora_runtime::kernels::overlay::LogitsMut;
use lora_runtime::kernels::{
    DeviceBuffer, ExpertRouting, GateUpOut, KernelError, MAX_SITES, MatMut, MatRef, Scratch, Stream,
};
use lora_runtime::moe::ExpertRows;
use lora_runtime::weights::{ExpertProj, LoraModule};
use lora_runtime::{LoraRuntime, ModuleOut, RoutedBatch, RuntimeError};
use std::num::NonZeroU32;

/// Adds to each row of a step the deltas of the row's own adapter.
#[derive(Debug)]
pub struct Deltas {
    runtime: LoraRuntime,
    batch: RoutedBatch,
    experts: Option<ExpertStep>,
    scratch: Scratch,
    x: DeviceBuffer,
    outs: Vec<DeviceBuffer>,
    tokens: DeviceBuffer,
    logits: DeviceBuffer,
}

/// What the router of a MoE block chose, and the rows that follow from it: top-k a token.
#[derive(Debug)]
struct ExpertStep {
    chosen: DeviceBuffer,
    top_k: NonZeroU32,
    rows: ExpertRows,
    count: usize,
}

impl Deltas {
    /// Buffers for steps of at most `max_rows` rows of the runtime's model.
    ///
    /// # Errors
    /// What allocations give.
    pub fn new(runtime: LoraRuntime, max_rows: u32) -> Result<Self, RuntimeError> {
        let moe = runtime.model().moe.as_ref();
        let top_k = moe.and_then(|moe| NonZeroU32::new(moe.top_k as u32));
        let block_rows = max_rows * top_k.map_or(1, NonZeroU32::get);
        let experts = match top_k {
            Some(top_k) => Some(ExpertStep::new(&runtime, block_rows, top_k)?),
            None => None,
        };
        let vocab = runtime.model().vocab_size;
        let zeros = vec![bf16::ZERO; block_rows as usize * widest_projection(&runtime)];
        let outs = (0..MAX_SITES).map(|_| runtime.buffer(&zeros));
        Ok(Self {
            batch: runtime.batch(max_rows)?,
            experts,
            tokens: runtime.buffer(&vec![0_i32; max_rows as usize])?,
            logits: runtime.buffer(&vec![0_f32; max_rows as usize * vocab])?,
            scratch: runtime.scratch(block_rows)?,
            x: runtime.buffer(&zeros)?,
            outs: outs.collect::<Result<_, _>>()?,
            runtime,
        })
    }

    /// The adapters.
    pub fn runtime(&self) -> &LoraRuntime {
        &self.runtime
    }

    /// Begins a step: its i-th row follows `slots[i]`.
    ///
    /// # Errors
    /// As [`LoraRuntime::route`].
    pub fn route(&mut self, slots: &[i32]) -> Result<(), RuntimeError> {
        self.runtime
            .route(&mut self.batch, Stream::OWN, slots, slots.len())
    }

    /// Replaces rows of the embedding table by those that the row's own adapter has for the token.
    ///
    /// # Errors
    /// As [`LoraRuntime::apply_embedding_overlay`].
    pub fn replace_embeddings(
        &mut self,
        tokens: &[i32],
        embedded: &mut Rows<bf16>,
    ) -> Result<(), RuntimeError> {
        self.tokens.upload(0, tokens)?;
        let tokens = self.tokens.token_ids(tokens.len())?;
        let out = to_update(&mut self.outs[0], embedded)?;
        self.runtime
            .apply_embedding_overlay(Stream::OWN, &self.batch, tokens, out)?;
        self.read_back([embedded])
    }

    /// Replaces the logits of tokens for which the row's own adapter has a row of the head.
    ///
    /// # Errors
    /// As [`LoraRuntime::apply_logits_overlay`].
    pub fn replace_logits(
        &mut self,
        hidden: &Rows<bf16>,
        logits: &mut Rows<f32>,
    ) -> Result<(), RuntimeError> {
        self.logits.upload(0, logits.values())?;
        let hidden = to_read(&mut self.x, hidden)?;
        let (rows, vocab) = (logits.len(), logits.width());
        let out = LogitsMut::F32(self.logits.f32_mat_mut(rows, vocab, vocab)?);
        self.runtime
            .apply_logits_overlay(Stream::OWN, &self.batch, hidden, out)?;
        self.runtime.synchronize(Stream::OWN)?;
        let values = self.logits.download(0, rows * vocab)?;
        logits.values_mut().copy_from_slice(&values);
        Ok(())
    }

    /// Adds deltas to the outputs of projections of `layer` that all read `x`: one launch for them together.
    ///
    /// # Errors
    /// As [`LoraRuntime::apply`].
    pub fn add<const N: usize>(
        &mut self,
        layer: usize,
        x: &Rows<bf16>,
        outs: [(LoraModule, &mut Rows<bf16>); N],
    ) -> Result<(), RuntimeError> {
        let mut sites = Vec::with_capacity(N);
        for ((module, out), buffer) in outs.iter().zip(&mut self.outs) {
            let module = *module;
            let out = to_update(buffer, out)?;
            sites.push(ModuleOut { module, out });
        }
        let x = to_read(&mut self.x, x)?;
        let mut ctx = self.runtime.context(Stream::OWN, &mut self.scratch);
        self.runtime.apply(&mut ctx, &self.batch, layer, x, sites)?;
        self.read_back(outs.map(|(_, out)| out))
    }

    /// Adds deltas to the router logits of `layer`, before top-k.
    ///
    /// # Errors
    /// As [`LoraRuntime::apply_router`].
    pub fn add_router(
        &mut self,
        layer: usize,
        x: &Rows<bf16>,
        logits: &mut Rows<bf16>,
    ) -> Result<(), RuntimeError> {
        let x = to_read(&mut self.x, x)?;
        let out = to_update(&mut self.outs[0], logits)?;
        let mut ctx = self.runtime.context(Stream::OWN, &mut self.scratch);
        self.runtime
            .apply_router(&mut ctx, &self.batch, layer, x, out)?;
        self.read_back([logits])
    }

    /// Begins the experts of a layer: `chosen` are those of each token, token by token.
    ///
    /// # Errors
    /// As [`LoraRuntime::route_experts`].
    pub fn route_experts(&mut self, chosen: &[usize]) -> Result<(), RuntimeError> {
        let experts = self.experts.as_mut().ok_or(RuntimeError::NoExpertTables)?;
        let chosen: Vec<i32> = chosen.iter().map(|expert| *expert as i32).collect();
        experts.chosen.upload(0, &chosen)?;
        experts.count = chosen.len();
        let routing = routing(&experts.chosen, experts.count, experts.top_k)?;
        let adapters = self.batch.token_adapters()?;
        self.runtime
            .route_experts(&mut experts.rows, Stream::OWN, routing, adapters)
    }

    /// Adds deltas to gate and up of the chosen experts, which lie side by side in a row of `gate_up`. `x` has one row a token.
    ///
    /// # Errors
    /// As [`LoraRuntime::apply_expert_gate_up`].
    pub fn add_expert_gate_up(
        &mut self,
        layer: usize,
        x: &Rows<bf16>,
        gate_up: &mut Rows<bf16>,
    ) -> Result<(), RuntimeError> {
        let experts = self.experts.as_ref().ok_or(RuntimeError::NoExpertTables)?;
        let routing = routing(&experts.chosen, experts.count, experts.top_k)?;
        let x = to_read(&mut self.x, x)?;
        let width = gate_up.width() / 2;
        let [gate, up] = to_update(&mut self.outs[0], gate_up)?.split_cols([width; 2])?;
        let out = GateUpOut { gate, up };
        let mut ctx = self.runtime.context(Stream::OWN, &mut self.scratch);
        self.runtime.apply_expert_gate_up(
            &mut ctx,
            &experts.rows,
            layer,
            routing.token_x(x),
            out,
        )?;
        self.read_back([gate_up])
    }

    /// Adds deltas to down of the chosen experts, before the weighted sum. `x` has one row a row of `down`.
    ///
    /// # Errors
    /// As [`LoraRuntime::apply_expert_down`].
    pub fn add_expert_down(
        &mut self,
        layer: usize,
        x: &Rows<bf16>,
        down: &mut Rows<bf16>,
    ) -> Result<(), RuntimeError> {
        let experts = self.experts.as_ref().ok_or(RuntimeError::NoExpertTables)?;
        let x = to_read(&mut self.x, x)?;
        let out = to_update(&mut self.outs[0], down)?;
        let mut ctx = self.runtime.context(Stream::OWN, &mut self.scratch);
        self.runtime
            .apply_expert_down(&mut ctx, &experts.rows, layer, x, out)?;
        self.read_back([down])
    }

    /// Waits for the launch and fetches its outputs.
    fn read_back<const N: usize>(&self, outs: [&mut Rows<bf16>; N]) -> Result<(), RuntimeError> {
        self.runtime.synchronize(Stream::OWN)?;
        for (out, buffer) in outs.into_iter().zip(&self.outs) {
            let values = buffer.download(0, out.values().len())?;
            out.values_mut().copy_from_slice(&values);
        }
        Ok(())
    }
}

impl ExpertStep {
    fn new(runtime: &LoraRuntime, max_rows: u32, top_k: NonZeroU32) -> Result<Self, RuntimeError> {
        Ok(Self {
            chosen: runtime.buffer(&vec![0_i32; max_rows as usize])?,
            top_k,
            rows: runtime.expert_rows(max_rows)?,
            count: 0,
        })
    }
}

fn routing(
    chosen: &DeviceBuffer,
    count: usize,
    top_k: NonZeroU32,
) -> Result<ExpertRouting<'_>, KernelError> {
    let experts = chosen.expert_ids(count)?;
    Ok(ExpertRouting::Unsorted { experts, top_k })
}

fn to_read<'a>(buffer: &'a mut DeviceBuffer, rows: &Rows<bf16>) -> Result<MatRef<'a>, KernelError> {
    buffer.upload(0, rows.values())?;
    buffer.mat(rows.len(), rows.width(), rows.width())
}

fn to_update<'a>(
    buffer: &'a mut DeviceBuffer,
    rows: &Rows<bf16>,
) -> Result<MatMut<'a>, KernelError> {
    buffer.upload(0, rows.values())?;
    buffer.mat_mut(rows.len(), rows.width(), rows.width())
}

/// Inputs or outputs of the widest projection that an adapter may touch; gate and up of an expert side by side count as one.
fn widest_projection(runtime: &LoraRuntime) -> usize {
    let model = runtime.model();
    let layers = 0..model.layers.len();
    let dense = layers
        .flat_map(|layer| LoraModule::every().filter_map(move |module| module.dims(model, layer)));
    let experts = ExpertProj::ALL.into_iter();
    let experts = experts
        .filter_map(|proj| proj.dims(model))
        .map(|(n_out, k_in)| (2 * n_out, k_in));
    let router = model.moe.as_ref().map(|moe| (moe.num_experts, 0));
    let all = dense.chain(experts).chain(router);
    all.map(|(n_out, k_in)| n_out.max(k_in)).max().unwrap_or(1)
}
