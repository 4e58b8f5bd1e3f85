//! Lints are denied once, in the root manifest, and every member takes them.

use super::Violation;
use crate::workspace::Workspace;

/// (tool, lint) that the root manifest denies.
const DENIED: [(&str, &str); 3] = [
    ("rust", "missing_docs"),
    ("clippy", "too_many_arguments"),
    ("clippy", "undocumented_unsafe_blocks"),
];

/// (crate, how much `unsafe` its root refuses); `None` where modules that touch the driver make up most of it. Crates
/// that are not named forbid it.
const UNSAFE_LEVELS: [(&str, Option<&str>); 2] = [
    ("lora-kernels", None),
    ("lora-weights", Some("#![deny(unsafe_code)]")),
];

/// The root denies what must be denied, members inherit it, and crates without `unsafe` forbid it.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let mut found = Vec::new();
    let lints = workspace
        .manifest
        .get("workspace")
        .and_then(|w| w.get("lints"));
    for (tool, lint) in DENIED {
        let level = lints
            .and_then(|l| l.get(tool))
            .and_then(|l| l.get(lint))
            .and_then(toml::Value::as_str);
        if level != Some("deny") {
            found.push(Violation::of(
                "Cargo.toml",
                format!("[workspace.lints.{tool}] does not deny {lint}"),
            ));
        }
    }
    for member in &workspace.members {
        let inherits = member
            .table
            .get("lints")
            .and_then(|l| l.get("workspace"))
            .and_then(toml::Value::as_bool);
        if inherits != Some(true) {
            found.push(Violation::of(
                &member.path,
                "[lints] workspace = true is missing",
            ));
        }
        found.extend(refuses_unsafe(workspace, member.dir(), &member.name));
    }
    found
}

/// The crate root refuses `unsafe` as [`UNSAFE_LEVELS`] says.
fn refuses_unsafe(workspace: &Workspace, dir: &str, name: &str) -> Option<Violation> {
    let level = UNSAFE_LEVELS.iter().find(|(krate, _)| *krate == name);
    let wanted = level.map_or(Some("#![forbid(unsafe_code)]"), |(_, wanted)| *wanted)?;
    let roots = [format!("{dir}/src/lib.rs"), format!("{dir}/src/main.rs")];
    let missing = workspace.rust.iter().find(|file| {
        roots.contains(&file.path) && !file.text.lines().any(|line| line.trim() == wanted)
    })?;
    Some(Violation::of(
        &missing.path,
        format!("the crate root lacks {wanted}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tidy::planted;

    #[test]
    fn member_without_the_lints_is_found() {
        let manifest =
            planted::member("lora-config", "").replace("[lints]\nworkspace = true\n", "");
        let found = check(&planted::with_manifest("lora-config", &manifest));
        assert_eq!(found.len(), 1);
        assert!(found[0].message.contains("[lints]"), "{}", found[0]);
    }

    #[test]
    fn root_that_only_warns_is_found() {
        let root =
            planted::ROOT_MANIFEST.replace("missing_docs = \"deny\"", "missing_docs = \"warn\"");
        let found = check(&planted::workspace(&[("Cargo.toml", &root)]));
        assert_eq!(found.len(), 1);
        assert!(found[0].message.contains("missing_docs"), "{}", found[0]);
    }

    #[test]
    fn crate_root_that_permits_unsafe_is_found() {
        let found = check(&planted::workspace(&[(
            "crates/lora-config/src/lib.rs",
            "//! A crate.\n",
        )]));
        assert_eq!(found.len(), 1);
        assert!(
            found[0].message.contains("forbid(unsafe_code)"),
            "{}",
            found[0]
        );
    }
}
