//! The environment is read in one file of `lora-config`; everything else receives plain values.

use super::Violation;
use crate::workspace::Workspace;
use proc_macro2::{TokenStream, TokenTree};

/// The one file that reads the environment.
const READER: &str = "crates/lora-config/src/levers.rs";

/// Functions of `std::env` that read or change variables.
const FUNCTIONS: [&str; 6] = ["var", "var_os", "vars", "vars_os", "set_var", "remove_var"];

/// Whether a file is a tool, a test, a bench or a build script, which may read the environment.
fn is_exempt(path: &str) -> bool {
    let outside = ["xtask/", "tests/", "examples/"];
    outside.iter().any(|dir| path.starts_with(dir))
        || path.ends_with("/build.rs")
        || path.contains("/tests/")
        || path.contains("/benches/")
}

/// No file but [`READER`] and the exempt ones names a variable-reading function of `env`.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in workspace
        .rust
        .iter()
        .filter(|f| f.path != READER && !is_exempt(&f.path))
    {
        for line in reads(file.tokens.clone()) {
            let message =
                format!("the environment is read in {READER} alone; take a plain value here");
            found.push(Violation::at(&file.path, line, message));
        }
    }
    found
}

/// Lines of `env::FUNCTION` and of `env::{.., FUNCTION, ..}`.
fn reads(tokens: TokenStream) -> Vec<usize> {
    let mut lines = Vec::new();
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for (at, token) in tokens.iter().enumerate() {
        if let TokenTree::Group(group) = token {
            lines.extend(reads(group.stream()));
        }
        if !matches!(token, TokenTree::Ident(name) if name == "env") {
            continue;
        }
        // `env`, two colons, then a name or a list of names.
        let named = match tokens.get(at + 3) {
            Some(TokenTree::Ident(name)) => FUNCTIONS.contains(&name.to_string().as_str()),
            Some(TokenTree::Group(group)) => group.stream().into_iter().any(
                |t| matches!(&t, TokenTree::Ident(name) if FUNCTIONS.contains(&name.to_string().as_str())),
            ),
            _ => false,
        };
        if named
            && matches!(tokens.get(at + 1), Some(TokenTree::Punct(mark)) if mark.as_char() == ':')
        {
            lines.push(token.span().start().line);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tidy::planted;

    fn lines(path: &str, text: &str) -> Vec<Option<usize>> {
        check(&planted::workspace(&[(path, text)]))
            .into_iter()
            .map(|v| v.line)
            .collect()
    }

    #[test]
    fn environment_read_elsewhere_is_found() {
        let place = "crates/lora-weights/src/slots.rs";
        assert_eq!(
            lines(place, "fn f() {\n let _ = std::env::var(\"A\");\n}"),
            [Some(2)]
        );
        assert_eq!(lines(place, "use std::env::{args, var_os};"), [Some(1)]);
        assert_eq!(lines(place, "fn f() { let _ = std::env::args(); }"), []);
    }

    #[test]
    fn the_one_reader_and_tools_may() {
        let text = "fn f() { let _ = std::env::var(\"A\"); }";
        assert_eq!(lines(super::READER, text), []);
        assert_eq!(lines("tests/src/lib.rs", text), []);
    }
}
