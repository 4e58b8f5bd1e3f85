//! A whole expert block against what PEFT gave: routing, both launches, activation and weighted sum, every token with its own adapter.
//!
//! Recorded are the block's input and output, the experts and weights that the router chose, and the stacked parameters before and after. Base
//! projections are computed from the parameters before, deltas come from the runtime, and the tolerance of each projection ([`super::Worst`]) is carried
//! through activation and sum to the block's output.

mod run;

pub(in crate::verify) use run::{BlockOutcome, BlockRun};

use super::golden::{Tensors, matrix};
use super::matrix::Matrix;
use super::stacked::expert_weight;
use lora_runtime::config::{ModelFamily, ModelSpec, MoeSpec};
use lora_runtime::weights::ExpertProj;
use std::num::NonZeroU32;

/// Largest distance, as a fraction of the largest base output, at which a recorded base still is what its parameters give: they are F32 both.
const SAME_BASE: f32 = 1e-4;

/// What a family's experts do between gate, up and down.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Activation {
    /// `silu(gate) * up`
    Silu,
    /// GPT-OSS: `(up + 1) * gate * sigmoid(1.702 * gate)`, gate at most 7, up within 7 of 0 (the defaults of its config class).
    ClampedSwish,
}

impl Activation {
    /// `None` where it is not known.
    fn of(spec: &ModelSpec) -> Option<Self> {
        match spec.family {
            ModelFamily::GptOss => Some(Self::ClampedSwish),
            _ if spec.hidden_act == "silu" => Some(Self::Silu),
            _ => None,
        }
    }

    fn apply(self, gate: f32, up: f32) -> f32 {
        let swish = |x: f32, slope: f32| x / (1.0 + (-slope * x).exp());
        match self {
            Self::Silu => swish(gate, 1.0) * up,
            Self::ClampedSwish => (up.clamp(-7.0, 7.0) + 1.0) * swish(gate.min(7.0), 1.702),
        }
    }

    /// How far the result may be off where gate and up are off by so much.
    fn spread(self, (gate, up): (f32, f32), (gate_off, up_off): (f64, f64)) -> f64 {
        let at = f64::from(self.apply(gate, up));
        let corners = [(-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0)];
        let off = corners.map(|(g, u)| {
            let moved = self.apply(
                (f64::from(gate) + g * gate_off) as f32,
                (f64::from(up) + u * up_off) as f32,
            );
            (f64::from(moved) - at).abs()
        });
        off.into_iter().fold(0.0, f64::max)
    }
}

/// A recorded block.
#[derive(Debug, Clone)]
pub struct GoldenBlock {
    /// Its path.
    pub path: String,
    /// Global layer index.
    pub layer: usize,
    /// `[tokens, hidden]`.
    hidden: Matrix,
    /// `[tokens, hidden]`: what PEFT gave.
    out: Matrix,
    /// Expert of each row; rows are tokens times top-k, or sorted by expert, a row a token.
    experts: Vec<usize>,
    /// Weight of each row in its token's sum.
    weights: Vec<f32>,
    top_k: NonZeroU32,
    /// Rows are sorted by expert.
    is_sorted: bool,
    activation: Activation,
    /// `[out, in]` of each expert and projection, before and after.
    before: Vec<[Matrix; 3]>,
    after: Vec<[Matrix; 3]>,
}

impl GoldenBlock {
    /// The block at `path`; `None` where routing, a parameter or the activation is not known, or biases take part, which are not recorded.
    pub(super) fn read(
        tensors: &Tensors,
        path: &str,
        spec: &ModelSpec,
    ) -> Result<Option<Self>, String> {
        let (Some(moe), Some(activation)) = (&spec.moe, Activation::of(spec)) else {
            return Ok(None);
        };
        let recorded = |name: &str| tensors.contains_key(&format!("{path}{name}"));
        if !recorded(".gate_up_proj|w_adapted") || !recorded(".down_proj|w_adapted") {
            return Ok(None);
        }
        let Some(layer) = super::stacked::layer_of(path) else {
            return Ok(None);
        };
        let hidden = matrix(tensors, path, "hidden")?;
        let tokens = hidden.shape().0;
        let is_sorted = !recorded("|top_k_index");
        let (experts, weights, top_k) = if is_sorted {
            let run = tokens / moe.num_experts.max(1);
            let experts = (0..tokens).map(|row| row / run.max(1)).collect();
            (experts, vec![1.0; tokens], 1)
        } else {
            let (chosen, weights) = (
                matrix(tensors, path, "top_k_index")?,
                matrix(tensors, path, "top_k_weights")?,
            );
            if chosen.shape() != weights.shape() || chosen.shape().0 != tokens {
                return Err(format!("{path}: routing is not that of {tokens} tokens"));
            }
            let all = |m: &Matrix| -> Vec<f32> {
                (0..tokens).flat_map(|row| m.row(row).to_vec()).collect()
            };
            let experts = all(&chosen).into_iter().map(|expert| expert as usize);
            (experts.collect(), all(&weights), chosen.shape().1)
        };
        let block = Self {
            path: path.to_owned(),
            layer,
            out: matrix(tensors, path, "out")?,
            hidden,
            experts,
            weights,
            top_k: u32::try_from(top_k)
                .ok()
                .and_then(NonZeroU32::new)
                .ok_or_else(|| format!("{path}: no expert is chosen"))?,
            is_sorted,
            activation,
            before: stacked_weights(tensors, path, "w", moe)?,
            after: stacked_weights(tensors, path, "w_adapted", moe)?,
        };
        if let Some(expert) = block.experts.iter().find(|e| **e >= moe.num_experts) {
            return Err(format!(
                "{path}: expert {expert} of {} is chosen",
                moe.num_experts
            ));
        }
        Ok(block
            .base_follows(&matrix(tensors, path, "base")?)
            .then_some(block))
    }

    /// Tokens.
    pub(super) fn tokens(&self) -> usize {
        self.hidden.shape().0
    }

    /// Rows of the block's projections.
    fn rows(&self) -> usize {
        self.experts.len()
    }

    fn token(&self, row: usize) -> usize {
        row / self.top_k.get() as usize
    }

    /// `x * w^T` of a row of the block, by its expert.
    fn product(
        &self,
        weights: &[[Matrix; 3]],
        row: usize,
        proj: ExpertProj,
        x: &[f32],
    ) -> Vec<f32> {
        let weight = &weights[self.experts[row]][proj as usize];
        let x = Matrix::new(1, x.len(), x.to_vec());
        x.times_transposed(weight).row(0).to_vec()
    }

    /// The weighted sum over each token's rows.
    fn sum(&self, rows: &[Vec<f32>]) -> Matrix {
        let (tokens, width) = self.out.shape();
        let mut total = Matrix::new(tokens, width, vec![0.0; tokens * width]);
        for (row, values) in rows.iter().enumerate() {
            let to = total.row_mut(self.token(row));
            for (to, value) in to.iter_mut().zip(values) {
                *to += self.weights[row] * value;
            }
        }
        total
    }

    /// Whether the parameters alone give the recorded base.
    fn base_follows(&self, base: &Matrix) -> bool {
        let rows: Vec<Vec<f32>> = (0..self.rows())
            .map(|row| {
                let x = self.hidden.row(self.token(row));
                let project = |proj| self.product(&self.before, row, proj, x);
                let (gate, up) = (project(ExpertProj::Gate), project(ExpertProj::Up));
                let pairs = gate.iter().zip(&up);
                let act: Vec<f32> = pairs.map(|(g, u)| self.activation.apply(*g, *u)).collect();
                self.product(&self.before, row, ExpertProj::Down, &act)
            })
            .collect();
        let computed = self.sum(&rows);
        let tokens = 0..base.shape().0;
        let values =
            |m: &Matrix| -> Vec<f32> { tokens.clone().flat_map(|t| m.row(t).to_vec()).collect() };
        let (computed, base) = (values(&computed), values(base));
        let largest = base.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
        let pairs = computed.iter().zip(&base);
        computed.len() == base.len()
            && pairs
                .into_iter()
                .all(|(a, b)| (a - b).abs() <= SAME_BASE * largest)
    }
}

fn stacked_weights(
    tensors: &Tensors,
    path: &str,
    role: &str,
    moe: &MoeSpec,
) -> Result<Vec<[Matrix; 3]>, String> {
    let experts = (0..moe.num_experts).map(|expert| {
        let weight = |parameter: &str, proj| {
            let name = format!("{path}.{parameter}|{role}");
            expert_weight(tensors, &name, expert, (proj, moe))
        };
        Ok([
            weight("gate_up_proj", ExpertProj::Gate)?,
            weight("gate_up_proj", ExpertProj::Up)?,
            weight("down_proj", ExpertProj::Down)?,
        ])
    });
    experts.collect()
}
