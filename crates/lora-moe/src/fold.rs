//! Folds that read routing on the device: one launch for all experts and all adapters of a batch, legal under graph capture.

use crate::{ExpertTables, MoeError};
use lora_config::GateUpOrder;
use lora_kernels::{
    Applied, ExpertRouting, GateUpOut, KernelError, LaunchContext, LoraBackend, MatMut, MatRef,
    RouteSite, RoutedX, RowGroups, RowGroupsSpec, SiteKind, Stream, TokenAdapters, apply_lora_bgmv,
};
use lora_weights::ExpertProj;
use lora_weights::device::{DeviceMemory, LoraRoute};
use std::sync::Arc;

/// The rows of a MoE block, grouped by (adapter, expert), in device buffers allocated once.
///
/// [`build`](Self::build) runs once a layer, after its top-k; gate, up and down of that layer share the result. Layers on one stream share one.
#[derive(Debug)]
pub struct ExpertRows {
    groups: RowGroups,
}

impl ExpertRows {
    /// Room for `max_rows` rows: tokens times top-k. `small_max` as in [`RowGroupsSpec::small_max`].
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for sizes outside the limits; what the allocation gives.
    pub fn new(
        memory: Arc<dyn DeviceMemory>,
        tables: &ExpertTables,
        max_rows: u32,
        small_max: u32,
    ) -> Result<Self, KernelError> {
        let spec = RowGroupsSpec::experts(max_rows, tables.entries(), small_max);
        Ok(Self {
            groups: RowGroups::new(memory, spec)?,
        })
    }

    /// Enqueues the grouping of a layer's rows; `adapters` has one slot a token. A row without an adapter that is resident, or with an expert past
    /// the model's, is in no group and keeps its bits.
    ///
    /// # Errors
    /// As [`RowGroups::build_experts`].
    pub fn build(
        &mut self,
        queue: (&dyn LoraBackend, Stream),
        tables: &ExpertTables,
        routing: ExpertRouting<'_>,
        adapters: TokenAdapters<'_>,
    ) -> Result<(), KernelError> {
        self.groups
            .build_experts(queue, routing, adapters, tables.space()?)
    }

    /// The groups: what launches read.
    pub fn groups(&self) -> &RowGroups {
        &self.groups
    }
}

/// The expert tables of one layer, by copy: what an engine installs on a MoE block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertFold {
    gate: LoraRoute,
    up: LoraRoute,
    down: LoraRoute,
}

impl ExpertFold {
    /// The tables of `layer`, by its global index.
    ///
    /// # Errors
    /// [`MoeError::NotMoe`].
    pub fn new(tables: &ExpertTables, layer: usize) -> Result<Self, MoeError> {
        let route = |proj| tables.route(layer, proj).ok_or(MoeError::NotMoe { layer });
        Ok(Self {
            gate: route(ExpertProj::Gate)?,
            up: route(ExpertProj::Up)?,
            down: route(ExpertProj::Down)?,
        })
    }

    /// Deltas of gate and up in one launch, before the activation. x is `[tokens, hidden]`, read as `routing` says; the outs are `[rows, expert width]`. An engine
    /// whose x is one row a row of out gives [`RoutedX::same_rows`] to [`apply_gate_up_rows`](Self::apply_gate_up_rows).
    ///
    /// # Errors
    /// As [`apply_lora_bgmv`].
    pub fn apply_gate_up<'x>(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: &ExpertRows,
        routing: ExpertRouting<'x>,
        x: MatRef<'x>,
        out: GateUpOut<'_>,
    ) -> Result<Applied, KernelError> {
        self.apply_gate_up_rows(ctx, rows, routing.token_x(x), out)
    }

    /// [`apply_gate_up`](Self::apply_gate_up) with an x that says itself which of its rows each row of out reads.
    ///
    /// # Errors
    /// As [`apply_lora_bgmv`].
    pub fn apply_gate_up_rows(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: &ExpertRows,
        x: RoutedX<'_>,
        out: GateUpOut<'_>,
    ) -> Result<Applied, KernelError> {
        let mut sites = [
            RouteSite {
                route: self.gate,
                out: out.gate,
            },
            RouteSite {
                route: self.up,
                out: out.up,
            },
        ];
        apply_lora_bgmv(ctx, SiteKind::Expert, x, &rows.groups, &mut sites)
    }

    /// [`apply_gate_up_rows`](Self::apply_gate_up_rows) where gate and up are columns of one out, `[rows, 2 x expert width]`, as a base with a stacked `gate_up_proj`
    /// gives it.
    ///
    /// # Errors
    /// [`MoeError::InterleavedOut`] for the order of GPT-OSS, whose columns alternate; [`KernelError::OutOfRange`] where out is narrower than two
    /// experts; as [`apply_lora_bgmv`].
    pub fn apply_fused_gate_up(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: &ExpertRows,
        x: RoutedX<'_>,
        out: MatMut<'_>,
        order: GateUpOrder,
    ) -> Result<Applied, MoeError> {
        if order == GateUpOrder::Interleaved {
            let width = out.cols();
            return Err(MoeError::InterleavedOut { width });
        }
        let (gate, up) = (self.gate.n_out as usize, self.up.n_out as usize);
        let [gate, up] = out.split_cols([gate, up])?;
        Ok(self.apply_gate_up_rows(ctx, rows, x, GateUpOut { gate, up })?)
    }

    /// Delta of one projection alone: blocks that have no gate, or one launch for each. x of gate and up as
    /// [`ExpertRouting::token_x`] gives it.
    ///
    /// # Errors
    /// As [`apply_lora_bgmv`].
    pub fn apply_projection<'x>(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: &ExpertRows,
        proj: ExpertProj,
        x: impl Into<RoutedX<'x>>,
        out: MatMut<'_>,
    ) -> Result<Applied, KernelError> {
        let route = match proj {
            ExpertProj::Gate => self.gate,
            ExpertProj::Up => self.up,
            ExpertProj::Down => self.down,
        };
        let mut sites = [RouteSite { route, out }];
        apply_lora_bgmv(ctx, SiteKind::Expert, x, &rows.groups, &mut sites)
    }

    /// Delta of down, before the weighted sum over a token's experts, so that the router weight multiplies base and delta alike. x is
    /// `[rows, expert width]`, out `[rows, hidden]`. Under tensor parallelism out must have been reduced over all ranks before.
    ///
    /// # Errors
    /// As [`apply_lora_bgmv`].
    pub fn apply_down(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: &ExpertRows,
        x: MatRef<'_>,
        out: MatMut<'_>,
    ) -> Result<Applied, KernelError> {
        self.apply_projection(ctx, rows, ExpertProj::Down, x, out)
    }
}

/// Adds to each row's gate logits the router delta of its own adapter, before top-k: the router as a table of one expert. `route` is
/// [`LoraWeights::router_route`](lora_weights::LoraWeights::router_route), `groups` those of the step's dense modules. x is `[rows, hidden]`, logits
/// `[rows, num_experts]` BF16.
///
/// # Errors
/// As [`apply_lora_bgmv`].
pub fn apply_router_lora_rows(
    ctx: &mut LaunchContext<'_>,
    route: LoraRoute,
    groups: &RowGroups,
    x: MatRef<'_>,
    logits: MatMut<'_>,
) -> Result<Applied, KernelError> {
    let mut sites = [RouteSite { route, out: logits }];
    apply_lora_bgmv(ctx, SiteKind::Router, x, groups, &mut sites)
}
