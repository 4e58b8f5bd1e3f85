//! What each layer is: attention kinds and MoE layers, by the keys and defaults of each family.

use super::AttentionKind;
use super::family::{Experts, FamilyRules, Windows};
use super::reader::{Reader, integer};
use crate::ConfigError;
use crate::json::Json;

/// One entry a layer: from `layer_types`, else by the family's own rule.
pub(super) fn attention_kinds(
    reader: &Reader<'_>,
    rules: &FamilyRules,
    count: usize,
) -> Result<Vec<AttentionKind>, ConfigError> {
    let Some(items) = reader.list("layer_types")? else {
        return default_kinds(reader, rules.windows, count);
    };
    if items.len() != count {
        return Err(reader.error(
            "layer_types",
            format!(
                "has {} entries, and num_hidden_layers is {count}",
                items.len()
            ),
        ));
    }
    let has_linear = rules.linear_inputs.is_some();
    items
        .iter()
        .enumerate()
        .map(|(layer, item)| {
            let name = match item {
                Json::Text(name) => name.as_str(),
                _ => "",
            };
            match name {
                "full_attention" | "attention" => Ok(AttentionKind::Full),
                "sliding_attention" => Ok(AttentionKind::Sliding),
                "chunked_attention" => Ok(AttentionKind::Chunked),
                "linear_attention" if has_linear => Ok(AttentionKind::Linear),
                _ => {
                    let linear = if has_linear { ", linear_attention" } else { "" };
                    Err(reader.error(
                        &format!("layer_types[{layer}]"),
                        format!("is {item}; this family has full_attention, sliding_attention, chunked_attention{linear}"),
                    ))
                }
            }
        })
        .collect()
}

/// The layer kinds a config class derives where `layer_types` is absent.
fn default_kinds(
    reader: &Reader<'_>,
    windows: Windows,
    count: usize,
) -> Result<Vec<AttentionKind>, ConfigError> {
    use AttentionKind::{Full, Linear, Sliding};
    let by_layer = |kind: AttentionKind, other: &dyn Fn(usize) -> bool| {
        (0..count)
            .map(|layer| if other(layer) { kind } else { Full })
            .collect()
    };
    Ok(match windows {
        Windows::None => vec![Full; count],
        Windows::All { by_default } => {
            let slides = if reader.has("sliding_window") {
                reader.count("sliding_window", 0, usize::MAX)?.is_some()
            } else {
                by_default
            };
            by_layer(Sliding, &|_| slides)
        }
        Windows::AllIfUsed => {
            let slides = uses_window(reader)?;
            by_layer(Sliding, &|_| slides)
        }
        Windows::FromLayer => {
            let first = if uses_window(reader)? {
                max_window_layers(reader)?
            } else {
                count
            };
            by_layer(Sliding, &|layer| layer >= first)
        }
        Windows::EvenBeforeLayer => {
            let end = if uses_window(reader)? {
                max_window_layers(reader)?
            } else {
                0
            };
            by_layer(Sliding, &|layer| layer % 2 == 0 && layer < end)
        }
        Windows::AllButEach { key, default } => {
            let each = match key {
                Some(key) => interval(reader, key, default)?,
                None => default,
            };
            by_layer(Sliding, &|layer| (layer + 1) % each != 0)
        }
        Windows::LinearButEach => {
            let each = interval(reader, "full_attention_interval", 4)?;
            by_layer(Linear, &|layer| (layer + 1) % each != 0)
        }
        Windows::ChunkedByRope => chunked_kinds(reader, count)?,
    })
}

/// Qwen's sliding window is on where the flag is set and the size is not null.
fn uses_window(reader: &Reader<'_>) -> Result<bool, ConfigError> {
    let used = reader.flag("use_sliding_window")?.unwrap_or(false);
    let given =
        reader.count("sliding_window", 0, usize::MAX)?.is_some() || !reader.has("sliding_window");
    Ok(used && given)
}

fn max_window_layers(reader: &Reader<'_>) -> Result<usize, ConfigError> {
    Ok(reader
        .count("max_window_layers", 0, usize::MAX)?
        .unwrap_or(28))
}

fn interval(reader: &Reader<'_>, key: &str, default: usize) -> Result<usize, ConfigError> {
    Ok(reader.count(key, 1, usize::MAX)?.unwrap_or(default))
}

/// Llama 4: layers that rotate positions attend in chunks, the others to everything.
fn chunked_kinds(reader: &Reader<'_>, count: usize) -> Result<Vec<AttentionKind>, ConfigError> {
    let chunks = !reader.has("attention_chunk_size")
        || reader
            .count("attention_chunk_size", 1, usize::MAX)?
            .is_some();
    let kind = |rotates: bool| {
        if rotates && chunks {
            AttentionKind::Chunked
        } else {
            AttentionKind::Full
        }
    };
    let stated = reader
        .list("no_rope_layers")?
        .filter(|items| !items.is_empty());
    let Some(items) = stated else {
        let each = interval(reader, "no_rope_layer_interval", 4)?;
        return Ok((0..count)
            .map(|layer| kind((layer + 1) % each != 0))
            .collect());
    };
    if items.len() < count {
        return Err(reader.error(
            "no_rope_layers",
            format!(
                "has {} entries, and num_hidden_layers is {count}",
                items.len()
            ),
        ));
    }
    items
        .iter()
        .take(count)
        .enumerate()
        .map(|(layer, item)| match item {
            Json::Bool(rotates) => Ok(kind(*rotates)),
            _ => integer(item).map(|flag| kind(flag != 0)).ok_or_else(|| {
                reader.error(
                    &format!("no_rope_layers[{layer}]"),
                    format!("is {item}; it is 0 or 1"),
                )
            }),
        })
        .collect()
}

/// Which layers are MoE by the family's rule.
///
/// `first_k_dense_replace` is DeepSeek's key; it is honoured wherever a family with experts states it.
pub(super) fn moe_layers(
    reader: &Reader<'_>,
    rules: &FamilyRules,
    count: usize,
) -> Result<Vec<bool>, ConfigError> {
    let mut is_moe = match rules.experts {
        Experts::None => return Ok(vec![false; count]),
        Experts::All | Experts::AllOwnWidth => vec![true; count],
        Experts::Stepped => {
            let step = interval(reader, "decoder_sparse_step", 1)?;
            let mut is_moe: Vec<bool> = (0..count).map(|layer| (layer + 1) % step == 0).collect();
            for layer in reader.indices("mlp_only_layers")?.unwrap_or_default() {
                if let Some(flag) = is_moe.get_mut(layer) {
                    *flag = false;
                }
            }
            is_moe
        }
        Experts::Interleaved => match reader.indices("moe_layers")? {
            Some(layers) => {
                let mut is_moe = vec![false; count];
                for layer in layers {
                    if let Some(flag) = is_moe.get_mut(layer) {
                        *flag = true;
                    }
                }
                is_moe
            }
            None => {
                let step = interval(reader, "interleave_moe_layer_step", 1)?;
                (0..count).map(|layer| (layer + 1) % step == 0).collect()
            }
        },
    };
    let first_moe = reader
        .count("first_k_dense_replace", 0, usize::MAX)?
        .unwrap_or(0);
    is_moe
        .iter_mut()
        .take(first_moe)
        .for_each(|flag| *flag = false);
    Ok(is_moe)
}
