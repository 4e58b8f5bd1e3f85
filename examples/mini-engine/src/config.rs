//! What the forward pass needs of a model's `config.json`.

use crate::EngineError;
use crate::checkpoint::Checkpoint;
use crate::math::RmsNorm;
use lora_runtime::config::{AttentionKind, LinearInputs, ModelFamily, ModelSpec};
use serde::Deserialize;
use std::path::Path;

/// A model that this engine has blocks for.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// Geometry: what adapters are checked against, and most of what the blocks need.
    pub spec: ModelSpec,
    /// Added to a mean square before its root.
    pub norm_eps: f32,
    /// Added to the weights of every norm but that of linear attention: Qwen3.5 stores them around 0.
    pub norm_offset: f32,
    /// Queries and keys are normalised head by head before they are turned.
    pub has_head_norms: bool,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Values of a head that are turned.
    pub rope_dims: usize,
    /// Inputs that the causal convolution of linear attention sees.
    pub conv_width: usize,
}

#[derive(Deserialize)]
struct Numbers {
    rms_norm_eps: f32,
    /// Where configs before transformers 5 have what `rope_parameters` has.
    rope_theta: Option<f32>,
    rope_scaling: Option<serde_json::Value>,
    partial_rotary_factor: Option<f32>,
    #[serde(default)]
    rope_parameters: RopeParameters,
    linear_conv_kernel_dim: Option<usize>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
}

#[derive(Deserialize, Default)]
struct RopeParameters {
    rope_theta: Option<f32>,
    rope_type: Option<String>,
    partial_rotary_factor: Option<f32>,
}

impl ModelConfig {
    /// Reads `config.json` in `dir`.
    ///
    /// # Errors
    /// [`EngineError::File`], [`EngineError::Config`]; [`EngineError::Unsupported`] for what the blocks here do not compute.
    pub fn open(dir: &Path) -> Result<Self, EngineError> {
        let path = dir.join("config.json");
        let text =
            std::fs::read_to_string(&path).map_err(|error| EngineError::file(&path, error))?;
        let spec = ModelSpec::from_hf_config(&text)?;
        let numbers: Numbers =
            serde_json::from_str(&text).map_err(|error| EngineError::file(&path, error))?;
        check_supported(&spec, &numbers)?;
        let rope = &numbers.rope_parameters;
        let rope_theta = rope.rope_theta.or(numbers.rope_theta);
        let rope_share = rope.partial_rotary_factor.or(numbers.partial_rotary_factor);
        Ok(Self {
            norm_eps: numbers.rms_norm_eps,
            norm_offset: f32::from(u8::from(spec.family == ModelFamily::Qwen35)),
            has_head_norms: matches!(
                spec.family,
                ModelFamily::Qwen3 | ModelFamily::Qwen3Moe | ModelFamily::Qwen35
            ),
            rope_theta: rope_theta.ok_or_else(|| EngineError::Unsupported {
                what: "rope_theta is not stated".to_owned(),
            })?,
            rope_dims: (spec.head_dim as f32 * rope_share.unwrap_or(1.0)) as usize,
            conv_width: numbers.linear_conv_kernel_dim.unwrap_or(4),
            spec,
        })
    }

    /// A norm of the model's layers.
    pub(crate) fn norm(
        &self,
        checkpoint: &mut Checkpoint,
        name: &str,
        width: usize,
    ) -> Result<RmsNorm, EngineError> {
        checkpoint.norm(name, width, (self.norm_offset, self.norm_eps))
    }
}

/// Names what a model asks for that is not built in.
fn check_supported(spec: &ModelSpec, numbers: &Numbers) -> Result<(), EngineError> {
    use ModelFamily::{Llama, Mixtral, Qwen3, Qwen3Moe, Qwen35};
    let rope_type = numbers.rope_parameters.rope_type.as_deref();
    let linear = spec.linear_attention.as_ref();
    let problems = [
        (
            !matches!(spec.family, Llama | Mixtral | Qwen3 | Qwen3Moe | Qwen35),
            "model_type: built in are llama, qwen3, qwen3_moe, mixtral and qwen3_5_text",
        ),
        (
            spec.layers.iter().any(|layer| {
                !matches!(layer.attention, AttentionKind::Full | AttentionKind::Linear)
            }),
            "sliding_window: attention windows are not built in",
        ),
        (
            spec.hidden_act != "silu",
            "hidden_act: silu alone is built in",
        ),
        (
            numbers.attention_bias == Some(true) || numbers.mlp_bias == Some(true),
            "attention_bias, mlp_bias: projections have no bias here",
        ),
        (
            rope_type.is_some_and(|name| name != "default") || numbers.rope_scaling.is_some(),
            "rope_type: scaled rotary frequencies are not built in",
        ),
        (
            linear.is_some_and(|linear| linear.inputs != LinearInputs::Split),
            "linear attention with fused inputs is not built in",
        ),
    ];
    match problems.iter().find(|(asked_for, _)| *asked_for) {
        Some((_, what)) => Err(EngineError::Unsupported {
            what: (*what).to_owned(),
        }),
        None => Ok(()),
    }
}
