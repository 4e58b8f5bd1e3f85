//! Names that the docs give of types, functions and tests exist: a rule there points at what holds it.

use super::Violation;
use crate::public_items;
use crate::workspace::Workspace;
use proc_macro2::{TokenStream, TokenTree};
use std::collections::HashSet;

/// Sources that are not Rust and whose words are names too.
const OTHER_SOURCES: [&str; 6] = ["toml", "cu", "cuh", "py", "sh", ""];

/// Every `code` span of README.md and docs/*.md that looks like a name of ours is one.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let known = Known::of(workspace);
    let is_doc =
        |path: &str| path == "README.md" || path.starts_with("docs/") && path.ends_with(".md");
    let mut found = Vec::new();
    for file in workspace.files.iter().filter(|file| is_doc(&file.path)) {
        for (line, span) in code_spans(&file.text) {
            if !known.has(span) {
                let message = format!("`{span}` is no name in the sources");
                found.push(Violation::at(&file.path, line, message));
            }
        }
    }
    found
}

/// What names there are.
struct Known {
    /// Identifiers, and words of strings: formats of others are known by them.
    words: HashSet<String>,
    /// Paths of public items, from their crate's root.
    items: Vec<String>,
}

impl Known {
    fn of(workspace: &Workspace) -> Self {
        let mut words = HashSet::new();
        for file in &workspace.rust {
            collect(file.tokens.clone(), &mut words);
            words.extend(file.path.split(['/', '.']).map(str::to_owned));
        }
        for file in workspace
            .files
            .iter()
            .filter(|f| OTHER_SOURCES.contains(&f.extension()))
        {
            words.extend(split(&file.text));
        }
        let items = public_items::libraries(workspace).unwrap_or_default();
        let items = items.into_iter().flat_map(|(_, items)| items);
        Self {
            words,
            items: items
                .filter_map(|line| line.split(' ').nth(1).map(str::to_owned))
                .collect(),
        }
    }

    /// True for what does not look like a name, too.
    fn has(&self, span: &str) -> bool {
        let name = span.strip_suffix("()").unwrap_or(span);
        let segments: Vec<&str> = name.split("::").collect();
        if !segments.iter().all(|s| is_identifier(s)) {
            return true;
        }
        match segments.as_slice() {
            [word] => !looks_ours(word) || self.words.contains(*word),
            [.., owner, _] if starts_upper(owner) => {
                let end = format!("::{name}");
                self.items
                    .iter()
                    .any(|item| item == name || item.ends_with(&end))
            }
            segments => segments.iter().all(|segment| self.words.contains(*segment)),
        }
    }
}

fn is_identifier(word: &str) -> bool {
    let mut chars = word.chars();
    chars
        .next()
        .is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn starts_upper(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_uppercase())
}

/// CamelCase, or snake_case of several words; a single lower-case word may be anything.
fn looks_ours(word: &str) -> bool {
    let camel = starts_upper(word) && word.chars().any(|c| c.is_ascii_lowercase());
    camel || word.contains('_')
}

fn split(text: &str) -> impl Iterator<Item = String> + '_ {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
}

/// Identifiers and words of string literals, doc comments left out.
fn collect(tokens: TokenStream, words: &mut HashSet<String>) {
    let mut is_doc = false;
    for token in tokens {
        match token {
            TokenTree::Group(group) => collect(group.stream(), words),
            TokenTree::Ident(ident) => {
                is_doc = ident == "doc";
                words.insert(ident.to_string());
                continue;
            }
            TokenTree::Punct(_) => continue,
            TokenTree::Literal(literal) if !is_doc => words.extend(split(&literal.to_string())),
            TokenTree::Literal(_) => {}
        }
        is_doc = false;
    }
}

/// Line and text of each `code` span outside code blocks.
fn code_spans(text: &str) -> Vec<(usize, &str)> {
    let mut in_block = false;
    let mut found = Vec::new();
    for (line, text) in (1..).zip(text.lines()) {
        if text.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if !in_block {
            found.extend(text.split('`').skip(1).step_by(2).map(|span| (line, span)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tidy::planted;

    fn unknown(doc: &str) -> Vec<String> {
        let library = "//! Of old_name_of_a_test.\npub struct Parser { pub rank: u32 } impl Parser { pub fn parse(&self) {} }
            #[test] fn zero_rank_is_refused() { let key = \"base_model.model\"; }";
        let files = [
            ("crates/lora-config/src/lib.rs", library),
            ("docs/integrating.md", doc),
        ];
        let found = check(&planted::workspace(&files));
        found
            .into_iter()
            .map(|violation| violation.message)
            .collect()
    }

    #[test]
    fn names_that_do_not_exist_are_found() {
        for gone in [
            "Parsers",
            "Parser::read",
            "old_name_of_a_test",
            "config::zero_ranks",
            "Parser::rank_",
        ] {
            let found = unknown(&format!("Held by `{gone}`.\n"));
            assert_eq!(found.len(), 1, "{gone}: {found:?}");
            assert!(found[0].contains(gone));
        }
    }

    #[test]
    fn names_that_exist_and_what_is_no_name_pass() {
        let doc = "`Parser`, `Parser::parse`, `Parser::rank`, `zero_rank_is_refused`, `base_model`, `lora plan`, `x * w`, `wgmma`, `r`.\n\
            ```\nlet x = `NotAName`;\n```\n";
        assert_eq!(unknown(doc), [""; 0]);
    }
}
