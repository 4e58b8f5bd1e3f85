//! Softmax attention over the cache, grouped-query, with or without norms of heads and an output gate.

use super::{Step, StepRow};
use crate::cache::LayerCache;
use crate::checkpoint::Checkpoint;
use crate::math::{Linear, RmsNorm, Rope, Rows, dot, sigmoid, softmax, widened};
use crate::{EngineError, ModelConfig};
use half::bf16;
use lora_runtime::weights::LoraModule;

#[derive(Debug)]
pub(super) struct Attention {
    layer: usize,
    heads: usize,
    head_dim: usize,
    /// Query heads that share a key head.
    group: usize,
    is_gated: bool,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    head_norms: Option<[RmsNorm; 2]>,
    rope: Rope,
}

impl Attention {
    pub(super) fn open(
        config: &ModelConfig,
        layer: usize,
        checkpoint: &mut Checkpoint,
    ) -> Result<Self, EngineError> {
        let spec = &config.spec;
        let prefix = format!("model.layers.{layer}.self_attn");
        let (hidden, head_dim) = (spec.hidden_size, spec.head_dim);
        let head_norms = match config.has_head_norms {
            true => Some([
                config.norm(checkpoint, &format!("{prefix}.q_norm"), head_dim)?,
                config.norm(checkpoint, &format!("{prefix}.k_norm"), head_dim)?,
            ]),
            false => None,
        };
        let mut linear = |name: &str, outputs, inputs| {
            checkpoint.linear(&format!("{prefix}.{name}"), outputs, inputs)
        };
        Ok(Self {
            layer,
            heads: spec.heads,
            head_dim,
            group: spec.heads / spec.kv_heads,
            is_gated: spec.gated_attention,
            q: linear("q_proj", spec.q_width(), hidden)?,
            k: linear("k_proj", spec.kv_width(), hidden)?,
            v: linear("v_proj", spec.kv_width(), hidden)?,
            o: linear("o_proj", hidden, spec.attention_width())?,
            head_norms,
            rope: Rope::new(config.rope_theta, config.rope_dims),
        })
    }

    pub(super) fn forward(
        &self,
        x: &Rows<bf16>,
        step: &mut Step<'_>,
    ) -> Result<Rows<bf16>, EngineError> {
        let (mut q, mut k, mut v) = (self.q.forward(x), self.k.forward(x), self.v.forward(x));
        // Into the raw projections: before norms, rotation and the split of q from its gate.
        step.deltas.add(
            self.layer,
            x,
            [
                (LoraModule::QProj, &mut q),
                (LoraModule::KProj, &mut k),
                (LoraModule::VProj, &mut v),
            ],
        )?;
        let mut attended = Vec::with_capacity(x.len() * self.heads * self.head_dim);
        for (index, row) in step.rows.iter().enumerate() {
            let cache = &mut step.caches[row.sequence].layers[self.layer];
            self.remember(row, k.row(index), v.row(index), cache);
            self.attend(row, q.row(index), cache, &mut attended);
        }
        let attended = Rows::rounded(self.heads * self.head_dim, attended);
        let mut out = self.o.forward(&attended);
        step.deltas
            .add(self.layer, &attended, [(LoraModule::OProj, &mut out)])?;
        Ok(out)
    }

    /// Appends the row's keys and values to the cache.
    fn remember(&self, row: &StepRow, k: &[bf16], v: &[bf16], cache: &mut LayerCache) {
        for head in k.chunks_exact(self.head_dim) {
            cache.keys.extend(self.turned(1, head, row.position));
        }
        cache.values.extend(v.iter().map(|value| value.to_f32()));
    }

    /// Every head of the row over all positions up to its own.
    fn attend(&self, row: &StepRow, q: &[bf16], cache: &LayerCache, attended: &mut Vec<f32>) {
        let dim = self.head_dim;
        let kv_width = self.heads / self.group * dim;
        let scale = (dim as f32).sqrt().recip();
        for (head, q) in q.chunks_exact(q.len() / self.heads).enumerate() {
            let (q, gate) = q.split_at(dim);
            let q = self.turned(0, q, row.position);
            let at = |position: usize| position * kv_width + head / self.group * dim;
            let mut weights: Vec<f32> = (0..=row.position)
                .map(|position| dot(&q, &cache.keys[at(position)..][..dim]) * scale)
                .collect();
            softmax(&mut weights);
            let mut sum = vec![0.0; dim];
            for (position, weight) in weights.iter().enumerate() {
                let values = &cache.values[at(position)..][..dim];
                for (sum, value) in sum.iter_mut().zip(values) {
                    *sum += weight * value;
                }
            }
            if self.is_gated {
                let gates = sum.iter_mut().zip(gate);
                gates.for_each(|(sum, gate)| *sum *= sigmoid(gate.to_f32()));
            }
            attended.extend(sum);
        }
    }

    /// A head of q (`norm` 0) or k (1), normalised where the model does so, and turned.
    fn turned(&self, norm: usize, head: &[bf16], position: usize) -> Vec<f32> {
        let mut head = widened(head);
        if let Some(norms) = &self.head_norms {
            head = norms[norm].row(&head).collect();
        }
        self.rope.turn(&mut head, position);
        head
    }
}
