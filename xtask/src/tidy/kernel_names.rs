//! Strings name kernels in one place: the table that is checked when a module loads.

use super::Violation;
use crate::workspace::Workspace;
use proc_macro2::{TokenStream, TokenTree};

/// The one file whose strings name kernels.
const TABLE: &str = "crates/lora-kernels/src/cuda/module.rs";

/// Every `__global__` function of `kernels/src` is in the table, and no other string names one.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let sources = workspace
        .files
        .iter()
        .filter(|f| f.path.starts_with("kernels/src/") && f.extension() == "cu");
    let kernels: Vec<(&str, String)> = sources
        .flat_map(|f| {
            global_functions(&f.text)
                .into_iter()
                .map(|name| (f.path.as_str(), name))
        })
        .collect();
    let mut found = Vec::new();
    let mut listed = Vec::new();
    for file in workspace
        .rust
        .iter()
        .filter(|f| !f.path.starts_with("xtask/"))
    {
        for (line, text) in strings(file.tokens.clone()) {
            match kernels.iter().any(|(_, name)| *name == text) {
                true if file.path == TABLE => listed.push(text),
                true => found.push(Violation::at(
                    &file.path,
                    line,
                    format!("kernel {text} is named outside {TABLE}"),
                )),
                false => {}
            }
        }
    }
    for (path, name) in &kernels {
        if !listed.contains(name) {
            found.push(Violation::of(
                path,
                format!("kernel {name} is not in {TABLE}"),
            ));
        }
    }
    found
}

/// Names of the `__global__` functions of a CUDA source: the identifier before the first parenthesis that does not
/// belong to a `__launch_bounds__`-like attribute.
fn global_functions(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    for definition in text.split("__global__").skip(1) {
        let mut rest = definition;
        while let Some((before, after)) = rest.split_once('(') {
            let name = before
                .trim_end()
                .rsplit(|c: char| !c.is_alphanumeric() && c != '_')
                .next()
                .unwrap_or("");
            if !name.starts_with("__") {
                names.push(name.to_owned());
                break;
            }
            rest = after.split_once(')').map_or("", |(_, r)| r);
        }
    }
    names
}

/// String literals of a token stream with their lines.
fn strings(tokens: TokenStream) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Group(group) => found.extend(strings(group.stream())),
            TokenTree::Literal(literal) => {
                let line = literal.span().start().line;
                if let Ok(text) = syn::parse_str::<syn::LitStr>(&literal.to_string()) {
                    found.push((line, text.value()));
                }
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{TABLE, check};
    use crate::tidy::planted;

    const SOURCE: (&str, &str) = (
        "kernels/src/delta.cu",
        "extern \"C\" __global__ void __launch_bounds__(128) shrink(const Params p) { f(p); }",
    );

    #[test]
    fn kernel_named_elsewhere_is_found() {
        let table = (TABLE, "const A: &str = \"shrink\";");
        let stray = (
            "crates/lora-kernels/src/launch.rs",
            "fn f() { load(\"shrink\"); }",
        );
        let found = check(&planted::workspace(&[SOURCE, table, stray]));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].path, stray.0);
        assert_eq!(check(&planted::workspace(&[SOURCE, table])), []);
    }

    #[test]
    fn kernel_missing_from_the_table_is_found() {
        let found = check(&planted::workspace(&[SOURCE]));
        assert_eq!(found.len(), 1);
        assert!(
            found[0].message.contains("shrink is not in"),
            "{}",
            found[0]
        );
    }
}
