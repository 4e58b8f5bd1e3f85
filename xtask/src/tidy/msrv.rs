//! The minimum supported Rust version stands once, in the root manifest.

use super::Violation;
use crate::workspace::Workspace;

/// Members inherit the version and no other file repeats it.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let package = workspace
        .manifest
        .get("workspace")
        .and_then(|w| w.get("package"));
    let Some(msrv) = package
        .and_then(|p| p.get("rust-version"))
        .and_then(toml::Value::as_str)
    else {
        return vec![Violation::of(
            "Cargo.toml",
            "[workspace.package] has no rust-version",
        )];
    };
    let mut found = Vec::new();
    for member in &workspace.members {
        let entry = member
            .table
            .get("package")
            .and_then(|p| p.get("rust-version"));
        if entry
            .and_then(|e| e.get("workspace"))
            .and_then(toml::Value::as_bool)
            != Some(true)
        {
            found.push(Violation::of(
                &member.path,
                "rust-version.workspace = true is missing",
            ));
        }
    }
    for file in &workspace.files {
        let may_repeat = matches!(file.extension(), "md" | "sh")
            || file.path == ".ci/run"
            || file.path.ends_with("clippy.toml")
            || file.path.ends_with("rust-toolchain.toml");
        for (line, text) in file.text.lines().enumerate().filter(|_| may_repeat) {
            if is_named(text, msrv) {
                let message =
                    format!("repeats the Rust version {msrv}, which stands in the root Cargo.toml");
                found.push(Violation::at(&file.path, line + 1, message));
            }
        }
    }
    found
}

/// Whether a line speaks of Rust and holds the version as a whole number.
fn is_named(line: &str, msrv: &str) -> bool {
    let speaks = ["rust", "msrv", "channel", "toolchain"]
        .iter()
        .any(|word| line.to_lowercase().contains(word));
    let mut numbers = line
        .split(|c: char| !c.is_ascii_digit() && c != '.')
        .map(|n| n.trim_matches('.'));
    speaks
        && numbers.any(|n| {
            n == msrv
                || n.strip_prefix(msrv)
                    .is_some_and(|rest| rest.starts_with('.'))
        })
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tidy::planted;

    #[test]
    fn second_msrv_is_found() {
        let manifest = planted::member("lora-config", "")
            .replace("rust-version.workspace = true", "rust-version = \"1.80\"");
        assert_eq!(
            check(&planted::with_manifest("lora-config", &manifest)).len(),
            1
        );
        assert_eq!(
            check(&planted::workspace(&[("README.md", "Needs Rust 1.90.\n")])).len(),
            1
        );
        assert_eq!(
            check(&planted::workspace(&[(
                "README.md",
                "1.90 times as fast\n"
            )])),
            []
        );
    }

    #[test]
    fn missing_msrv_is_found() {
        let root = planted::ROOT_MANIFEST.replace("rust-version = \"1.90\"", "");
        assert_eq!(
            check(&planted::workspace(&[("Cargo.toml", &root)])).len(),
            1
        );
    }
}
