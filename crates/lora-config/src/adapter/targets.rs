//! Which modules the config says it adapts.
//!
//! The tensors decide what is applied; this says whether the config agrees, so that an audit can name what is missing or
//! left over. It follows PEFT's own order of rules, with the true layer index of PEFT 0.20 (the first number after a
//! dotted name, not the last).

use super::fields::{Fields, string_list};
use super::pattern::PathRegex;
use super::tokens::{SavedTable, last_segment};
use crate::ConfigFinding;
use crate::json::Json;
use std::collections::HashSet;

/// Most patterns of `layers_pattern` that are compiled.
const MAX_LAYER_PATTERNS: usize = 64;

/// `target_modules` or `exclude_modules`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TargetModules {
    /// Names, each equal to a module path or a dotted suffix of one. May be empty: an adapter of
    /// `target_parameters` alone.
    List(Vec<String>),
    /// A Python regular expression that the whole path must match.
    Regex(String),
    /// `all-linear`: every linear layer but the head. PEFT replaces it by the list when it saves.
    AllLinear,
}

/// Whether the config targets a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetMatch {
    /// It does.
    Yes,
    /// It does not.
    No,
    /// It cannot be told from the config: a regular expression only Python evaluates, or no `target_modules` at all
    /// (PEFT then takes the model family's own).
    Unchecked,
}

/// `target_modules`, `exclude_modules`, `layers_to_transform` and `layers_pattern` together.
#[derive(Debug, Clone)]
pub(crate) struct TargetRules {
    pub(crate) targets: Option<TargetModules>,
    matcher: Matcher,
    exclude: Matcher,
    layers: Option<LayerRule>,
    /// `modules_to_save`: PEFT never adapts inside those.
    saved: Vec<String>,
}

#[derive(Debug, Clone)]
enum Matcher {
    Nothing,
    Names(HashSet<String>),
    Regex(PathRegex),
    AllLinear,
    Undecidable,
}

#[derive(Debug, Clone)]
struct LayerRule {
    indices: Vec<i64>,
    /// Compiled `layers_pattern`; `None` where only Python can evaluate one.
    patterns: Vec<Option<PathRegex>>,
}

impl TargetRules {
    pub(crate) fn read(fields: &mut Fields<'_>, saved: &[SavedTable]) -> Self {
        let targets = read_modules(fields, "target_modules");
        let exclude = read_modules(fields, "exclude_modules");
        let matcher = match &targets {
            Some(targets) => Matcher::new(fields, "target_modules", targets),
            None if fields.given("target_parameters").is_some() => Matcher::Nothing,
            None => Matcher::Undecidable,
        };
        let exclude = match &exclude {
            Some(exclude) if !exclude.is_empty() => {
                Matcher::new(fields, "exclude_modules", exclude)
            }
            _ => Matcher::Nothing,
        };
        Self {
            matcher,
            exclude,
            layers: LayerRule::read(fields),
            saved: saved.iter().map(|table| table.name.clone()).collect(),
            targets,
        }
    }

    pub(crate) fn targets(&self, path: &str) -> TargetMatch {
        let excluded = self.exclude.matches(path);
        let saved = self.saved.iter().any(|name| inside(path, name));
        if excluded == TargetMatch::Yes || saved {
            return TargetMatch::No;
        }
        let found = match (&self.matcher, &self.layers) {
            // A full path in the list counts whatever the layer rule says, and a regex never meets it.
            (Matcher::Names(names), Some(layers)) if !names.contains(path) => {
                match self.matcher.matches(path) {
                    TargetMatch::Yes => layers.allows(path),
                    other => other,
                }
            }
            (matcher, _) => matcher.matches(path),
        };
        match (found, excluded) {
            (TargetMatch::Yes, TargetMatch::Unchecked) => TargetMatch::Unchecked,
            (found, _) => found,
        }
    }
}

impl TargetModules {
    fn is_empty(&self) -> bool {
        match self {
            Self::List(names) => names.is_empty(),
            Self::Regex(pattern) => pattern.is_empty(),
            Self::AllLinear => false,
        }
    }
}

impl Matcher {
    fn new(fields: &mut Fields<'_>, field: &str, modules: &TargetModules) -> Self {
        match modules {
            TargetModules::List(names) => Self::Names(names.iter().cloned().collect()),
            TargetModules::AllLinear => Self::AllLinear,
            TargetModules::Regex(pattern) => {
                compile_or_warn(fields, field, pattern, PathRegex::whole(pattern))
                    .map_or(Self::Undecidable, Self::Regex)
            }
        }
    }

    fn matches(&self, path: &str) -> TargetMatch {
        let found = match self {
            Self::Nothing => Some(false),
            Self::Names(names) => Some(
                names.contains(path)
                    || path
                        .match_indices('.')
                        .any(|(dot, _)| names.contains(&path[dot + 1..])),
            ),
            Self::Regex(regex) => regex.matches(path),
            Self::AllLinear => Some(!matches!(last_segment(path), "lm_head" | "embed_tokens")),
            Self::Undecidable => None,
        };
        match found {
            Some(true) => TargetMatch::Yes,
            Some(false) => TargetMatch::No,
            None => TargetMatch::Unchecked,
        }
    }
}

impl LayerRule {
    fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let patterns = read_layer_patterns(fields);
        let indices = match fields.given("layers_to_transform")? {
            Json::Int(index) => vec![*index],
            Json::List(items) => {
                let indices: Option<Vec<i64>> = items
                    .iter()
                    .map(|item| match item {
                        Json::Int(index) => Some(*index),
                        _ => None,
                    })
                    .collect();
                indices.or_else(|| reject_layers(fields))?
            }
            _ => reject_layers(fields)?,
        };
        // PEFT reads an empty list as every layer.
        (!indices.is_empty()).then_some(Self { indices, patterns })
    }

    fn allows(&self, path: &str) -> TargetMatch {
        let mut index = None;
        if self.patterns.is_empty() {
            index = layer_index(path);
        }
        for pattern in &self.patterns {
            match pattern.as_ref().and_then(|regex| regex.group(path, "idx")) {
                None => return TargetMatch::Unchecked,
                Some(None) => {}
                Some(found) => {
                    index = found;
                    break;
                }
            }
        }
        let index = index.and_then(|digits| digits.parse::<i64>().ok());
        match index {
            Some(index) if self.indices.contains(&index) => TargetMatch::Yes,
            _ => TargetMatch::No,
        }
    }
}

fn reject_layers(fields: &mut Fields<'_>) -> Option<Vec<i64>> {
    if let Some(value) = fields.given("layers_to_transform") {
        let message = format!("is {value}; it is a layer index or a list of them");
        fields.reject("layers_to_transform", message);
    }
    None
}

/// The first all-digit segment behind a named segment with something before it: `3` of `model.layers.3.mlp.experts.7.w1`.
fn layer_index(path: &str) -> Option<&str> {
    let mut segments = path.split('.').skip(2).peekable();
    while let Some(segment) = segments.next() {
        let is_number = !segment.is_empty() && segment.bytes().all(|b| b.is_ascii_digit());
        if is_number && segments.peek().is_some() {
            return Some(segment);
        }
    }
    None
}

/// Whether the dotted segments of `name` stand one after another in `path`.
fn inside(path: &str, name: &str) -> bool {
    path.match_indices(name).any(|(start, _)| {
        let end = start + name.len();
        (start == 0 || path[..start].ends_with('.'))
            && (end == path.len() || path[end..].starts_with('.'))
    })
}

fn read_modules(fields: &mut Fields<'_>, field: &str) -> Option<TargetModules> {
    let value = fields.given(field)?;
    if let Json::Text(text) = value {
        let all_linear = field == "target_modules" && text.eq_ignore_ascii_case("all-linear");
        return Some(if all_linear {
            TargetModules::AllLinear
        } else {
            TargetModules::Regex(text.clone())
        });
    }
    let names = string_list(value);
    if names.is_none() {
        let message = format!(
            "is {value} ({}); it is a list of module names or a regular expression",
            value.kind()
        );
        fields.reject(field, message);
    }
    names.map(TargetModules::List)
}

fn read_layer_patterns(fields: &mut Fields<'_>) -> Vec<Option<PathRegex>> {
    let patterns = match fields.given("layers_pattern") {
        None => return Vec::new(),
        Some(Json::Text(text)) if text.is_empty() => return Vec::new(),
        Some(Json::Text(text)) => vec![text.clone()],
        Some(value) => match string_list(value) {
            Some(list) if list.len() <= MAX_LAYER_PATTERNS => list,
            Some(list) => {
                let message = format!(
                    "has {} entries; at most {MAX_LAYER_PATTERNS} are read",
                    list.len()
                );
                fields.reject("layers_pattern", message);
                return Vec::new();
            }
            None => {
                let message = format!("is {value}; it is a name or a list of names");
                fields.reject("layers_pattern", message);
                return Vec::new();
            }
        },
    };
    patterns
        .iter()
        .map(|pattern| {
            let regex = PathRegex::compile(pattern, |pattern| {
                format!(r"\A(?:.*?\.)?{pattern}\.(?P<idx>\d+)\.")
            });
            compile_or_warn(fields, "layers_pattern", pattern, regex)
        })
        .collect()
}

fn compile_or_warn(
    fields: &mut Fields<'_>,
    field: &str,
    pattern: &str,
    regex: Result<PathRegex, String>,
) -> Option<PathRegex> {
    regex
        .map_err(|why| {
            let pattern = super::fields::quoted(pattern);
            fields.warnings.push(ConfigFinding::warn(
                "unchecked-regex",
                format!(
                    "{field} is {pattern}, which only Python can evaluate ({why}); the tensors decide what is applied"
                ),
            ));
        })
        .ok()
}
