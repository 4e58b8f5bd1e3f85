//! A mixture of experts.

use crate::checkpoint::Checkpoint;
use crate::math::{Linear, Rows, gated, largest, softmax, widened};
use crate::{Deltas, EngineError, ModelConfig};
use half::bf16;
use lora_runtime::config::MoeSpec;

#[derive(Debug)]
pub(super) struct MoeBlock {
    layer: usize,
    top_k: usize,
    expert_width: usize,
    /// The weights of the chosen experts are scaled to sum to 1.
    renormalises: bool,
    router: Linear,
    experts: Vec<Expert>,
}

#[derive(Debug)]
struct Expert {
    /// Gate, then up.
    gate_up: Linear,
    down: Linear,
}

impl MoeBlock {
    pub(super) fn open(
        config: &ModelConfig,
        layer: usize,
        checkpoint: &mut Checkpoint,
    ) -> Result<Self, EngineError> {
        let Some(moe) = &config.spec.moe else {
            return Err(EngineError::Unsupported {
                what: format!("layer {layer} is a mixture of experts of no stated size"),
            });
        };
        let hidden = config.spec.hidden_size;
        let names = Names::of(checkpoint, &format!("model.layers.{layer}"), moe);
        Ok(Self {
            layer,
            top_k: moe.top_k,
            expert_width: moe.expert_width,
            renormalises: moe.norm_topk_prob,
            router: checkpoint.linear(&names.router, moe.num_experts, hidden)?,
            experts: names.experts(checkpoint, hidden, moe)?,
        })
    }

    pub(super) fn forward(
        &self,
        x: &Rows<bf16>,
        deltas: &mut Deltas,
    ) -> Result<Rows<bf16>, EngineError> {
        let mut logits = self.router.forward(x);
        // Before top-k: an adapter may send a token to other experts.
        deltas.add_router(self.layer, x, &mut logits)?;
        let routes = logits.iter().map(|token| self.route(token));
        let (chosen, weights): (Vec<usize>, Vec<f32>) = routes.flatten().unzip();
        deltas.route_experts(&chosen)?;

        let (width, hidden) = (self.expert_width, x.width());
        let rows = || {
            chosen
                .iter()
                .map(|expert| &self.experts[*expert])
                .enumerate()
        };
        let gate_up = rows().flat_map(|(row, expert)| expert.gate_up.row(x.row(row / self.top_k)));
        let mut gate_up = Rows::rounded(2 * width, gate_up);
        deltas.add_expert_gate_up(self.layer, x, &mut gate_up)?;
        let inner = gate_up
            .iter()
            .flat_map(|row| gated(&row[..width], &row[width..]));
        let inner = Rows::rounded(width, inner);
        let down = rows().flat_map(|(row, expert)| expert.down.row(inner.row(row)));
        let mut down = Rows::rounded(hidden, down);
        // Before the weighted sum, so that the router's weight multiplies base and delta.
        deltas.add_expert_down(self.layer, &inner, &mut down)?;

        let mut sums = vec![0.0; x.len() * hidden];
        for (row, (weight, down)) in weights.iter().zip(down.iter()).enumerate() {
            let sum = &mut sums[row / self.top_k * hidden..][..hidden];
            for (sum, value) in sum.iter_mut().zip(down) {
                *sum += weight * value.to_f32();
            }
        }
        Ok(Rows::rounded(hidden, sums))
    }

    /// A token's experts, each with its weight.
    fn route(&self, logits: &[bf16]) -> Vec<(usize, f32)> {
        let mut shares = widened(logits);
        softmax(&mut shares);
        let chosen = largest(&shares, self.top_k);
        let total: f32 = match self.renormalises {
            true => chosen.iter().map(|expert| shares[*expert]).sum(),
            false => 1.0,
        };
        let weighted = chosen
            .into_iter()
            .map(|expert| (expert, shares[expert] / total));
        weighted.collect()
    }
}

/// How a checkpoint spells the block: experts stacked into two tensors, or one by one.
struct Names {
    router: String,
    experts: String,
    /// Gate, up and down of an expert by itself.
    projections: [&'static str; 3],
}

impl Names {
    fn of(checkpoint: &Checkpoint, layer: &str, moe: &MoeSpec) -> Self {
        let mixtral = format!("{layer}.block_sparse_moe");
        let (block, router, projections) = match checkpoint.has(&format!("{mixtral}.gate.weight")) {
            true => (mixtral, "gate", ["w1", "w3", "w2"]),
            false => (
                format!("{layer}.{}", moe.block_name),
                moe.router_name,
                ["gate_proj", "up_proj", "down_proj"],
            ),
        };
        Self {
            router: format!("{block}.{router}"),
            experts: format!("{block}.experts"),
            projections,
        }
    }

    fn experts(
        &self,
        checkpoint: &mut Checkpoint,
        hidden: usize,
        moe: &MoeSpec,
    ) -> Result<Vec<Expert>, EngineError> {
        let (count, width) = (moe.num_experts, moe.expert_width);
        let expert = |gate_up: Vec<f32>, down: Vec<f32>| Expert {
            gate_up: Linear::new(Rows::new(hidden, gate_up)),
            down: Linear::new(Rows::new(width, down)),
        };
        let stacked = ["gate_up_proj", "down_proj"].map(|name| format!("{}.{name}", self.experts));
        if checkpoint.has(&stacked[0]) {
            let gate_up = checkpoint.take(&stacked[0], &[count, 2 * width, hidden])?;
            let down = checkpoint.take(&stacked[1], &[count, hidden, width])?;
            let gate_up = gate_up.chunks_exact(2 * width * hidden);
            let experts = gate_up.zip(down.chunks_exact(hidden * width));
            return Ok(experts
                .map(|(gate_up, down)| expert(gate_up.to_vec(), down.to_vec()))
                .collect());
        }
        let one = |n: usize| {
            let mut take = |projection: usize, shape: [usize; 2]| {
                let name = self.projections[projection];
                checkpoint.take(&format!("{}.{n}.{name}.weight", self.experts), &shape)
            };
            let mut gate_up = take(0, [width, hidden])?;
            gate_up.extend(take(1, [width, hidden])?);
            Ok(expert(gate_up, take(2, [hidden, width])?))
        };
        (0..count).map(one).collect()
    }
}
