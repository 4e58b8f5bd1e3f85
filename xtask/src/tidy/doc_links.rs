//! Links of the Markdown files lead to files that are there.

use super::Violation;
use crate::workspace::Workspace;
use std::path::{Component, Path, PathBuf};

/// Every relative link of a Markdown file names a file of the workspace, or a folder that holds one.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in workspace.files.iter().filter(|f| f.extension() == "md") {
        let dir = Path::new(&file.path).parent().unwrap_or(Path::new(""));
        for (line, text) in (1..).zip(file.text.lines()) {
            for link in links(text).filter(|link| !link.contains("://") && !link.starts_with('#')) {
                let path = link.split('#').next().unwrap_or(link);
                if !exists(workspace, &plain(&dir.join(path))) {
                    let message = format!("the link to {link} leads nowhere");
                    found.push(Violation::at(&file.path, line, message));
                }
            }
        }
    }
    found
}

/// Targets of `[text](target)`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once(')')?.0))
}

/// The path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

fn exists(workspace: &Workspace, path: &Path) -> bool {
    let files = workspace.files.iter().map(|f| &f.path);
    files
        .chain(workspace.rust.iter().map(|f| &f.path))
        .any(|file| Path::new(file).starts_with(path))
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tidy::planted;

    #[test]
    fn link_that_leads_nowhere_is_found() {
        let readme =
            "[a](docs/a.md#part), [docs](docs), [out](https://example.org/x), [b](docs/b.md)\n";
        let files = [
            ("README.md", readme),
            (
                "docs/a.md",
                "[up](../README.md) and [here](#there), [c](c.md)\n",
            ),
        ];
        let found = check(&planted::workspace(&files));
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "README.md:1: the link to docs/b.md leads nowhere",
                "docs/a.md:1: the link to c.md leads nowhere"
            ]
        );
    }
}
