//! Files and functions long enough to be asked: are you two things? A list, not a rule.

use super::functions::functions;
use crate::workspace::Workspace;

/// Lines of a file, and of a function, above which it is listed.
const LONG_FILE: usize = 400;
const LONG_FUNCTION: usize = 60;

/// One line of text for each outlier, longest first.
pub(super) fn list(workspace: &Workspace) -> Vec<String> {
    let mut found = Vec::new();
    let sources = workspace
        .files
        .iter()
        .filter(|f| matches!(f.extension(), "cu" | "cuh"));
    let files = workspace
        .rust
        .iter()
        .map(|f| (&f.path, &f.text))
        .chain(sources.map(|f| (&f.path, &f.text)));
    for (path, text) in files {
        let lines = text.lines().count();
        if lines > LONG_FILE {
            found.push((lines, format!("{path}: {lines} lines")));
        }
    }
    for file in &workspace.rust {
        for function in functions(file)
            .into_iter()
            .filter(|f| f.lines > LONG_FUNCTION)
        {
            let text = format!(
                "{}:{}: {} is {} lines",
                file.path, function.line, function.name, function.lines
            );
            found.push((function.lines, text));
        }
    }
    found.sort_by_key(|(lines, _)| std::cmp::Reverse(*lines));
    found.into_iter().map(|(_, text)| text).collect()
}

#[cfg(test)]
mod tests {
    use super::list;
    use crate::tidy::planted;

    #[test]
    fn long_file_and_long_function_are_listed() {
        let function = format!("fn long() {{\n{}}}\n", "    f();\n".repeat(450));
        let listed = list(&planted::workspace(&[(
            "crates/lora-config/src/a.rs",
            &function,
        )]));
        assert_eq!(listed.len(), 2);
        assert!(
            listed.iter().any(|l| l.contains("a.rs: 452 lines")),
            "{listed:?}"
        );
        assert!(
            listed.iter().any(|l| l.contains("long is 452 lines")),
            "{listed:?}"
        );
    }
}
