//! What a sequence remembers of its tokens, layer by layer.

use crate::ModelConfig;
use lora_runtime::config::AttentionKind;

/// What one layer remembers: keys and values that grow with the sequence, or the two states of linear attention, which do not.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LayerCache {
    /// `[positions, kv heads * head size]`, turned.
    pub keys: Vec<f32>,
    /// `[positions, kv heads * head size]`.
    pub values: Vec<f32>,
    /// The last inputs of the causal convolution, oldest first: `[conv width - 1, channels]`.
    pub conv_inputs: Vec<f32>,
    /// `[value heads, key head size, value head size]`.
    pub recurrent: Vec<f32>,
}

/// What a sequence remembers of the tokens that have passed through the model.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceCache {
    /// Tokens that have passed.
    pub len: usize,
    /// One entry a layer.
    pub layers: Vec<LayerCache>,
}

impl SequenceCache {
    /// A sequence of which no token has passed.
    pub fn new(config: &ModelConfig) -> Self {
        let linear = config.spec.linear_attention.as_ref();
        let layer = |kind: AttentionKind| match linear.filter(|_| !kind.is_attention()) {
            Some(linear) => LayerCache {
                conv_inputs: vec![
                    0.0;
                    (config.conv_width - 1)
                        * (2 * linear.key_width() + linear.value_width())
                ],
                recurrent: vec![0.0; linear.key_head_dim * linear.value_width()],
                ..LayerCache::default()
            },
            None => LayerCache::default(),
        };
        let layers = config.spec.layers.iter();
        Self {
            len: 0,
            layers: layers.map(|spec| layer(spec.attention)).collect(),
        }
    }
}
