//! Rank, alpha and scale of a module.

use super::fields::{Fields, Problems, quoted};
use super::pattern::KeyPattern;
use crate::ConfigFinding;
use crate::json::Json;

/// Largest rank a config may state. Kernels stop far below; past this a number is a typing error or an attack, and
/// sizes derived from it would be too.
pub(crate) const MAX_RANK: u32 = 1 << 20;

/// Most keys of one pattern table that need the regular-expression engine. Names (what PEFT itself writes) do not
/// count.
const MAX_REGEX_KEYS: usize = 256;

/// Rank, alpha and scaling of one module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModuleScaling {
    /// True rank, before any padding: over 0.
    pub rank: u32,
    /// Alpha, finite.
    pub alpha: f64,
    /// `alpha / rank`, or `alpha / sqrt(rank)` with `use_rslora`: computed in f64, rounded once to f32, finite.
    pub scaling: f32,
}

impl ModuleScaling {
    pub(crate) fn new(rank: u32, alpha: f64, use_rslora: bool) -> Self {
        let rank_f64 = f64::from(rank);
        let denominator = if use_rslora {
            rank_f64.sqrt()
        } else {
            rank_f64
        };
        Self {
            rank,
            alpha,
            scaling: (alpha / denominator) as f32,
        }
    }
}

/// `rank_pattern` or `alpha_pattern`: values by key, in file order.
#[derive(Debug, Clone)]
pub(crate) struct PatternTable<V> {
    pub(crate) entries: Vec<(String, V)>,
    patterns: Vec<KeyPattern>,
}

impl<V: Copy> PatternTable<V> {
    fn empty() -> Self {
        Self {
            entries: Vec::new(),
            patterns: Vec::new(),
        }
    }

    /// Indices of the keys that match `path`, ascending.
    pub(crate) fn matching<'t>(&'t self, path: &'t str) -> impl Iterator<Item = usize> + 't {
        self.patterns
            .iter()
            .enumerate()
            .filter_map(move |(index, pattern)| {
                (pattern.matches(path) == Some(true)).then_some(index)
            })
    }

    /// The value of the first key in file order that matches `path`. PEFT looks the path itself up where no
    /// expression matches, so a key that equals it counts too.
    pub(crate) fn value(&self, path: &str) -> Option<V> {
        let found = self.matching(path).next();
        let index = found.or_else(|| self.entries.iter().position(|(key, _)| key == path))?;
        Some(self.entries[index].1)
    }

    /// The first key whose match against `path` did not finish, if it could have been the one that decides.
    pub(crate) fn undecided(&self, path: &str) -> Option<&str> {
        let first = self
            .patterns
            .iter()
            .position(|pattern| pattern.matches(path) != Some(false))?;
        let undecided = self.patterns[first].matches(path).is_none();
        undecided.then(|| self.entries[first].0.as_str())
    }
}

/// A positive rank, or what is wrong with `value`.
fn rank(value: &Json) -> Result<u32, String> {
    match value {
        Json::Int(number) if *number < 1 => {
            Err(format!("is {number}; a rank is a positive integer"))
        }
        Json::Int(number) => u32::try_from(*number)
            .ok()
            .filter(|rank| *rank <= MAX_RANK)
            .ok_or_else(|| {
                format!("is {number}; ranks up to {MAX_RANK} are read: correct the number")
            }),
        other => Err(format!(
            "is {other} ({}); a rank is a positive integer",
            other.kind()
        )),
    }
}

/// A finite alpha whose scale is finite at every rank, or what is wrong with `value`.
fn alpha(value: &Json) -> Result<f64, String> {
    let number = match value {
        Json::Int(number) => *number as f64,
        Json::Float(number) => *number,
        other => {
            return Err(format!(
                "is {other} ({}); write the finite number that it was trained with",
                other.kind()
            ));
        }
    };
    // A rank is at least 1, so no scale is larger than its alpha.
    if (number as f32).is_finite() {
        Ok(number)
    } else {
        Err(format!(
            "is {value}; alpha must be finite in f32: write the number that it was trained with"
        ))
    }
}

/// `r`; 1 stands in after a refusal, which [`Fields`] keeps.
pub(crate) fn read_r(fields: &mut Fields<'_>) -> u32 {
    number_or_default(fields, "r", 8, rank).unwrap_or(1)
}

/// `lora_alpha`.
pub(crate) fn read_alpha(fields: &mut Fields<'_>) -> f64 {
    let found = number_or_default(fields, "lora_alpha", 8.0, alpha).unwrap_or(1.0);
    warn_if_not_positive(fields, "lora_alpha", found);
    found
}

/// `use_rslora`: absent is refused, since the scale depends on it; every PEFT since 0.8 writes it.
pub(crate) fn read_use_rslora(fields: &mut Fields<'_>) -> bool {
    match fields.given("use_rslora") {
        Some(_) => fields.flag("use_rslora"),
        None => {
            if !fields.options.assume_peft_defaults {
                fields.reject(
                    "use_rslora",
                    "is absent, and the scale is alpha / r or alpha / sqrt(r) by it; PEFT takes false: pass \
                     assume_peft_defaults (--assume-peft-defaults) to do the same, or write it into the file",
                );
            }
            false
        }
    }
}

/// The number under `field`; absent is refused unless PEFT's `default` may be taken.
fn number_or_default<V: std::fmt::Display>(
    fields: &mut Fields<'_>,
    field: &str,
    default: V,
    read: fn(&Json) -> Result<V, String>,
) -> Option<V> {
    let Some(value) = fields.raw(field) else {
        if fields.options.assume_peft_defaults {
            return Some(default);
        }
        let message = format!(
            "is absent, and a scale is never guessed; PEFT takes {default}: pass assume_peft_defaults \
             (--assume-peft-defaults) to do the same, or write it into the file"
        );
        fields.reject(field, message);
        return None;
    };
    read(value)
        .map_err(|problem| fields.reject(field, problem))
        .ok()
}

/// `rank_pattern`.
pub(crate) fn read_rank_pattern(fields: &mut Fields<'_>) -> PatternTable<u32> {
    read_pattern(fields, "rank_pattern", rank)
}

/// `alpha_pattern`.
pub(crate) fn read_alpha_pattern(fields: &mut Fields<'_>) -> PatternTable<f64> {
    let table = read_pattern(fields, "alpha_pattern", alpha);
    if let Some((key, value)) = table.entries.iter().find(|(_, value)| *value <= 0.0) {
        warn_if_not_positive(fields, &format!("alpha_pattern[{}]", quoted(key)), *value);
    }
    table
}

fn read_pattern<V: Copy>(
    fields: &mut Fields<'_>,
    field: &str,
    read: fn(&Json) -> Result<V, String>,
) -> PatternTable<V> {
    let mut table = PatternTable::empty();
    let object = match fields.given(field) {
        None => return table,
        Some(Json::Object(object)) => object,
        Some(other) => {
            let message = format!(
                "is {other} ({}); it maps module names to numbers",
                other.kind()
            );
            fields.reject(field, message);
            return table;
        }
    };
    let mut problems = Problems::default();
    let mut regex_keys = 0;
    for (key, value) in object.iter() {
        match read(value) {
            Ok(value) => match KeyPattern::compile(key) {
                Ok(pattern) => {
                    regex_keys += usize::from(pattern.is_regex());
                    table.entries.push((key.to_owned(), value));
                    table.patterns.push(pattern);
                }
                Err(why) => problems.push(|| {
                    let key = quoted(key);
                    format!(
                        "[{key}] is a regular expression that cannot be evaluated ({why}); write a module's name or path"
                    )
                }),
            },
            Err(why) => problems.push(|| format!("[{}] {why}", quoted(key))),
        }
        if regex_keys > MAX_REGEX_KEYS {
            problems.push(|| {
                format!(
                    "has more than {MAX_REGEX_KEYS} regular expressions as keys; write modules' names or paths"
                )
            });
            break;
        }
    }
    fields.reject_all(field, &problems);
    table
}

fn warn_if_not_positive(fields: &mut Fields<'_>, name: &str, alpha: f64) {
    if alpha <= 0.0 {
        let effect = if alpha == 0.0 {
            "switches the adapter off"
        } else {
            "turns the adapter's sign around"
        };
        fields.warnings.push(ConfigFinding::warn(
            "alpha-not-positive",
            format!("{name} is {alpha}, which {effect} where it applies"),
        ));
    }
}
