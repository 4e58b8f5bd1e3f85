//! Deltas of MoE blocks: router logits before top-k, and experts by the tables that follow the slots.

use crate::{LoraRuntime, RoutedBatch, RuntimeError};
use lora_kernels::{
    Applied, ExpertRouting, GateUpOut, LaunchContext, MatMut, MatRef, RoutedX, Stream,
    TokenAdapters,
};
use lora_moe::{ExpertFold, ExpertRows, apply_router_lora_rows};

impl LoraRuntime {
    /// Adds to every row of `out`, the router logits before top-k, the delta of the row's own adapter. Returns without a
    /// launch where the layer is not MoE or the pool has no room for experts.
    ///
    /// # Errors
    /// As [`apply_router_lora_rows`].
    pub fn apply_router(
        &self,
        ctx: &mut LaunchContext<'_>,
        batch: &RoutedBatch,
        layer: usize,
        x: MatRef<'_>,
        out: MatMut<'_>,
    ) -> Result<Applied, RuntimeError> {
        let Some(route) = self.weights().router_route(layer) else {
            return Ok(Applied::Empty);
        };
        Ok(apply_router_lora_rows(ctx, route, batch.groups(), x, out)?)
    }

    /// Device buffers for the rows (tokens times top-k) of MoE blocks, at most `max_rows` of them. Layers on one stream share one.
    ///
    /// # Errors
    /// [`RuntimeError::NoExpertTables`]; what the allocation gives.
    pub fn expert_rows(&self, max_rows: u32) -> Result<ExpertRows, RuntimeError> {
        let tables = self.expert_tables().ok_or(RuntimeError::NoExpertTables)?;
        let small_max = self.kernels().options().gemv_max_m;
        Ok(ExpertRows::new(self.memory(), tables, max_rows, small_max)?)
    }

    /// Routes the rows of a MoE block, once a layer, after its top-k: each follows the expert that `routing` says of the adapter of its token.
    /// `adapters` has one slot a token, such as [`RoutedBatch::token_adapters`] or an engine's own row map on the device. Legal under graph capture.
    ///
    /// # Errors
    /// [`RuntimeError::NoExpertTables`]; as [`ExpertRows::build`].
    pub fn route_experts<'a>(
        &self,
        rows: &mut ExpertRows,
        stream: Stream,
        routing: ExpertRouting<'_>,
        adapters: impl Into<TokenAdapters<'a>>,
    ) -> Result<(), RuntimeError> {
        let tables = self.expert_tables().ok_or(RuntimeError::NoExpertTables)?;
        let queue = (&**self.kernels().backend() as _, stream);
        Ok(rows.build(queue, tables, routing, adapters.into())?)
    }

    /// Deltas of the experts' gate and up in one launch, before the activation. x is what [`ExpertRouting::token_x`] makes of `[tokens, hidden]`, or one row a
    /// row of out; the outs are `[rows, expert width]`.
    ///
    /// # Errors
    /// As [`expert_fold`](Self::expert_fold) and [`ExpertFold::apply_gate_up_rows`].
    pub fn apply_expert_gate_up<'x>(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: &ExpertRows,
        layer: usize,
        x: impl Into<RoutedX<'x>>,
        out: GateUpOut<'_>,
    ) -> Result<Applied, RuntimeError> {
        let fold = self.expert_fold(layer)?;
        Ok(fold.apply_gate_up_rows(ctx, rows, x.into(), out)?)
    }

    /// Delta of the experts' down, before the weighted sum over a token's experts. x is `[rows, expert width]`, out `[rows, hidden]`, reduced over all ranks
    /// where the projection is row-parallel.
    ///
    /// # Errors
    /// As [`expert_fold`](Self::expert_fold) and [`ExpertFold::apply_down`].
    pub fn apply_expert_down(
        &self,
        ctx: &mut LaunchContext<'_>,
        rows: &ExpertRows,
        layer: usize,
        x: MatRef<'_>,
        out: MatMut<'_>,
    ) -> Result<Applied, RuntimeError> {
        Ok(self.expert_fold(layer)?.apply_down(ctx, rows, x, out)?)
    }

    /// The expert tables of a layer, by copy: addresses fixed for life.
    ///
    /// # Errors
    /// [`RuntimeError::NoExpertTables`]; [`MoeError::NotMoe`](lora_moe::MoeError::NotMoe).
    pub fn expert_fold(&self, layer: usize) -> Result<ExpertFold, RuntimeError> {
        let tables = self.expert_tables().ok_or(RuntimeError::NoExpertTables)?;
        Ok(ExpertFold::new(tables, layer)?)
    }
}
