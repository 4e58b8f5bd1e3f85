//! Layers go one way: a crate may use those before it, and no crate uses a tool or a test.

use super::Violation;
use crate::workspace::Workspace;

/// The layers, lowest first. Crates of one layer do not know each other.
const LAYERS: [&[&str]; 6] = [
    &["lora-config"],
    &["lora-weights"],
    &["lora-kernels"],
    &["lora-moe", "lora-overlay"],
    &["lora-runtime"],
    &["lora-cli"],
];

/// Members outside `crates/`: they may use any layer, and nothing may use them.
fn layer_of(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&name))
}

/// Every edge between members points to a lower layer; every crate under `crates/` has a layer.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let mut found = Vec::new();
    for member in &workspace.members {
        let own = layer_of(&member.name);
        if own.is_none() && member.path.starts_with("crates/") {
            found.push(Violation::of(
                &member.path,
                format!("{} has no place in the list of layers", member.name),
            ));
        }
        for (table, dependency, _) in member.dependencies() {
            // A crate's own tests may use it with a feature for tests on.
            let is_own_test = dependency == member.name && table == "dev-dependencies";
            if is_own_test || !workspace.members.iter().any(|m| m.name == dependency) {
                continue;
            }
            let allowed = match (own, layer_of(dependency)) {
                (_, None) => false,
                (None, Some(_)) => true,
                (Some(own), Some(used)) => used < own,
            };
            if !allowed {
                let message = format!(
                    "{} may not use {dependency} ([{table}]): layers go one way",
                    member.name
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
    fn reverse_edge_is_found() {
        let manifest = planted::member("lora-config", "lora-weights.workspace = true");
        let found = check(&planted::workspace(&[(
            "crates/lora-config/Cargo.toml",
            &manifest,
        )]));
        assert_eq!(found.len(), 1);
        assert!(
            found[0]
                .message
                .contains("lora-config may not use lora-weights"),
            "{}",
            found[0]
        );
    }

    #[test]
    fn reverse_edge_for_tests_or_one_target_is_found() {
        for table in ["dev-dependencies", "target.'cfg(unix)'.dependencies"] {
            let manifest = planted::member("lora-config", "")
                + &format!("[{table}]\nlora-weights.workspace = true\n");
            let found = check(&planted::workspace(&[(
                "crates/lora-config/Cargo.toml",
                &manifest,
            )]));
            assert_eq!(found.len(), 1, "{table}");
        }
    }

    #[test]
    fn edge_between_siblings_is_found() {
        let moe = planted::member("lora-moe", "lora-overlay.workspace = true");
        let overlay = planted::member("lora-overlay", "");
        let files = [
            ("crates/lora-moe/Cargo.toml", &*moe),
            ("crates/lora-overlay/Cargo.toml", &*overlay),
        ];
        assert_eq!(check(&planted::workspace(&files)).len(), 1);
    }

    #[test]
    fn crate_without_a_layer_is_found() {
        let stray = planted::member("lora-stray", "");
        let found = check(&planted::workspace(&[(
            "crates/lora-stray/Cargo.toml",
            &stray,
        )]));
        assert!(found[0].message.contains("no place"), "{}", found[0]);
    }

    #[test]
    fn crate_that_uses_a_tool_is_found() {
        let tool = planted::member("xtask", "");
        let user = planted::member("lora-weights", "xtask.workspace = true");
        let files = [
            ("xtask/Cargo.toml", &*tool),
            ("crates/lora-weights/Cargo.toml", &*user),
        ];
        assert_eq!(check(&planted::workspace(&files)).len(), 1);
    }
}
