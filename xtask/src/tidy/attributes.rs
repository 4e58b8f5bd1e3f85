//! Attributes that silence what the other rules hold.

use super::Violation;
use crate::workspace::Workspace;
use proc_macro2::{TokenStream, TokenTree};

/// Lints that may be neither allowed nor expected anywhere.
const NEVER_SILENCED: [&str; 3] = [
    "too_many_arguments",
    "undocumented_unsafe_blocks",
    "missing_docs",
];

/// No lint above is silenced and no test is ignored.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in &workspace.rust {
        walk(file.tokens.clone(), &mut |line, message| {
            found.push(Violation::at(&file.path, line, message))
        });
    }
    found
}

/// Reports `allow(LINT)` / `expect(LINT)` and `[ignore]` of a token stream.
fn walk(tokens: TokenStream, report: &mut dyn FnMut(usize, String)) {
    let mut silencing = false;
    let mut after_hash = false;
    for token in tokens {
        if let TokenTree::Group(group) = &token {
            let first = group.stream().into_iter().next();
            if after_hash && matches!(&first, Some(TokenTree::Ident(name)) if name == "ignore") {
                let line = group.span_open().start().line;
                report(line, "a test that is ignored proves nothing: let it run, or say in it why it is skipped".to_owned());
            }
            if silencing {
                for lint in lints(group.stream()) {
                    report(
                        group.span_open().start().line,
                        format!("{lint} may not be silenced"),
                    );
                }
            }
            walk(group.stream(), report);
        }
        silencing = matches!(&token, TokenTree::Ident(name) if name == "allow" || name == "expect");
        after_hash = matches!(&token, TokenTree::Punct(mark) if mark.as_char() == '#')
            || (after_hash && matches!(&token, TokenTree::Punct(mark) if mark.as_char() == '!'));
    }
}

/// Names among `tokens` that may never be silenced.
fn lints(tokens: TokenStream) -> Vec<String> {
    let names = tokens.into_iter().filter_map(|token| match token {
        TokenTree::Ident(name) => Some(name.to_string()),
        _ => None,
    });
    names
        .filter(|name| NEVER_SILENCED.contains(&name.as_str()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tidy::planted;

    fn messages(text: &str) -> Vec<String> {
        let workspace = planted::workspace(&[("crates/lora-config/src/a.rs", text)]);
        check(&workspace).into_iter().map(|v| v.message).collect()
    }

    #[test]
    fn silenced_lint_is_found() {
        assert!(
            messages("#[allow(clippy::too_many_arguments)]\nfn f() {}")[0]
                .contains("too_many_arguments")
        );
        assert!(messages("#![allow(dead_code, missing_docs)]")[0].contains("missing_docs"));
        assert!(
            messages("#[cfg_attr(test, expect(missing_docs))]\nfn f() {}")[0]
                .contains("missing_docs")
        );
        assert!(messages("#[expect(dead_code)]\nfn f() {}").is_empty());
    }

    #[test]
    fn ignored_test_is_found() {
        assert!(messages("#[test]\n#[ignore = \"slow\"]\nfn f() {}")[0].contains("ignored"));
        assert!(messages("fn ignore() { let a = [ignore]; }").is_empty());
    }
}
