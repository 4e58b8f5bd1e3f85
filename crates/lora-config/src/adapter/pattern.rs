//! PEFT's regular expressions: keys of `rank_pattern` and `alpha_pattern`, `target_modules` and its companions.
//!
//! Two engines decide. A key that is a name, which nearly all are, is compared character by character: no
//! compilation, no memory to speak of, even for one key per expert. Everything else goes to `fancy_regex`, which
//! knows the lookaround and back references of Python's `re`, under limits on pattern length, program size
//! and backtracking, so that a hostile pattern costs bounded time and memory.

use fancy_regex::{Regex, RegexBuilder};
use std::sync::Arc;

/// Longest pattern compiled, in bytes. Unsloth's, the longest in use, have some five hundred.
const MAX_PATTERN_BYTES: usize = 4096;
/// Steps that a match with lookaround or back references may take before it gives up.
const BACKTRACK_STEPS: usize = 100_000;
/// Bytes of compiled program, and of lazily built automaton, a pattern may take.
const PROGRAM_BYTES: usize = 1 << 18;
/// Instructions of the backtracking program.
const PROGRAM_STEPS: usize = 1 << 14;

/// A compiled pattern that must match a whole path.
#[derive(Debug, Clone)]
pub(crate) struct PathRegex(Arc<Regex>);

impl PathRegex {
    /// Compiles Python's `pattern`, anchored at both ends. The error says why it cannot be evaluated here.
    pub(crate) fn whole(pattern: &str) -> Result<Self, String> {
        Self::compile(pattern, |pattern| format!(r"\A(?:{pattern})\z"))
    }

    /// Compiles Python's `pattern` into the regular expression that `wrap` builds around it.
    pub(crate) fn compile(
        pattern: &str,
        wrap: impl FnOnce(&str) -> String,
    ) -> Result<Self, String> {
        if pattern.len() > MAX_PATTERN_BYTES {
            return Err(format!(
                "it has {} bytes; at most {MAX_PATTERN_BYTES} are compiled",
                pattern.len()
            ));
        }
        RegexBuilder::new(&wrap(&python_classes(pattern)))
            .backtrack_limit(BACKTRACK_STEPS)
            .delegate_size_limit(PROGRAM_BYTES)
            .delegate_dfa_size_limit(PROGRAM_BYTES)
            .delegate_dfa_skip_cache_capacity_check(false)
            .max_prog_size(PROGRAM_STEPS)
            .build()
            .map(|regex| Self(Arc::new(regex)))
            .map_err(|error| one_line(&error.to_string()))
    }

    /// Whether `path` matches; `None` if the match took too many steps to finish.
    pub(crate) fn matches(&self, path: &str) -> Option<bool> {
        // A path with a line break is no module path; leaving it out makes `.` and `$` mean the same everywhere.
        if path.contains('\n') {
            return Some(false);
        }
        self.0.is_match(path).ok()
    }

    /// The text of group `name` of a match in `path`, `Some(None)` without a match, `None` if it did not finish.
    pub(crate) fn group<'p>(&self, path: &'p str, name: &str) -> Option<Option<&'p str>> {
        if path.contains('\n') {
            return Some(None);
        }
        let captures = self.0.captures(path).ok()?;
        Some(captures.and_then(|found| found.name(name).map(|group| group.as_str())))
    }
}

/// Messages of the engine show the pattern over several lines; findings are one line each.
fn one_line(message: &str) -> String {
    let shown: Vec<&str> = message
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    shown.join(" ").chars().take(200).collect()
}

/// Escapes what Python reads literally inside a character class and the engine reads as set notation:
/// `[`, `&`, `~`.
fn python_classes(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let mut chars = pattern.chars().peekable();
    let mut in_class = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' => {
                out.push(c);
                out.extend(chars.next());
                continue;
            }
            '[' if !in_class => {
                in_class = true;
                out.push(c);
                out.extend(chars.next_if_eq(&'^'));
                // A `]` in first place is a member of the class.
                if chars.next_if_eq(&']').is_some() {
                    out.push_str(r"\]");
                }
                continue;
            }
            ']' => in_class = false,
            '[' | '&' | '~' if in_class => out.push('\\'),
            _ => {}
        }
        out.push(c);
    }
    out
}

/// A key of `rank_pattern` or `alpha_pattern`: `re.match(r"(.*\.)?(KEY)$", path)`, KEY unescaped.
#[derive(Debug, Clone)]
pub(crate) enum KeyPattern {
    /// Nothing but name characters, `.` (any character), `\.` and a leading `^`.
    Name {
        /// A leading `^`: no path may stand before the key.
        whole_path: bool,
        /// One entry a character of the path, from its end; `None` matches any.
        reversed: Box<[Option<char>]>,
    },
    /// Anything else.
    Regex(PathRegex),
}

impl KeyPattern {
    /// Compiles `key`. The error says why it cannot be evaluated here.
    pub(crate) fn compile(key: &str) -> Result<Self, String> {
        if let Some(name) = Self::name(key) {
            return Ok(name);
        }
        PathRegex::compile(key, |key| format!(r"\A(.*\.)?({key})\z")).map(Self::Regex)
    }

    /// True where the regular-expression engine is needed.
    pub(crate) fn is_regex(&self) -> bool {
        matches!(self, Self::Regex(_))
    }

    fn name(key: &str) -> Option<Self> {
        let body = key.strip_prefix('^').unwrap_or(key);
        let mut reversed = Vec::with_capacity(body.len());
        let mut chars = body.chars();
        while let Some(c) = chars.next() {
            reversed.push(match c {
                '.' => None,
                '\\' if chars.next() == Some('.') => Some('.'),
                c if c.is_alphanumeric() || matches!(c, '_' | '-') => Some(c),
                _ => return None,
            });
        }
        reversed.reverse();
        Some(Self::Name {
            whole_path: body.len() < key.len(),
            reversed: reversed.into(),
        })
    }

    /// Whether the key matches `path`; `None` if the match took too many steps to finish.
    pub(crate) fn matches(&self, path: &str) -> Option<bool> {
        match self {
            Self::Name {
                whole_path,
                reversed,
            } => Some(Self::name_matches(*whole_path, reversed, path)),
            Self::Regex(regex) => regex.matches(path),
        }
    }

    fn name_matches(whole_path: bool, reversed: &[Option<char>], path: &str) -> bool {
        let mut rest = path.chars();
        for expected in reversed {
            match (rest.next_back(), expected) {
                (None, _) => return false,
                (Some(found), Some(expected)) if found != *expected => return false,
                (Some(_), _) => {}
            }
        }
        let before = rest.as_str();
        let at_boundary = before.is_empty() || (!whole_path && before.ends_with('.'));
        at_boundary && !path.contains('\n')
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key_matches(key: &str, path: &str) -> bool {
        KeyPattern::compile(key).unwrap().matches(path).unwrap()
    }

    #[test]
    fn a_name_matches_at_a_dot_and_nowhere_else() {
        assert!(key_matches("q_proj", "model.layers.0.self_attn.q_proj"));
        assert!(key_matches("q_proj", "q_proj"));
        assert!(!key_matches("proj", "model.layers.0.self_attn.q_proj"));
        assert!(!key_matches("q_proj", "model.layers.0.q_proj.inner"));
    }

    #[test]
    fn an_unescaped_dot_matches_any_character() {
        assert!(key_matches("layers.1.mlp", "model.layers.1.mlp"));
        assert!(key_matches("layers.1.mlp", "model.layers_1_mlp"));
        assert!(key_matches(r"layers\.1\.mlp", "model.layers.1.mlp"));
        assert!(!key_matches(r"layers\.1\.mlp", "model.layers_1_mlp"));
    }

    #[test]
    fn a_caret_forces_the_whole_path() {
        assert!(key_matches("^model.q_proj", "model.q_proj"));
        assert!(!key_matches("^q_proj", "model.q_proj"));
        assert!(!key_matches(
            "^(q_proj|k_proj)",
            "model.layers.0.self_attn.q_proj"
        ));
    }

    #[test]
    fn regex_keys_match_as_python_does() {
        let path = "model.layers.0.mlp.gate_proj";
        assert!(key_matches(r".*\.0\.mlp\.(gate|up)_proj", path));
        assert!(key_matches(
            "layers.(0|1).mlp.(gate_proj|nothing|down_proj)",
            path
        ));
        assert!(key_matches(r"(?!down)\w+_proj", path));
        assert!(!key_matches(r"(?!gate)\w+_proj", path));
        assert!(key_matches("gate_proj|up_proj", path));
        assert!(
            !key_matches("gate", path),
            "the key reaches the end of the path"
        );
        assert!(key_matches("layers.[0-9]{1,2}.mlp.gate_proj", path));
    }

    #[test]
    fn set_notation_in_a_class_is_literal_as_in_python() {
        assert_eq!(
            python_classes(r"[[a&&b]x[^]~]\[["),
            r"[\[a\&\&b]x[^\]\~]\[["
        );
        assert!(key_matches("[[]x", "[x"));
        assert!(key_matches("[a&&b]x", "&x"));
        assert!(key_matches("[]a]x", "]x"));
    }

    #[test]
    fn patterns_that_cannot_be_evaluated_say_why() {
        for bad in ["(", "*a", "a)(b(", "[z-a]", "(?P<x>a)(?P<x>b)(?Q)"] {
            let why = KeyPattern::compile(bad).unwrap_err();
            assert!(!why.is_empty() && !why.contains('\n'), "{bad}: {why}");
        }
        assert!(
            KeyPattern::compile(&"(a)".repeat(2000))
                .unwrap_err()
                .contains("6000 bytes")
        );
        assert!(KeyPattern::compile(r"(((\w{100}){100}){100})").is_err());
    }

    #[test]
    fn catastrophic_backtracking_gives_up_instead_of_hanging() {
        let pattern = KeyPattern::compile(r"(?=x)((x+)+)+\2y").unwrap();
        assert_eq!(pattern.matches(&"x".repeat(64)), None);
    }

    #[test]
    fn a_path_with_a_line_break_matches_nothing() {
        assert!(!key_matches("q_proj", "model\n.q_proj"));
        assert!(!key_matches("(q_proj|k_proj)", "model.\nq_proj"));
    }

    proptest! {
        /// The character-by-character comparison and the regular expression it stands for agree.
        #[test]
        fn names_match_like_the_expression_they_are(
            key in r"\^?([a-c.]|\\\.){0,6}",
            path in "[a-c.]{0,10}",
        ) {
            let name = KeyPattern::compile(&key).unwrap();
            prop_assert!(!name.is_regex());
            let regex = fancy_regex::Regex::new(&format!(r"\A(.*\.)?({key})\z")).unwrap();
            prop_assert_eq!(name.matches(&path).unwrap(), regex.is_match(&path).unwrap());
        }

        #[test]
        fn no_pattern_panics(pattern in any::<String>(), path in any::<String>()) {
            if let Ok(key) = KeyPattern::compile(&pattern) {
                key.matches(&path);
            }
        }

        #[test]
        fn no_regex_like_pattern_panics(
            pattern in r"([a-z.*+?|^$]|\\[a-zA-Z0-9]|\(\?[!=<P:]|[()\[\]{},0-9]){0,20}",
            path in "[a-z.0-9]{0,40}",
        ) {
            if let Ok(regex) = PathRegex::whole(&pattern) {
                regex.matches(&path);
            }
        }
    }
}
