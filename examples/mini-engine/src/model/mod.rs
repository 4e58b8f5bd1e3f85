//! The forward pass of a step: base projections here, the delta of each added right after it.

mod attention;
mod linear_attention;
mod mlp;
mod moe;

use crate::checkpoint::Checkpoint;
use crate::math::{Linear, RmsNorm, Rows};
use crate::{Deltas, EngineError, ModelConfig, SequenceCache};
use attention::Attention;
use half::bf16;
use linear_attention::LinearAttention;
use lora_runtime::config::FfnKind;
use mlp::Mlp;
use moe::MoeBlock;
use std::path::Path;

/// One row of a step: a token of a sequence. Rows of one sequence stand in the order of their positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRow {
    /// Index of the sequence in [`Step::caches`].
    pub sequence: usize,
    /// The token.
    pub token: u32,
    /// Tokens of the sequence before it.
    pub position: usize,
}

/// What a step computes on. The deltas have been routed for these rows.
#[derive(Debug)]
pub struct Step<'a> {
    /// Rows of any sequences: prefill and decode together.
    pub rows: &'a [StepRow],
    /// What each sequence remembers.
    pub caches: Vec<&'a mut SequenceCache>,
    /// Where deltas are added.
    pub deltas: &'a mut Deltas,
}

/// A decoder-only model.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    embedding: Rows<f32>,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
}

#[derive(Debug)]
struct Layer {
    mixer_norm: RmsNorm,
    mixer: Mixer,
    ffn_norm: RmsNorm,
    ffn: Ffn,
}

#[derive(Debug)]
enum Mixer {
    Attention(Attention),
    Linear(LinearAttention),
}

#[derive(Debug)]
enum Ffn {
    Dense(Mlp),
    Moe(MoeBlock),
}

impl Model {
    /// Reads `config.json` and every `*.safetensors` in `dir`.
    ///
    /// # Errors
    /// As [`ModelConfig::open`] and [`Checkpoint`]'s.
    pub fn open(dir: &Path) -> Result<Self, EngineError> {
        let config = ModelConfig::open(dir)?;
        let mut checkpoint = Checkpoint::open(dir)?;
        let (vocab, hidden) = (config.spec.vocab_size, config.spec.hidden_size);
        let embedding = checkpoint.take("model.embed_tokens.weight", &[vocab, hidden])?;
        let head = match config.spec.tied_embeddings {
            true => Linear::new(Rows::new(hidden, embedding.clone())),
            false => checkpoint.linear("lm_head", vocab, hidden)?,
        };
        let layers = 0..config.spec.layers.len();
        let layers = layers
            .map(|layer| Layer::open(&config, layer, &mut checkpoint))
            .collect::<Result<_, _>>()?;
        let norm = config.norm(&mut checkpoint, "model.norm", hidden)?;
        checkpoint.finish()?;
        Ok(Self {
            config,
            embedding: Rows::new(hidden, embedding),
            layers,
            norm,
            head,
        })
    }

    /// The model's config.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The tables of the vocabulary, `[vocabulary, hidden]`: embedding and head.
    pub fn vocabulary(&self) -> [&Rows<f32>; 2] {
        [&self.embedding, self.head.weight()]
    }

    /// Passes the rows of a step through the model: the logits of each, `[rows, vocabulary]`.
    ///
    /// # Errors
    /// A delta that is refused.
    pub fn forward(&self, mut step: Step<'_>) -> Result<Rows<f32>, EngineError> {
        let tokens: Vec<i32> = step.rows.iter().map(|row| row.token as i32).collect();
        let embedded = step.rows.iter().flat_map(|row| {
            let row = self.embedding.row(row.token as usize);
            row.iter().copied()
        });
        let mut embedded = Rows::rounded(self.embedding.width(), embedded);
        step.deltas.replace_embeddings(&tokens, &mut embedded)?;
        let mut hidden = Rows::new(embedded.width(), crate::math::widened(embedded.values()));
        for layer in &self.layers {
            layer.forward(&mut hidden, &mut step)?;
        }
        for row in step.rows {
            step.caches[row.sequence].len = row.position + 1;
        }
        let normed = self.norm.forward(&hidden);
        let logits = normed.iter().flat_map(|row| self.head.row(row)).collect();
        let mut logits = Rows::new(self.head.outputs(), logits);
        step.deltas.replace_logits(&normed, &mut logits)?;
        Ok(logits)
    }
}

impl Layer {
    fn open(
        config: &ModelConfig,
        layer: usize,
        checkpoint: &mut Checkpoint,
    ) -> Result<Self, EngineError> {
        let prefix = format!("model.layers.{layer}");
        let hidden = config.spec.hidden_size;
        let spec = config.spec.layers[layer];
        let mixer = match spec.attention.is_attention() {
            true => Mixer::Attention(Attention::open(config, layer, checkpoint)?),
            false => Mixer::Linear(LinearAttention::open(config, layer, checkpoint)?),
        };
        let ffn = match spec.ffn {
            FfnKind::Dense { width } => Ffn::Dense(Mlp::open((hidden, width), layer, checkpoint)?),
            FfnKind::Moe => Ffn::Moe(MoeBlock::open(config, layer, checkpoint)?),
            FfnKind::Absent => {
                return Err(EngineError::Unsupported {
                    what: format!("layer {layer} has no feed-forward block"),
                });
            }
        };
        let mut norm =
            |name: &str| config.norm(checkpoint, &format!("{prefix}.{name}_layernorm"), hidden);
        Ok(Self {
            mixer_norm: norm("input")?,
            mixer,
            ffn_norm: norm("post_attention")?,
            ffn,
        })
    }

    fn forward(&self, hidden: &mut Rows<f32>, step: &mut Step<'_>) -> Result<(), EngineError> {
        let x = self.mixer_norm.forward(hidden);
        let mixed = match &self.mixer {
            Mixer::Attention(attention) => attention.forward(&x, step)?,
            Mixer::Linear(linear) => linear.forward(&x, step)?,
        };
        add(hidden, &mixed);
        let x = self.ffn_norm.forward(hidden);
        let fed = match &self.ffn {
            Ffn::Dense(mlp) => mlp.forward(&x, step.deltas)?,
            Ffn::Moe(moe) => moe.forward(&x, step.deltas)?,
        };
        add(hidden, &fed);
        Ok(())
    }
}

/// Adds a block's output to the residual stream.
fn add(hidden: &mut Rows<f32>, block: &Rows<bf16>) {
    for (hidden, block) in hidden.values_mut().iter_mut().zip(block.values()) {
        *hidden += block.to_f32();
    }
}
