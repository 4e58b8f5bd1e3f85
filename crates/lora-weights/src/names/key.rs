//! A tensor's name taken apart: prefix, wrappers, suffix, layer.

use super::{AdapterAb, Reject, RejectReason};
use std::borrow::Cow;

/// What PEFT puts before the path of a module in the Hugging Face model.
const PEFT_PREFIX: &str = "base_model.model.";

/// Segments that `torch.compile` and FSDP leave in a path. They carry no meaning.
const WRAPPERS: [&str; 3] = [
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
];

/// Paths that may stand before `layers.N` of the text model: headless, plain, and text models inside a multimodal one.
const TEXT_PARENTS: [&str; 4] = ["", "model", "model.language_model", "language_model.model"];

/// A tensor's name without PEFT's prefix and without wrappers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorPath<'a> {
    /// As the Hugging Face model calls it, suffix included: `model.layers.0.self_attn.q_proj.lora_A.weight`.
    pub(crate) path: Cow<'a, str>,
    /// True if wrapper segments (`_orig_mod.`, `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`) were removed.
    pub(crate) renamed: bool,
}

impl<'a> TensorPath<'a> {
    /// Removes wrapper segments and the prefix `base_model.model.`, which must be there unless `accept_bare_names`.
    ///
    /// # Errors
    /// [`RejectReason::NotPeftKey`] where the prefix is missing.
    pub(crate) fn parse(name: &'a str, accept_bare_names: bool) -> Result<Self, Reject> {
        let renamed = name.split('.').any(|segment| WRAPPERS.contains(&segment));
        let clean = if renamed {
            let kept: Vec<&str> = name.split('.').filter(|s| !WRAPPERS.contains(s)).collect();
            Cow::Owned(kept.join("."))
        } else {
            Cow::Borrowed(name)
        };
        if !clean.starts_with(PEFT_PREFIX) && !accept_bare_names {
            return Err(Reject::new(
                RejectReason::NotPeftKey,
                name,
                no_prefix_detail(&clean),
            ));
        }
        let path = match clean {
            Cow::Borrowed(s) => Cow::Borrowed(s.strip_prefix(PEFT_PREFIX).unwrap_or(s)),
            Cow::Owned(s) => Cow::Owned(s.strip_prefix(PEFT_PREFIX).unwrap_or(&s).to_owned()),
        };
        Ok(Self { path, renamed })
    }

    /// The path as one of a pair's matrices; `None` where it is no `lora_A` or `lora_B` weight.
    pub(crate) fn lora_weight(&self) -> Option<LoraWeightPath<'_>> {
        let stem = self.path.strip_suffix(".weight")?;
        if let Some((module, ab)) = split_ab(stem) {
            return Some(LoraWeightPath {
                module,
                ab,
                adapter: None,
            });
        }
        let (stem, adapter) = stem.rsplit_once('.')?;
        let (module, ab) = split_ab(stem)?;
        Some(LoraWeightPath {
            module,
            ab,
            adapter: Some(adapter),
        })
    }
}

fn no_prefix_detail(name: &str) -> String {
    if name.ends_with(".lora_a") || name.ends_with(".lora_b") {
        "an MLX name; MLX stores A and B transposed and its own scale, convert the adapter to PEFT's format".to_owned()
    } else if name.starts_with("lora_unet_") || name.starts_with("lora_te") {
        "a Kohya name; convert the adapter to PEFT's format".to_owned()
    } else {
        format!(
            "the name does not start with `{PEFT_PREFIX}`; the option accept_bare_names takes names without it"
        )
    }
}

fn split_ab(stem: &str) -> Option<(&str, AdapterAb)> {
    if let Some(module) = stem.strip_suffix(".lora_A") {
        Some((module, AdapterAb::A))
    } else {
        Some((stem.strip_suffix(".lora_B")?, AdapterAb::B))
    }
}

/// A `lora_A` or `lora_B` weight: module path, which matrix, and the adapter name that raw state dicts leave in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoraWeightPath<'a> {
    /// Path of the adapted module: `model.layers.0.self_attn.q_proj`. This is what a config's patterns match.
    pub(crate) module: &'a str,
    /// A or B.
    pub(crate) ab: AdapterAb,
    /// `default` in `.lora_A.default.weight`.
    pub(crate) adapter: Option<&'a str>,
}

/// A path inside a decoder layer of the text model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerPath<'a> {
    /// What stands before `layers.N`: empty, `model`, `model.language_model` or `language_model.model`. All four name the same
    /// layers.
    pub(crate) parent: &'a str,
    /// Global layer index. Not checked against a model; numbers past `usize` are `usize::MAX`.
    pub(crate) layer: usize,
    /// Path inside the layer: `self_attn.q_proj`.
    pub(crate) rest: &'a str,
}

impl<'a> LayerPath<'a> {
    /// Takes a module path apart.
    ///
    /// # Errors
    /// Non-layer-module, malformed-key or malformed-layer-index as a reason and a sentence; the caller knows the full name.
    pub(crate) fn parse(path: &'a str) -> Result<Self, (RejectReason, String)> {
        let not_a_layer = || {
            let detail = format!("`{path}` is in no decoder layer of the text model");
            (RejectReason::NonLayerModule, detail)
        };
        let (parent, after) = match path.strip_prefix("layers.") {
            Some(after) => ("", after),
            None => path.split_once(".layers.").ok_or_else(|| {
                if path.ends_with(".layers") || path == "layers" {
                    (
                        RejectReason::MalformedKey,
                        "nothing follows `layers`".to_owned(),
                    )
                } else {
                    not_a_layer()
                }
            })?,
        };
        if !TEXT_PARENTS.contains(&parent) {
            return Err(not_a_layer());
        }
        let Some((index, rest)) = after.split_once('.') else {
            let detail = format!("no module follows layer `{after}`");
            return Err((RejectReason::MalformedKey, detail));
        };
        let layer = canonical_index(index).ok_or_else(|| {
            let detail = format!(
                "`{index}` is not a layer number (a decimal with no sign and no leading zero)"
            );
            (RejectReason::MalformedLayerIndex, detail)
        })?;
        if rest.split('.').any(str::is_empty) {
            let detail = format!("an empty segment in `{rest}`");
            return Err((RejectReason::MalformedKey, detail));
        }
        Ok(Self {
            parent,
            layer,
            rest,
        })
    }
}

/// A decimal with no sign and no leading zero. One past `usize` gives `usize::MAX`, which is past every model as well.
pub(super) fn canonical_index(text: &str) -> Option<usize> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let canonical = digits && (text == "0" || !text.starts_with('0'));
    canonical.then(|| text.parse().unwrap_or(usize::MAX))
}

/// Whether the path of a table (`embed_tokens`, `lm_head`) has a parent of the text model, not of a vision tower or a multi-token
/// prediction head.
pub(super) fn is_table_parent(parent: &str) -> bool {
    TEXT_PARENTS.contains(&parent) || parent == "language_model"
}
