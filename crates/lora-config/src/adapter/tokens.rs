//! Vocabulary tables: `modules_to_save` and `trainable_token_indices`.

use super::fields::{Fields, Problems, quoted};
use crate::json::Json;
use std::collections::HashSet;

/// Which vocabulary table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TokenTable {
    /// The input embedding, `embed_tokens`.
    Embed,
    /// The LM head, `lm_head`.
    LmHead,
}

impl TokenTable {
    /// The table that a module's name or path means, by its last segment.
    pub fn from_path(path: &str) -> Option<Self> {
        match last_segment(path) {
            "embed_tokens" => Some(Self::Embed),
            "lm_head" => Some(Self::LmHead),
            _ => None,
        }
    }

    /// The module's name: `embed_tokens` or `lm_head`.
    pub fn peft_name(self) -> &'static str {
        match self {
            Self::Embed => "embed_tokens",
            Self::LmHead => "lm_head",
        }
    }
}

/// One `modules_to_save` entry: a vocabulary table that the adapter replaces whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedTable {
    /// As written in the config: a name or a path.
    pub name: String,
    /// The table it names.
    pub table: TokenTable,
}

/// `trainable_token_indices`: ids whose rows the adapter replaces. The k-th id takes the k-th row of the adapter's tensor, so
/// the file's order is kept; an id stands at most once in a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TrainableTokens {
    /// Ids of the input embedding; `None` where the config names none.
    pub embed: Option<Vec<u32>>,
    /// Ids of the LM head, where the config names it.
    pub lm_head: Option<Vec<u32>>,
    /// True for a bare list: it means the input embedding, and the head as well where it is tied.
    pub bare_list: bool,
}

/// What follows the last dot.
pub(crate) fn last_segment(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// `modules_to_save`, refused where it names anything but a vocabulary table.
pub(crate) fn read_saved_tables(fields: &mut Fields<'_>) -> Vec<SavedTable> {
    let mut tables = Vec::new();
    let mut problems = Problems::default();
    for name in fields.names("modules_to_save").unwrap_or_default() {
        match TokenTable::from_path(&name) {
            Some(table) => tables.push(SavedTable { name, table }),
            None => problems.push(|| {
                let added = if matches!(name.as_str(), "score" | "classifier") {
                    ", which PEFT adds by itself for SEQ_CLS and TOKEN_CLS"
                } else {
                    ""
                };
                format!(
                    "names {}{added}: full weights load for embed_tokens and lm_head only; merge this module into the base \
                     model",
                    quoted(&name)
                )
            }),
        }
    }
    fields.reject_all("modules_to_save", &problems);
    tables
}

/// `trainable_token_indices`; `None` where no table has an id.
pub(crate) fn read_trainable_tokens(fields: &mut Fields<'_>) -> Option<TrainableTokens> {
    const FIELD: &str = "trainable_token_indices";
    let mut problems = Problems::default();
    let mut tokens = TrainableTokens::default();
    match fields.given(FIELD)? {
        Json::List(items) => {
            tokens.bare_list = true;
            tokens.embed = ids(items, "", &mut problems);
        }
        Json::Object(object) => {
            for (name, value) in object.iter() {
                let shown = format!("[{}]", quoted(name));
                let Json::List(items) = value else {
                    problems.push(|| format!("{shown} is {value}; it is a list of token ids"));
                    continue;
                };
                let Some(table) = TokenTable::from_path(name) else {
                    problems.push(|| {
                        format!(
                            "{shown} names no vocabulary table; embed_tokens and lm_head can be overridden"
                        )
                    });
                    continue;
                };
                let place = match table {
                    TokenTable::Embed => &mut tokens.embed,
                    TokenTable::LmHead => &mut tokens.lm_head,
                };
                if place.is_some() {
                    problems.push(|| {
                        format!(
                            "{shown} names {} a second time; put its ids into one list",
                            table.peft_name()
                        )
                    });
                    continue;
                }
                *place = ids(items, &shown, &mut problems);
            }
        }
        other => {
            problems.push(|| {
                format!(
                    "is {other} ({}); it is a list of token ids, or one for each table",
                    other.kind()
                )
            });
        }
    }
    fields.reject_all(FIELD, &problems);
    (tokens.embed.is_some() || tokens.lm_head.is_some()).then_some(tokens)
}

/// Token ids in file order; `None` for an empty list.
fn ids(items: &[Json], place: &str, problems: &mut Problems) -> Option<Vec<u32>> {
    let mut seen = HashSet::new();
    let mut ids = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let id = match item {
            Json::Int(number) => u32::try_from(*number).ok(),
            _ => None,
        };
        match id {
            Some(id) if seen.insert(id) => ids.push(id),
            Some(id) => problems.push(|| {
                format!(
                    "{place}[{index}] is {id}, which stands before it already: which of its rows would win is not defined"
                )
            }),
            None => problems.push(|| {
                format!("{place}[{index}] is {item}; a token id is an integer from 0 to {}", u32::MAX)
            }),
        }
    }
    (!ids.is_empty()).then_some(ids)
}
