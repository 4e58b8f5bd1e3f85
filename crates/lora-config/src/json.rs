//! JSON the way Python's `json` module writes it: key order kept, repeated keys seen, `NaN` and `Infinity` read.
//!
//! `serde_json::Value` loses the first two (and a workspace-wide feature could change the first), so the tree is
//! this crate's own; the grammar, the depth limit and the numbers stay `serde_json`'s.

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::fmt::{self, Write};

/// Longest text read. The largest published `config.json` and `adapter_config.json` files are some hundred
/// kilobytes; the tree of a hostile text takes a small multiple of this.
pub(crate) const MAX_TEXT_BYTES: usize = 16 << 20;

/// Stands for Python's bare `NaN`, `Infinity` and `-Infinity` inside the text given to `serde_json`, which
/// (rightly) knows no such tokens. A NUL never starts a string in a real config; in a forged one it makes a
/// number that is not finite, which is refused wherever a number is read.
const NOT_FINITE: [(&str, &str, f64); 3] = [
    ("-Infinity", "\0-Infinity", f64::NEG_INFINITY),
    ("Infinity", "\0Infinity", f64::INFINITY),
    ("NaN", "\0NaN", f64::NAN),
];

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    /// An integer; one past 64 signed bits, which no field may hold, is a [`Self::Float`].
    Int(i64),
    Float(f64),
    Text(String),
    List(Vec<Json>),
    Object(Object),
}

/// A JSON object in file order, repeated keys included.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Object {
    entries: Vec<(String, Json)>,
}

/// Why a text is not a JSON object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JsonFault {
    TooLarge { bytes: usize },
    Syntax { message: String },
    NotAnObject { kind: &'static str },
}

impl fmt::Display for JsonFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { bytes } => write!(
                f,
                "the text has {bytes} bytes; at most {MAX_TEXT_BYTES} are read"
            ),
            Self::Syntax { message } => write!(f, "not valid JSON: {message}"),
            Self::NotAnObject { kind } => {
                write!(
                    f,
                    "the top level is {kind}, where an object ({{...}}) belongs"
                )
            }
        }
    }
}

/// Parses a text whose top level is an object.
pub(crate) fn parse_object(text: &str) -> Result<Object, JsonFault> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(JsonFault::TooLarge { bytes: text.len() });
    }
    let text = quote_not_finite(text);
    match serde_json::from_str(&text) {
        Ok(Json::Object(object)) => Ok(object),
        Ok(other) => Err(JsonFault::NotAnObject { kind: other.kind() }),
        Err(error) => Err(JsonFault::Syntax {
            message: error.to_string(),
        }),
    }
}

/// Turns bare non-finite numbers into the strings that [`NOT_FINITE`] lists; nearly always a borrow.
fn quote_not_finite(text: &str) -> Cow<'_, str> {
    if !text.contains("NaN") && !text.contains("Infinity") {
        return Cow::Borrowed(text);
    }
    let mut quoted = String::with_capacity(text.len() + 16);
    let mut rest = text;
    let mut in_string = false;
    while let Some(first) = rest.chars().next() {
        let token = NOT_FINITE
            .iter()
            .find(|(token, ..)| !in_string && rest.starts_with(token));
        let taken = if let Some((token, ..)) = token {
            quoted.push_str("\"\\u0000");
            quoted.push_str(token);
            quoted.push('"');
            token.len()
        } else if in_string && first == '\\' {
            // The escaped character with its backslash, so that `\"` does not end the string.
            let taken = 1 + rest[1..].chars().next().map_or(0, char::len_utf8);
            quoted.push_str(&rest[..taken]);
            taken
        } else {
            in_string ^= first == '"';
            quoted.push(first);
            first.len_utf8()
        };
        rest = &rest[taken..];
    }
    Cow::Owned(quoted)
}

impl Json {
    /// The value's type, with its article, for messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Int(_) | Self::Float(_) => "a number",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }

    /// Null, false, or an empty string, list or object: a field that is present and says nothing.
    pub(crate) fn is_unset(&self) -> bool {
        match self {
            Self::Null | Self::Bool(false) => true,
            Self::Text(text) => text.is_empty(),
            Self::List(items) => items.is_empty(),
            Self::Object(object) => object.entries.is_empty(),
            Self::Bool(true) | Self::Int(_) | Self::Float(_) => false,
        }
    }

    /// Writes the value as compact JSON until `out` passes `limit` bytes.
    fn write_up_to(&self, out: &mut String, limit: usize) {
        if out.len() > limit {
            return;
        }
        // Writing to a String cannot fail.
        let _ = match self {
            Self::Null => write!(out, "null"),
            Self::Bool(value) => write!(out, "{value}"),
            Self::Int(value) => write!(out, "{value}"),
            Self::Float(value) => write!(out, "{value:?}"),
            Self::Text(text) => {
                let kept: String = text.chars().take(limit).collect();
                write!(out, "{kept:?}")
            }
            Self::List(items) => {
                out.push('[');
                for (index, item) in items.iter().take(limit).enumerate() {
                    if index > 0 {
                        out.push_str(", ");
                    }
                    item.write_up_to(out, limit);
                }
                write!(out, "]")
            }
            Self::Object(object) => {
                out.push('{');
                for (index, (key, value)) in object.entries.iter().take(limit).enumerate() {
                    if index > 0 {
                        out.push_str(", ");
                    }
                    let kept: String = key.chars().take(limit).collect();
                    let _ = write!(out, "{kept:?}: ");
                    value.write_up_to(out, limit);
                }
                write!(out, "}}")
            }
        };
    }
}

/// Compact JSON, cut after some eighty characters: what messages quote.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 80;
        let mut text = String::new();
        self.write_up_to(&mut text, SHOWN);
        match text.char_indices().nth(SHOWN) {
            Some((cut, _)) => write!(f, "{}...", &text[..cut]),
            None => f.write_str(&text),
        }
    }
}

impl Object {
    /// The first value under `key`.
    pub(crate) fn get(&self, key: &str) -> Option<&Json> {
        self.entries
            .iter()
            .find_map(|(name, value)| (name == key).then_some(value))
    }

    /// Entries in file order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Json)> {
        self.entries
            .iter()
            .map(|(name, value)| (name.as_str(), value))
    }

    /// Dotted paths of the keys that appear more than once in their object, at any depth.
    pub(crate) fn repeated_keys(&self) -> Vec<String> {
        let mut found = Vec::new();
        self.collect_repeated("", &mut found);
        found
    }

    fn collect_repeated(&self, prefix: &str, found: &mut Vec<String>) {
        let mut names: Vec<&str> = self.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        let mut repeated: Vec<&str> = names
            .windows(2)
            .filter_map(|pair| (pair[0] == pair[1]).then_some(pair[0]))
            .collect();
        repeated.dedup();
        found.extend(repeated.into_iter().map(|name| format!("{prefix}{name}")));
        for (name, value) in self.iter() {
            collect_repeated_in(value, &|| format!("{prefix}{name}."), found);
        }
    }
}

/// `prefix` is made only where an object is reached, so that flat lists cost nothing.
fn collect_repeated_in(value: &Json, prefix: &dyn Fn() -> String, found: &mut Vec<String>) {
    match value {
        Json::Object(object) => object.collect_repeated(&prefix(), found),
        Json::List(items) => {
            for item in items {
                collect_repeated_in(item, prefix, found);
            }
        }
        _ => {}
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Int(value))
    }
    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(i64::try_from(value).map_or(Json::Float(value as f64), Json::Int))
    }
    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Float(value))
    }
    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        let number = NOT_FINITE
            .iter()
            .find_map(|&(_, marker, number)| (marker == value).then_some(number));
        Ok(number.map_or_else(|| Json::Text(value.to_owned()), Json::Float))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Json::List(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(Json::Object(Object { entries }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_file_order() {
        let object = parse_object(r#"{"b": 1, "a": 2, "c": 3}"#).unwrap();
        let names: Vec<&str> = object.iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["b", "a", "c"]);
    }

    #[test]
    fn finds_repeated_keys_at_any_depth() {
        let text =
            r#"{"r": 1, "deep": [{"x": {"k": 1, "k": 1}}], "r": 2, "r": 3, "other": {"r": 4}}"#;
        assert_eq!(
            parse_object(text).unwrap().repeated_keys(),
            ["r", "deep.x.k"]
        );
    }

    #[test]
    fn reads_numbers_that_python_writes_and_json_does_not_know() {
        let object =
            parse_object(r#"{"a": NaN, "b": [-Infinity, Infinity], "c": "NaN \" NaN \\"}"#)
                .unwrap();
        assert!(matches!(object.get("a"), Some(Json::Float(x)) if x.is_nan()));
        assert_eq!(
            object.get("b"),
            Some(&Json::List(vec![
                Json::Float(f64::NEG_INFINITY),
                Json::Float(f64::INFINITY)
            ]))
        );
        assert_eq!(
            object.get("c"),
            Some(&Json::Text("NaN \" NaN \\".to_owned()))
        );
    }

    #[test]
    fn says_what_stands_in_place_of_an_object() {
        let fault = parse_object("[1]").unwrap_err();
        assert_eq!(fault, JsonFault::NotAnObject { kind: "a list" });
        assert!(matches!(
            parse_object("{not json").unwrap_err(),
            JsonFault::Syntax { .. }
        ));
        assert!(matches!(
            parse_object("").unwrap_err(),
            JsonFault::Syntax { .. }
        ));
    }

    #[test]
    fn depth_and_length_are_bounded() {
        let deep = format!("{{\"a\":{}", "[".repeat(100_000));
        assert!(matches!(
            parse_object(&deep).unwrap_err(),
            JsonFault::Syntax { .. }
        ));
        let long = " ".repeat(MAX_TEXT_BYTES + 1);
        assert_eq!(
            parse_object(&long).unwrap_err(),
            JsonFault::TooLarge {
                bytes: MAX_TEXT_BYTES + 1
            }
        );
    }

    #[test]
    fn quoted_values_are_cut() {
        let value = Json::List(vec![Json::Int(1234567); 1_000_000]);
        let shown = value.to_string();
        assert!(
            shown.len() < 100 && shown.starts_with("[1234567, ") && shown.ends_with("..."),
            "{shown}"
        );
        assert_eq!(Json::Float(1e300).to_string(), "1e300");
        assert_eq!(
            Json::Text("é".repeat(500)).to_string().chars().count(),
            80 + 3
        );
    }
}
