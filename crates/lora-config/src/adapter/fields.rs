//! What to do with each field that a PEFT version, or a tool that writes PEFT's format, puts into the file.
//!
//! The fields with content of their own are read by the modules beside this one. This file holds the reader they share,
//! and the fields whose whole rule is "no effect" or "not applied": every field is in exactly one place, so that
//! what is left over is unknown.

use super::ParseOptions;
use crate::ConfigFinding;
use crate::json::{Json, Object};
use std::fmt;

/// Reads fields, and collects every refusal and warning on the way.
pub(crate) struct Fields<'a> {
    object: &'a Object,
    pub(crate) options: ParseOptions,
    pub(crate) findings: Vec<ConfigFinding>,
    pub(crate) warnings: Vec<ConfigFinding>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(object: &'a Object, options: ParseOptions) -> Self {
        Self {
            object,
            options,
            findings: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Entries in file order.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Json)> + use<'a> {
        self.object.iter()
    }

    /// The value as written, null included.
    pub(crate) fn raw(&self, field: &str) -> Option<&'a Json> {
        self.object.get(field)
    }

    /// The value, unless it is null or the field absent.
    pub(crate) fn given(&self, field: &str) -> Option<&'a Json> {
        self.raw(field).filter(|value| **value != Json::Null)
    }

    /// Refuses `field`; `problem` follows the field's name ("is 0; ...").
    pub(crate) fn reject(&mut self, field: &str, problem: impl AsRef<str>) {
        let message = format!("{field} {}", problem.as_ref());
        self.findings.push(ConfigFinding::reject(field, message));
    }

    /// Refuses `field` for all of `problems` in one finding, if there are any.
    pub(crate) fn reject_all(&mut self, field: &str, problems: &Problems) {
        if problems.count > 0 {
            let text = problems.to_string();
            let gap = if text.starts_with('[') { "" } else { " " };
            let message = format!("{field}{gap}{text}");
            self.findings.push(ConfigFinding::reject(field, message));
        }
    }

    /// A boolean; absent and null are false, anything else is refused.
    pub(crate) fn flag(&mut self, field: &str) -> bool {
        match self.given(field) {
            None => false,
            Some(Json::Bool(value)) => *value,
            Some(other) => {
                let message = format!("is {other} ({}); it is true or false", other.kind());
                self.reject(field, message);
                false
            }
        }
    }

    /// A list of strings; absent and null are `None`, anything else is refused.
    pub(crate) fn names(&mut self, field: &str) -> Option<Vec<String>> {
        let value = self.given(field)?;
        let names = string_list(value);
        if names.is_none() {
            let message = format!("is {value} ({}); it is a list of names", value.kind());
            self.reject(field, message);
        }
        names
    }
}

/// Problems with the parts of one field: the first few in words, the rest counted, so that a message stays readable and
/// its size bounded whatever the file holds.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    shown: Vec<String>,
    count: usize,
}

impl Problems {
    const SHOWN: usize = 8;

    pub(crate) fn push(&mut self, problem: impl FnOnce() -> String) {
        self.count += 1;
        if self.shown.len() < Self::SHOWN {
            self.shown.push(problem());
        }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown.join("; "))?;
        match self.count - self.shown.len() {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

/// `text` cut to a length that fits a one-line message, in quotes.
pub(crate) fn quoted(text: &str) -> String {
    const SHOWN: usize = 64;
    match text.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{:?}...", &text[..cut]),
        None => format!("{text:?}"),
    }
}

/// The strings of a list of nothing else.
pub(crate) fn string_list(value: &Json) -> Option<Vec<String>> {
    let Json::List(items) = value else {
        return None;
    };
    items
        .iter()
        .map(|item| match item {
            Json::Text(text) => Some(text.clone()),
            _ => None,
        })
        .collect()
}

/// Read elsewhere in this folder.
const READ_BY_NAME: [&str; 20] = [
    "peft_type",
    "peft_version",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "target_parameters",
    "modules_to_save",
    "trainable_token_indices",
    "ensure_weight_tying",
    "init_lora_weights",
    "bias",
    "lora_B_layout",
    "velora_config",
    "monteclora_config",
];

/// No effect on inference: training settings, provenance, and how the base is stored.
const IGNORED: [&str; 15] = [
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    // Only says how the base stores its weights; A and B are the same.
    "fan_in_fan_out",
    "merge_weights",
    "megatron_core",
    // The initialisation itself is judged by `init_lora_weights`; these are its settings.
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "loftq_config",
    "qalora_group_size",
    // A field of the dataclass that no version writes.
    "runtime_config",
];

/// Flags that change the math and are not applied: refused when true.
const REFUSED_FLAGS: [(&str, &str); 3] = [
    (
        "use_dora",
        "is true: DoRA rescales every output by a magnitude vector, which is not applied; merge the adapter into its \
         base, or train with use_dora=False",
    ),
    (
        "lora_bias",
        "is true: the bias of lora_B is not applied; train with lora_bias=False",
    ),
    (
        "use_qalora",
        "is true: QALoRA's A reads averages of groups of x, which is not applied; train with use_qalora=False",
    ),
];

/// Settings that change the math and are not applied. `true` in the middle: an empty object switches it on as well, since
/// PEFT builds the setting's defaults from it.
const REFUSED_WHEN_SET: [(&str, bool, &str); 7] = [
    (
        "kasa_config",
        true,
        "KaSA truncates the base's weights and scales the rank, neither of which is applied; train without it",
    ),
    (
        "use_bdlora",
        true,
        "BD-LoRA stores blocks of a block-diagonal matrix, which are not expanded; train without it",
    ),
    (
        "arrow_config",
        true,
        "Arrow mixes several adapters by a router of its own, which is not applied; load the adapters one by one",
    ),
    (
        "megatron_config",
        true,
        "Megatron's parallel layers are not supported; save the adapter from a model without them",
    ),
    (
        "alora_invocation_tokens",
        false,
        "an activated LoRA applies only after its invocation tokens, which is not supported; train a plain LoRA",
    ),
    (
        "layer_replication",
        false,
        "the adapter belongs to a model with repeated layers; build that model as a base of its own and retrain on it",
    ),
    (
        "enable_lora",
        false,
        "PEFT 0.2's grouped projections are not supported; convert the adapter to one pair per projection",
    ),
];

/// Refuses the settings above where they are on, and whatever nobody knows.
pub(crate) fn check_the_rest(fields: &mut Fields<'_>) {
    for (field, problem) in REFUSED_FLAGS {
        if fields.flag(field) {
            fields.reject(field, problem);
        }
    }
    for (field, empty_is_on, problem) in REFUSED_WHEN_SET {
        let Some(value) = fields.raw(field) else {
            continue;
        };
        let off = match value {
            Json::Null | Json::Bool(false) => true,
            other => !empty_is_on && other.is_unset(),
        };
        if !off {
            fields.reject(field, format!("is {value}: {problem}"));
        }
    }
    check_unknown(fields);
}

/// Refuses a field that nobody knows where it says something: it may change inference.
fn check_unknown(fields: &mut Fields<'_>) {
    /// Findings of their own; a file with more unknown fields than this is not PEFT's.
    const NAMED: usize = 64;
    let unknown = fields
        .entries()
        .filter(|(name, value)| !is_known(name) && !value.is_unset());
    let mut count = 0usize;
    for (name, value) in unknown {
        count += 1;
        if count <= NAMED {
            let name: String = name.chars().take(NAMED).collect();
            fields.reject(
                &name,
                format!(
                    "is {value}, and PEFT (to 0.21) has no such field, so what it changes is not known; take it out of the \
                     file, or set it to null, if it changes nothing at inference"
                ),
            );
        }
    }
    if count > NAMED {
        let more = count - NAMED;
        fields.reject(
            "unknown-fields",
            format!("are {more} more than the {NAMED} named; this is not a PEFT config"),
        );
    }
}

fn is_known(name: &str) -> bool {
    READ_BY_NAME.contains(&name)
        || IGNORED.contains(&name)
        || REFUSED_FLAGS.iter().any(|(field, _)| *field == name)
        || REFUSED_WHEN_SET.iter().any(|(field, ..)| *field == name)
}
