//! Names of pairs to layers and targets.

use super::key::canonical_index;
use super::{
    AdapterAb, ExpertProj, LayerPath, LoraModule, LoraTarget, LoraWeightPath, Reject, RejectReason,
    TensorPath,
};
use crate::{ModuleSet, PoolSpec};
use lora_config::{FfnKind, ModelSpec, MoeSpec};

/// What decides, beside the model, how a name is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NameRules {
    /// Modules that a pool has room for; the others are refused by name.
    pub modules: ModuleSet,
    /// Take names without `base_model.model.`.
    pub accept_bare_names: bool,
}

impl From<&PoolSpec> for NameRules {
    fn from(pool: &PoolSpec) -> Self {
        Self {
            modules: pool.modules,
            accept_bare_names: pool.policy.accept_bare_names,
        }
    }
}

/// A matrix of a pair, placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlacedKey<'a> {
    /// Global layer index, inside the model.
    pub(crate) layer: usize,
    /// Target inside the layer.
    pub(crate) target: LoraTarget,
    /// The name's parts.
    pub(crate) weight: LoraWeightPath<'a>,
    /// What stands before `layers.N`.
    pub(crate) parent: &'a str,
}

/// The layer (global index), target and matrix that a tensor's name stands for.
///
/// ```
/// use lora_config::ModelSpec;
/// use lora_weights::{AdapterAb, LoraModule, LoraTarget, NameRules, classify_key};
///
/// let spec = ModelSpec::from_hf_config(
///     r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
///         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}"#,
/// )?;
/// let rules = NameRules::default();
///
/// let name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight";
/// let placed = classify_key(name, &spec, &rules)?;
/// assert_eq!(placed, (1, LoraTarget::Attn(LoraModule::QProj), AdapterAb::B));
///
/// let vision = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight";
/// let reject = classify_key(vision, &spec, &rules).unwrap_err();
/// assert_eq!(reject.reason.as_str(), "non-layer-module");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A [`Reject`] with a stable reason for every name that cannot be placed; nothing is skipped.
pub fn classify_key(
    name: &str,
    spec: &ModelSpec,
    rules: &NameRules,
) -> Result<(usize, LoraTarget, AdapterAb), Reject> {
    let path = TensorPath::parse(name, rules.accept_bare_names)?;
    let placed = place(name, &path, spec, rules.modules)?;
    Ok((placed.layer, placed.target, placed.weight.ab))
}

/// [`classify_key`] after [`TensorPath::parse`]. `name` is the file's name, for messages.
pub(crate) fn place<'a>(
    name: &str,
    path: &'a TensorPath<'_>,
    spec: &ModelSpec,
    modules: ModuleSet,
) -> Result<PlacedKey<'a>, Reject> {
    let reject = |(reason, detail): (RejectReason, String)| Reject::new(reason, name, detail);
    let weight = path
        .lora_weight()
        .ok_or_else(|| reject(not_a_pair(&path.path)))?;
    if weight.adapter.is_some_and(str::is_empty) {
        return Err(reject((
            RejectReason::MalformedKey,
            "an empty adapter name".to_owned(),
        )));
    }
    let at = LayerPath::parse(weight.module).map_err(reject)?;
    check_layer(at.layer, spec).map_err(reject)?;
    let target = target_in_layer(&at, spec, modules).map_err(reject)?;
    Ok(PlacedKey {
        layer: at.layer,
        target,
        weight,
        parent: at.parent,
    })
}

/// True for the inputs of a gated delta net and whatever else is under `linear_attn.` (`conv1d`), but its `out_proj`.
pub fn is_gdn_key(name: &str) -> bool {
    name.split_once(".linear_attn.")
        .is_some_and(|(_, rest)| rest != "out_proj" && !rest.starts_with("out_proj."))
}

type Why = (RejectReason, String);

fn not_a_pair(path: &str) -> Why {
    if path.ends_with(".lora_embedding_A") || path.ends_with(".lora_embedding_B") {
        let detail = "low-rank LoRA of an embedding is not applied; merge it into full rows (modules_to_save)";
        return (RejectReason::LoraEmbeddingUnimplemented, detail.to_owned());
    }
    let last = path.rsplit('.').next().unwrap_or(path);
    let detail = match last {
        "lora_E" | "ranknum" => "an AdaLoRA tensor; only LORA is applied",
        "lora_diag" => "a KaSA tensor; its base weight is changed too",
        "lora_a" | "lora_b" => "an MLX name; convert the adapter to PEFT's format",
        "weight" if path.ends_with(".base_layer.weight") => {
            "a copy of a base weight, which PEFT would put in the base's place; with no base weight to compare it with it is not \
             dropped: remove it if it is the base's"
        }
        "weight" => "full weights of a module that is no vocabulary table; they are not applied",
        _ => "neither a lora_A nor a lora_B weight, nor another tensor that is known",
    };
    (RejectReason::UnrecognizedTensor, detail.to_owned())
}

pub(crate) fn check_layer(layer: usize, spec: &ModelSpec) -> Result<(), Why> {
    let layers = spec.layers.len();
    if layer < layers {
        return Ok(());
    }
    let detail = format!("layer {} of a model with {layers} layers", Index(layer));
    Err((RejectReason::LayerOutOfRange, detail))
}

/// Shows a saturated index as what it stands for.
struct Index(usize);

impl std::fmt::Display for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            usize::MAX => f.write_str("past 2^64"),
            n => write!(f, "{n}"),
        }
    }
}

fn target_in_layer(
    at: &LayerPath<'_>,
    spec: &ModelSpec,
    modules: ModuleSet,
) -> Result<LoraTarget, Why> {
    let unsupported = || {
        let detail = format!("`{}` is no module that is applied", at.rest);
        (RejectReason::UnsupportedModule, detail)
    };
    let (block, inside) = at.rest.split_once('.').ok_or_else(unsupported)?;
    if is_moe_block(block, spec)
        && let Some(target) = router_or_expert(at, inside, block, spec)?
    {
        return Ok(target);
    }
    let canonical = if block == spec.ffn_block() {
        format!("mlp.{inside}")
    } else if block == "mlp" {
        return Err(unsupported());
    } else {
        at.rest.to_owned()
    };
    match LoraModule::from_peft_name(&canonical) {
        Some(module) => check_module(module, at, spec, modules),
        None if block == "linear_attn" => Err(gdn_target(at.rest)),
        None => Err(unsupported()),
    }
}

/// Blocks whose router and experts are read: the model's own, and Mixtral's name for the same block in transformers 4.
pub(crate) fn is_moe_block(block: &str, spec: &ModelSpec) -> bool {
    let own = spec.ffn_block();
    block == own || (block == "block_sparse_moe" && own == "mlp")
}

fn router_or_expert(
    at: &LayerPath<'_>,
    inside: &str,
    block: &str,
    spec: &ModelSpec,
) -> Result<Option<LoraTarget>, Why> {
    let own_router = spec.moe.as_ref().map(|moe| moe.router_name);
    let router = inside == "gate" || own_router == Some(inside);
    let experts = inside == "experts" || inside.starts_with("experts.");
    if !router && !experts {
        return Ok(None);
    }
    let Some(moe) = moe_of_layer(spec, at.layer) else {
        let what = if router { "a router" } else { "experts" };
        let detail = format!(
            "`{}` are tensors of {what}, and the FFN of layer {} is not a mixture of experts",
            at.rest, at.layer
        );
        return Err((RejectReason::ExpertLoraOnDenseModel, detail));
    };
    if router {
        return Ok(Some(LoraTarget::Router));
    }
    let Some((index, proj)) = inside
        .strip_prefix("experts.")
        .and_then(|rest| rest.split_once('.'))
        .filter(|(index, _)| !is_stacked_segment(index))
    else {
        return Err(stacked_or_malformed(at.rest, inside));
    };
    let n = canonical_index(index).ok_or_else(|| {
        let detail = format!(
            "`{index}` is not an expert number (a decimal with no sign and no leading zero)"
        );
        (RejectReason::MalformedExpertIndex, detail)
    })?;
    if n >= moe.num_experts {
        let detail = format!(
            "expert {} of a model with {} experts",
            Index(n),
            moe.num_experts
        );
        return Err((RejectReason::ExpertOutOfRange, detail));
    }
    let mixtral = block == "block_sparse_moe";
    let known = |p: &ExpertProj| {
        proj == if mixtral {
            p.mixtral_name()
        } else {
            p.peft_name()
        }
    };
    let proj = ExpertProj::ALL.into_iter().find(known).ok_or_else(|| {
        let detail = format!("`{proj}` is no projection of an expert");
        (RejectReason::UnsupportedExpertProj, detail)
    })?;
    Ok(Some(LoraTarget::Expert { n, proj }))
}

/// The geometry of a layer's experts, of which there is at least one.
pub(crate) fn moe_of_layer(spec: &ModelSpec, layer: usize) -> Option<&MoeSpec> {
    let is_moe = spec.layers.get(layer)?.ffn == FfnKind::Moe;
    spec.moe
        .as_ref()
        .filter(|moe| is_moe && moe.num_experts > 0)
}

/// What stands after `experts` where all experts are in one tensor.
fn is_stacked_segment(segment: &str) -> bool {
    matches!(
        segment,
        "base_layer" | "gate_up_proj" | "gate_proj" | "up_proj" | "down_proj" | "w1" | "w2" | "w3"
    )
}

fn stacked_or_malformed(rest: &str, inside: &str) -> Why {
    let after = inside.strip_prefix("experts").unwrap_or(inside);
    let segment = after
        .trim_start_matches('.')
        .split('.')
        .next()
        .unwrap_or("");
    if segment.is_empty() || is_stacked_segment(segment) {
        let why = match segment {
            "" | "base_layer" => "target_parameters does not say which parameter it adapts",
            _ => {
                "it is not named as PEFT names such tensors (`experts.lora_A`, `experts.base_layer.lora_A`)"
            }
        };
        let detail = format!("`{rest}` holds all experts in one tensor, and {why}");
        (RejectReason::FusedExpertLora, detail)
    } else {
        let detail = format!("`{segment}` in `{rest}` is not an expert number");
        (RejectReason::MalformedExpertIndex, detail)
    }
}

fn gdn_target(rest: &str) -> Why {
    let detail = format!(
        "`{rest}` feeds the recurrence of a gated delta net, and the pool has no room for it"
    );
    (RejectReason::GdnTarget, detail)
}

fn check_module(
    module: LoraModule,
    at: &LayerPath<'_>,
    spec: &ModelSpec,
    modules: ModuleSet,
) -> Result<LoraTarget, Why> {
    let gdn_input = module.is_gdn_input();
    if gdn_input && !modules.contains(module) {
        return Err(gdn_target(at.rest));
    }
    if !module.applies_to_layer(spec, at.layer) {
        let attention = spec.layers[at.layer].attention;
        let in_attention = module.peft_name().starts_with("self_attn.");
        let reason = if module == LoraModule::OutProj && attention.is_attention() {
            RejectReason::GdnOutOnAttentionLayer
        } else if in_attention && !attention.is_attention() {
            RejectReason::NonFullAttentionLayer
        } else if gdn_input {
            RejectReason::GdnTarget
        } else {
            RejectReason::UnsupportedModule
        };
        let layer = &spec.layers[at.layer];
        let ffn = match layer.ffn {
            FfnKind::Dense { .. } => "dense",
            FfnKind::Moe => "MoE",
            FfnKind::Absent => "no",
        };
        let detail = format!(
            "layer {} ({:?} attention, {} FFN) has no `{}`",
            at.layer, layer.attention, ffn, at.rest
        );
        return Err((reason, detail));
    }
    if !modules.contains(module) {
        let detail = format!(
            "the pool has no room for `{}`; enable the module to load it",
            at.rest
        );
        return Err((RejectReason::UnsupportedModule, detail));
    }
    Ok(LoraTarget::Attn(module))
}
