//! Versions stand once, in the root manifest's `[workspace.dependencies]`.

use super::Violation;
use crate::workspace::Workspace;

/// Keys of a dependency entry that say where it comes from.
const SOURCES: [&str; 4] = ["version", "path", "git", "registry"];

/// Every dependency of a member is taken from the workspace.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let mut found = Vec::new();
    for member in &workspace.members {
        for (table, name, entry) in member.dependencies() {
            let inherited = entry.get("workspace").and_then(toml::Value::as_bool) == Some(true);
            let own_source = SOURCES.iter().any(|key| entry.get(key).is_some());
            if !inherited || own_source {
                let message = format!(
                    "[{table}] {name} must be `{name}.workspace = true`: versions stand in the root"
                );
                found.push(Violation::of(&member.path, message));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tidy::planted;

    #[test]
    fn version_in_a_member_is_found() {
        for entry in [
            "serde = \"1\"",
            "serde = { version = \"1\" }",
            "serde = { path = \"../serde\" }",
        ] {
            let manifest = planted::member("lora-config", entry);
            let found = check(&planted::with_manifest("lora-config", &manifest));
            assert_eq!(found.len(), 1, "{entry}");
        }
        let features = planted::member(
            "lora-config",
            "serde = { workspace = true, features = [\"rc\"] }",
        );
        assert_eq!(check(&planted::with_manifest("lora-config", &features)), []);
    }
}
