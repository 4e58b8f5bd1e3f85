//! Reads a `config.json` into a [`ModelSpec`].

use super::family::{Absent, Experts, FamilyRules, NormTopK, SharedExpert};
use super::{
    AttentionKind, FfnKind, LayerSpec, LinearAttentionSpec, MAX_EXPERTS, MAX_LAYERS, MAX_VOCAB,
    MAX_WIDTH, ModelFamily, ModelSpec, MoeSpec, layers,
};
use crate::ConfigError;
use crate::json::{self, Json, Object};

/// The text model's part of a `config.json`, with the name that errors call it by.
pub(super) struct Reader<'a> {
    object: &'a Object,
    model_type: &'a str,
}

pub(super) fn from_hf_config(text: &str) -> Result<ModelSpec, ConfigError> {
    let top = json::parse_object(text).map_err(|fault| ConfigError::ModelJson {
        message: fault.to_string(),
    })?;
    if let Some(key) = top.repeated_keys().first() {
        return Err(ConfigError::ModelJson {
            message: format!("key {key:?} stands more than once; keep one"),
        });
    }
    let object = match top.get("text_config") {
        None | Some(Json::Null) => &top,
        Some(Json::Object(text_config)) => text_config,
        Some(other) => {
            return Err(ConfigError::ModelJson {
                message: format!("text_config is {other}, where an object belongs"),
            });
        }
    };
    let model_type = [object, &top]
        .into_iter()
        .find_map(|object| match object.get("model_type") {
            Some(Json::Text(name)) => Some(name.as_str()),
            _ => None,
        })
        .ok_or_else(|| ConfigError::ModelJson {
            message: "model_type is missing: it says which family the numbers are to be read by"
                .to_owned(),
        })?;
    let family =
        ModelFamily::from_model_type(model_type).ok_or_else(|| ConfigError::UnknownFamily {
            model_type: model_type.to_owned(),
        })?;
    let reader = Reader { object, model_type };
    let rules = family.rules();
    let tied =
        [&top, object]
            .into_iter()
            .find_map(|object| match object.get("tie_word_embeddings") {
                None | Some(Json::Null) => None,
                Some(value) => Some(value),
            });
    let tied_embeddings = match tied {
        None => rules.tied_embeddings,
        Some(Json::Bool(tied)) => *tied,
        Some(other) => return Err(reader.not_a_flag("tie_word_embeddings", other)),
    };
    let spec = reader.spec(family, &rules, tied_embeddings)?;
    spec.check(model_type)?;
    Ok(spec)
}

impl<'a> Reader<'a> {
    fn spec(
        &self,
        family: ModelFamily,
        rules: &FamilyRules,
        tied_embeddings: bool,
    ) -> Result<ModelSpec, ConfigError> {
        let hidden_size = self.size("hidden_size")?;
        let heads = self.size_or("num_attention_heads", rules.heads, || {
            Err(self.missing("num_attention_heads"))
        })?;
        let kv_heads = self.size_or("num_key_value_heads", rules.kv_heads, || Ok(heads))?;
        let head_dim = self.size_or("head_dim", rules.head_dim, || {
            if hidden_size.is_multiple_of(heads) {
                Ok(hidden_size / heads)
            } else {
                Err(self.error(
                    "head_dim",
                    format!(
                        "is absent, and hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}"
                    ),
                ))
            }
        })?;
        let count = self.count("num_hidden_layers", 1, MAX_LAYERS)?;
        let count = count.ok_or_else(|| self.missing("num_hidden_layers"))?;
        let attention = layers::attention_kinds(self, rules, count)?;
        let (moe_layers, moe) = self.moe(rules, count)?;
        let layers = self.layer_specs(rules, &attention, &moe_layers)?;
        Ok(ModelSpec {
            family,
            hidden_size,
            heads,
            kv_heads,
            head_dim,
            gated_attention: self
                .flag("attn_output_gate")?
                .unwrap_or(rules.gated_attention),
            fused_projections: rules.fused_projections,
            vocab_size: self.vocab_size(rules)?,
            tied_embeddings,
            hidden_act: self
                .text(rules.activation_key)?
                .unwrap_or_else(|| rules.activation.to_owned()),
            moe,
            linear_attention: self.linear_attention(rules, &attention)?,
            layers,
        })
    }

    fn vocab_size(&self, rules: &FamilyRules) -> Result<usize, ConfigError> {
        match (self.count("vocab_size", 1, MAX_VOCAB)?, rules.vocab_size) {
            (Some(size), _) | (None, Absent::Constant(size)) => Ok(size),
            (None, _) => Err(self.missing("vocab_size")),
        }
    }

    fn layer_specs(
        &self,
        rules: &FamilyRules,
        attention: &[AttentionKind],
        moe_layers: &[bool],
    ) -> Result<Vec<LayerSpec>, ConfigError> {
        let dense = if moe_layers.iter().all(|is_moe| *is_moe) {
            FfnKind::Absent
        } else {
            let key = match rules.experts {
                Experts::Interleaved => "intermediate_size_mlp",
                _ => "intermediate_size",
            };
            FfnKind::Dense {
                width: self.size(key)?,
            }
        };
        let ffn = moe_layers
            .iter()
            .map(|is_moe| if *is_moe { FfnKind::Moe } else { dense });
        Ok(attention
            .iter()
            .zip(ffn)
            .map(|(&attention, ffn)| LayerSpec { attention, ffn })
            .collect())
    }

    fn linear_attention(
        &self,
        rules: &FamilyRules,
        attention: &[AttentionKind],
    ) -> Result<Option<LinearAttentionSpec>, ConfigError> {
        let Some(inputs) = rules.linear_inputs else {
            return Ok(None);
        };
        if attention.iter().all(|kind| kind.is_attention()) {
            return Ok(None);
        }
        Ok(Some(LinearAttentionSpec {
            key_heads: self.size("linear_num_key_heads")?,
            value_heads: self.size("linear_num_value_heads")?,
            key_head_dim: self.size("linear_key_head_dim")?,
            value_head_dim: self.size("linear_value_head_dim")?,
            inputs,
        }))
    }

    /// Which layers are MoE, and their experts where any is.
    fn moe(
        &self,
        rules: &FamilyRules,
        count: usize,
    ) -> Result<(Vec<bool>, Option<MoeSpec>), ConfigError> {
        let dense = vec![false; count];
        let is_moe = layers::moe_layers(self, rules, count)?;
        if !is_moe.contains(&true) {
            return Ok((dense, None));
        }
        let least = usize::from(rules.experts != Experts::Stepped);
        let num_experts = self.num_experts(least)?;
        if num_experts == 0 {
            return Ok((dense, None));
        }
        let expert_width = self.size(match rules.experts {
            Experts::Stepped | Experts::AllOwnWidth => "moe_intermediate_size",
            Experts::None | Experts::All | Experts::Interleaved => "intermediate_size",
        })?;
        let shared_expert_width = match rules.shared_expert {
            SharedExpert::None => None,
            SharedExpert::LikeExpert => Some(expert_width),
            SharedExpert::Gated => {
                let key = "shared_expert_intermediate_size";
                let width = self.count(key, 0, MAX_WIDTH)?;
                Some(width.ok_or_else(|| self.missing(key))?).filter(|width| *width > 0)
            }
        };
        let moe = MoeSpec {
            num_experts,
            top_k: self
                .count("num_experts_per_tok", 1, MAX_EXPERTS)?
                .unwrap_or(rules.top_k),
            norm_topk_prob: match rules.norm_topk_prob {
                NormTopK::Fixed(value) => value,
                NormTopK::Key(default) => self.flag("norm_topk_prob")?.unwrap_or(default),
            },
            expert_width,
            shared_expert_gate: shared_expert_width.is_some()
                && rules.shared_expert == SharedExpert::Gated,
            shared_expert_width,
            stacked_axes: rules.stacked_axes,
            gate_up: rules.gate_up,
            is_transposed: rules.is_transposed,
            block_name: rules.block_name,
            router_name: rules.router_name,
        };
        Ok((is_moe, Some(moe)))
    }

    /// `num_experts`, by either of the names that config classes write it under.
    fn num_experts(&self, least: usize) -> Result<usize, ConfigError> {
        let plain = self.count("num_experts", least, MAX_EXPERTS)?;
        let local = self.count("num_local_experts", least, MAX_EXPERTS)?;
        match (plain, local) {
            (Some(plain), Some(local)) if plain != local => Err(self.error(
                "num_experts",
                format!("is {plain}, and num_local_experts, another name for it, is {local}"),
            )),
            _ => plain
                .or(local)
                .ok_or_else(|| self.missing("num_experts (or num_local_experts)")),
        }
    }

    /// A required positive size.
    pub(super) fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.count(key, 1, MAX_WIDTH)?
            .ok_or_else(|| self.missing(key))
    }

    /// A positive size that may be absent as `absent` says; null is the derived value.
    fn size_or(
        &self,
        key: &str,
        absent: Absent,
        derived: impl FnOnce() -> Result<usize, ConfigError>,
    ) -> Result<usize, ConfigError> {
        match (self.object.get(key), absent) {
            (Some(Json::Null), _) | (None, Absent::Derived) => derived(),
            (None, Absent::Constant(size)) => Ok(size),
            _ => self.size(key),
        }
    }

    /// An integer from `least` to `most`; absent and null are `None`.
    pub(super) fn count(
        &self,
        key: &str,
        least: usize,
        most: usize,
    ) -> Result<Option<usize>, ConfigError> {
        let value = match self.object.get(key) {
            None | Some(Json::Null) => return Ok(None),
            Some(value) => value,
        };
        integer(value)
            .filter(|number| (least..=most).contains(number))
            .map(Some)
            .ok_or_else(|| {
                self.error(
                    key,
                    format!("is {value}; it is an integer from {least} to {most}"),
                )
            })
    }

    /// A boolean; absent and null are `None`.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.object.get(key) {
            None | Some(Json::Null) => Ok(None),
            Some(Json::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(self.not_a_flag(key, other)),
        }
    }

    fn text(&self, key: &str) -> Result<Option<String>, ConfigError> {
        match self.object.get(key) {
            None | Some(Json::Null) => Ok(None),
            Some(Json::Text(text)) => Ok(Some(text.clone())),
            Some(other) => Err(self.error(key, format!("is {other}; it is a string"))),
        }
    }

    /// A list; absent and null are `None`.
    pub(super) fn list(&self, key: &str) -> Result<Option<&'a [Json]>, ConfigError> {
        match self.object.get(key) {
            None | Some(Json::Null) => Ok(None),
            Some(Json::List(items)) => Ok(Some(items)),
            Some(other) => Err(self.error(key, format!("is {other}; it is a list"))),
        }
    }

    /// A list of layer indices; absent and null are `None`.
    pub(super) fn indices(&self, key: &str) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(items) = self.list(key)? else {
            return Ok(None);
        };
        items
            .iter()
            .enumerate()
            .map(|(place, item)| {
                integer(item).ok_or_else(|| {
                    self.error(
                        &format!("{key}[{place}]"),
                        format!("is {item}; it is a layer index"),
                    )
                })
            })
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Whether the key is present, null included.
    pub(super) fn has(&self, key: &str) -> bool {
        self.object.get(key).is_some()
    }

    pub(super) fn error(&self, field: &str, problem: String) -> ConfigError {
        ConfigError::ModelField {
            model_type: self.model_type.to_owned(),
            field: field.to_owned(),
            problem,
        }
    }

    fn missing(&self, field: &str) -> ConfigError {
        self.error(
            field,
            "is missing, and no default is right for every model of the family: write it into config.json, or fill in \
             a ModelSpec by hand"
                .to_owned(),
        )
    }

    fn not_a_flag(&self, field: &str, value: &Json) -> ConfigError {
        self.error(field, format!("is {value}; it is true or false"))
    }
}

pub(super) fn integer(value: &Json) -> Option<usize> {
    match value {
        Json::Int(number) => usize::try_from(*number).ok(),
        _ => None,
    }
}
