//! Linear attention: the gated delta net of Qwen3.5.

use super::Step;
use crate::cache::LayerCache;
use crate::checkpoint::Checkpoint;
use crate::math::{Linear, RmsNorm, Rows, dot, sigmoid, silu, widened};
use crate::{EngineError, ModelConfig};
use half::bf16;
use lora_runtime::config::LinearAttentionSpec;
use lora_runtime::weights::LoraModule;

#[derive(Debug)]
pub(super) struct LinearAttention {
    layer: usize,
    spec: LinearAttentionSpec,
    qkv: Linear,
    z: Linear,
    a: Linear,
    b: Linear,
    out: Linear,
    /// One row a channel of q, k and v: a filter over its last inputs.
    conv: Rows<f32>,
    /// Rate of each head's decay.
    decay: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: RmsNorm,
}

/// What a row brings to each head.
struct Projected<'a> {
    /// q, k and v, one after the other, after the convolution.
    qkv: &'a [f32],
    z: &'a [bf16],
    a: &'a [bf16],
    b: &'a [bf16],
}

impl LinearAttention {
    pub(super) fn open(
        config: &ModelConfig,
        layer: usize,
        checkpoint: &mut Checkpoint,
    ) -> Result<Self, EngineError> {
        let Some(spec) = config.spec.linear_attention.clone() else {
            return Err(EngineError::Unsupported {
                what: format!("layer {layer} is linear attention of no stated size"),
            });
        };
        let prefix = format!("model.layers.{layer}.linear_attn");
        let hidden = config.spec.hidden_size;
        let (heads, width) = (spec.value_heads, spec.value_width());
        let channels = 2 * spec.key_width() + width;
        let conv = checkpoint.take(
            &format!("{prefix}.conv1d.weight"),
            &[channels, 1, config.conv_width],
        )?;
        let a_log = checkpoint.take(&format!("{prefix}.A_log"), &[heads])?;
        let mut linear = |name: &str, outputs, inputs| {
            checkpoint.linear(&format!("{prefix}.{name}"), outputs, inputs)
        };
        Ok(Self {
            layer,
            qkv: linear("in_proj_qkv", channels, hidden)?,
            z: linear("in_proj_z", width, hidden)?,
            a: linear("in_proj_a", heads, hidden)?,
            b: linear("in_proj_b", heads, hidden)?,
            out: linear("out_proj", hidden, width)?,
            conv: Rows::new(config.conv_width, conv),
            decay: a_log.iter().map(|log| log.exp()).collect(),
            dt_bias: checkpoint.take(&format!("{prefix}.dt_bias"), &[heads])?,
            norm: checkpoint.norm(
                &format!("{prefix}.norm"),
                spec.value_head_dim,
                (0.0, config.norm_eps),
            )?,
            spec,
        })
    }

    pub(super) fn forward(
        &self,
        x: &Rows<bf16>,
        step: &mut Step<'_>,
    ) -> Result<Rows<bf16>, EngineError> {
        let (mut qkv, mut z) = (self.qkv.forward(x), self.z.forward(x));
        let (mut a, mut b) = (self.a.forward(x), self.b.forward(x));
        step.deltas.add(
            self.layer,
            x,
            [
                (LoraModule::InProjQkv, &mut qkv),
                (LoraModule::InProjZ, &mut z),
                (LoraModule::InProjA, &mut a),
                (LoraModule::InProjB, &mut b),
            ],
        )?;
        let mut mixed = Vec::with_capacity(x.len() * self.z.outputs());
        for (index, row) in step.rows.iter().enumerate() {
            let cache = &mut step.caches[row.sequence].layers[self.layer];
            let qkv = self.convolve(qkv.row(index), &mut cache.conv_inputs);
            let projected = Projected {
                qkv: &qkv,
                z: z.row(index),
                a: a.row(index),
                b: b.row(index),
            };
            for head in 0..self.spec.value_heads {
                mixed.extend(self.head(head, &projected, cache));
            }
        }
        let mixed = Rows::rounded(self.z.outputs(), mixed);
        let mut out = self.out.forward(&mixed);
        step.deltas
            .add(self.layer, &mixed, [(LoraModule::OutProj, &mut out)])?;
        Ok(out)
    }

    /// Each channel's filter over its last inputs and this one, which takes the place of the oldest.
    fn convolve(&self, row: &[bf16], inputs: &mut Vec<f32>) -> Vec<f32> {
        inputs.extend(widened(row));
        let channels = row.len();
        let channel = |(channel, filter): (usize, &[f32])| {
            let seen = inputs.iter().skip(channel).step_by(channels);
            silu(filter.iter().zip(seen).map(|(w, x)| w * x).sum())
        };
        let convolved = self.conv.iter().enumerate().map(channel).collect();
        inputs.drain(..channels);
        convolved
    }

    /// One value head: its state decays, moves towards what the row says, and answers the row's query.
    fn head(&self, head: usize, row: &Projected<'_>, cache: &mut LayerCache) -> Vec<f32> {
        let spec = &self.spec;
        let (key_dim, dim) = (spec.key_head_dim, spec.value_head_dim);
        let key_head = head * spec.key_heads / spec.value_heads;
        let (q, rest) = row.qkv.split_at(spec.key_width());
        let (k, v) = rest.split_at(spec.key_width());
        let q = unit(&q[key_head * key_dim..][..key_dim]);
        let k = unit(&k[key_head * key_dim..][..key_dim]);
        let v = &v[head * dim..][..dim];

        let softplus = (row.a[head].to_f32() + self.dt_bias[head]).exp().ln_1p();
        let keep = (-self.decay[head] * softplus).exp();
        let rate = sigmoid(row.b[head].to_f32());
        let state = &mut cache.recurrent[head * key_dim * dim..][..key_dim * dim];
        state.iter_mut().for_each(|value| *value *= keep);
        let recalled = recall(state, &k, dim);
        for (row, k) in state.chunks_exact_mut(dim).zip(&k) {
            for (at, value) in row.iter_mut().enumerate() {
                *value += k * (v[at] - recalled[at]) * rate;
            }
        }
        let scale = (key_dim as f32).sqrt().recip();
        let answer: Vec<f32> = recall(state, &q, dim).iter().map(|x| x * scale).collect();
        let gates = row.z[head * dim..][..dim].iter();
        let normed = self.norm.row(&answer).zip(gates);
        normed.map(|(x, gate)| x * silu(gate.to_f32())).collect()
    }
}

/// The state's rows summed by `key`.
fn recall(state: &[f32], key: &[f32], dim: usize) -> Vec<f32> {
    let mut sum = vec![0.0; dim];
    for (row, key) in state.chunks_exact(dim).zip(key) {
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum += key * value;
        }
    }
    sum
}

/// `x` scaled to length 1.
fn unit(x: &[f32]) -> Vec<f32> {
    let scale = (dot(x, x) + 1e-6).sqrt().recip();
    x.iter().map(|x| x * scale).collect()
}
