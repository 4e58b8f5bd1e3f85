//! Bounds and agreement of a spec's numbers, whoever filled it in.

use super::{
    FfnKind, LinearAttentionSpec, MAX_EXPERTS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, ModelSpec, MoeSpec,
};
use crate::ConfigError;

/// A field and what is wrong with it.
type Problem = (&'static str, String);

impl ModelSpec {
    /// Checks that a spec filled in (or changed) by hand can be sized: no number is zero or over its bound ([`MAX_LAYERS`],
    /// [`MAX_WIDTH`], [`MAX_EXPERTS`], [`MAX_VOCAB`]), heads divide, and MoE and linear-attention layers have their geometry.
    ///
    /// # Errors
    /// [`ConfigError::ModelField`], naming the first field that is wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check(self.family.name())
    }

    pub(super) fn check(&self, model_type: &str) -> Result<(), ConfigError> {
        self.problem().map_or(Ok(()), |(field, problem)| {
            Err(ConfigError::ModelField {
                model_type: model_type.to_owned(),
                field: field.to_owned(),
                problem,
            })
        })
    }

    fn problem(&self) -> Option<Problem> {
        within("num_hidden_layers", self.layers.len(), MAX_LAYERS)
            .or_else(|| within("hidden_size", self.hidden_size, MAX_WIDTH))
            .or_else(|| within("vocab_size", self.vocab_size, MAX_VOCAB))
            .or_else(|| self.attention_problem())
            .or_else(|| self.layer_problem())
            .or_else(|| self.moe.as_ref().and_then(moe_problem))
            .or_else(|| self.linear_attention.as_ref().and_then(linear_problem))
    }

    fn attention_problem(&self) -> Option<Problem> {
        within("num_attention_heads", self.heads, MAX_WIDTH)
            .or_else(|| within("num_key_value_heads", self.kv_heads, MAX_WIDTH))
            .or_else(|| within("head_dim", self.head_dim, MAX_WIDTH))
            .or_else(|| within("q_proj's width", self.q_width(), MAX_WIDTH))
            .or_else(|| {
                multiple(
                    "num_attention_heads",
                    self.heads,
                    "num_key_value_heads",
                    self.kv_heads,
                )
            })
    }

    fn layer_problem(&self) -> Option<Problem> {
        self.layers.iter().enumerate().find_map(|(index, layer)| {
            let no_linear = !layer.attention.is_attention() && self.linear_attention.is_none();
            match layer.ffn {
                _ if no_linear => Some((
                    "linear_attention",
                    format!("is None, and layer {index} is linear attention"),
                )),
                FfnKind::Moe if self.moe.is_none() => {
                    Some(("moe", format!("is None, and layer {index} is MoE")))
                }
                FfnKind::Dense { width } => within("intermediate_size", width, MAX_WIDTH),
                FfnKind::Moe | FfnKind::Absent => None,
            }
        })
    }
}

fn moe_problem(moe: &MoeSpec) -> Option<Problem> {
    within("num_experts", moe.num_experts, MAX_EXPERTS)
        .or_else(|| within("the experts' width", moe.expert_width, MAX_WIDTH))
        .or_else(|| {
            within(
                "the shared expert's width",
                moe.shared_expert_width?,
                MAX_WIDTH,
            )
        })
        .or_else(|| {
            (moe.top_k > moe.num_experts).then(|| {
                let problem = format!(
                    "is {}, and there are {} experts",
                    moe.top_k, moe.num_experts
                );
                ("num_experts_per_tok", problem)
            })
        })
}

fn linear_problem(linear: &LinearAttentionSpec) -> Option<Problem> {
    within("linear_num_key_heads", linear.key_heads, MAX_WIDTH)
        .or_else(|| within("linear_num_value_heads", linear.value_heads, MAX_WIDTH))
        .or_else(|| within("linear_key_head_dim", linear.key_head_dim, MAX_WIDTH))
        .or_else(|| within("linear_value_head_dim", linear.value_head_dim, MAX_WIDTH))
        .or_else(|| {
            within(
                "the linear-attention keys' width",
                linear.key_width(),
                MAX_WIDTH,
            )
        })
        .or_else(|| {
            within(
                "the linear-attention values' width",
                linear.value_width(),
                MAX_WIDTH,
            )
        })
        .or_else(|| {
            multiple(
                "linear_num_value_heads",
                linear.value_heads,
                "linear_num_key_heads",
                linear.key_heads,
            )
        })
}

fn within(field: &'static str, number: usize, most: usize) -> Option<Problem> {
    (number == 0 || number > most).then(|| (field, format!("is {number}; it is from 1 to {most}")))
}

fn multiple(
    field: &'static str,
    number: usize,
    divisor_field: &'static str,
    divisor: usize,
) -> Option<Problem> {
    (!number.is_multiple_of(divisor)).then(|| {
        (
            field,
            format!("is {number}, which is not a multiple of {divisor_field}, {divisor}"),
        )
    })
}
