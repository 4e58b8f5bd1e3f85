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
        let prefix = format!("model.layers.{layer}.{}", moe.block_name);
        let hidden = config.spec.hidden_size;
        let router = format!("{prefix}.{}", moe.router_name);
        Ok(Self {
            layer,
            top_k: moe.top_k,
            expert_width: moe.expert_width,
            renormalises: moe.norm_topk_prob,
            router: checkpoint.linear(&router, moe.num_experts, hidden)?,
            experts: experts(checkpoint, &format!("{prefix}.experts"), hidden, moe)?,
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

/// The experts of a layer, stored as two stacked tensors.
fn experts(
    checkpoint: &mut Checkpoint,
    prefix: &str,
    hidden: usize,
    moe: &MoeSpec,
) -> Result<Vec<Expert>, EngineError> {
    let (count, width) = (moe.num_experts, moe.expert_width);
    let shape = [count, 2 * width, hidden];
    let gate_up = checkpoint.take(&format!("{prefix}.gate_up_proj"), &shape)?;
    let down = checkpoint.take(&format!("{prefix}.down_proj"), &[count, hidden, width])?;
    let linear = |inputs, weight: &[f32]| Linear::new(Rows::new(inputs, weight.to_vec()));
    let gate_up = gate_up.chunks_exact(2 * width * hidden);
    let experts = gate_up.zip(down.chunks_exact(hidden * width));
    let experts = experts.map(|(gate_up, down)| Expert {
        gate_up: linear(hidden, gate_up),
        down: linear(width, down),
    });
    Ok(experts.collect())
}
