//! Layers go one way: a crate may use those before it, an example uses the facade alone, and no crate uses an example, a tool or a test.

use super::Violation;
use crate::workspace::{Manifest, Workspace};

/// The layers, lowest first. Crates of one layer do not know each other.
const LAYERS: [&[&str]; 6] = [
    &["lora-config"],
    &["lora-weights"],
    &["lora-kernels"],
    &["lora-moe", "lora-overlay"],
    &["lora-runtime"],
    &["lora-cli"],
];

/// What an example may use: it shows what an engine of one's own depends on.
const FACADE: &str = "lora-runtime";

/// The layer of a crate. Members outside `crates/` have none: tools and tests may use any, and nothing but a test may use an example.
fn layer_of(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&name))
}

fn is_example(member: &Manifest) -> bool {
    member.path.starts_with("examples/")
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
            let used = workspace.members.iter().find(|m| m.name == dependency);
            let Some(used) = used.filter(|_| !is_own_test) else {
                continue;
            };
            let allowed = match (own, layer_of(dependency)) {
                (None, _) if is_example(member) => dependency == FACADE,
                (None, None) => is_example(used) && member.dir() == "tests",
                (Some(_), None) => false,
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
        let found = check(&planted::with_manifest("lora-config", &manifest));
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
            let found = check(&planted::with_manifest("lora-config", &manifest));
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
        let found = check(&planted::with_manifest("lora-stray", &stray));
        assert!(found[0].message.contains("no place"), "{}", found[0]);
    }

    #[test]
    fn example_that_looks_behind_the_facade_is_found() {
        let example = |dependency: &str| planted::member("engine", dependency);
        let of = |manifest: &str| {
            let facade = planted::member("lora-runtime", "");
            check(&planted::workspace(&[
                ("crates/lora-runtime/Cargo.toml", &*facade),
                ("examples/engine/Cargo.toml", manifest),
            ]))
        };
        assert_eq!(of(&example("lora-runtime.workspace = true")), []);
        let found = of(&example("lora-weights.workspace = true"));
        assert!(
            found[0].message.contains("engine may not use lora-weights"),
            "{}",
            found[0]
        );
    }

    #[test]
    fn tests_may_use_an_example_and_crates_may_not() {
        let example = planted::member("engine", "");
        let user = |name| planted::member(name, "engine.workspace = true");
        let of = |path: &str, manifest: &str| {
            check(&planted::workspace(&[
                ("examples/engine/Cargo.toml", &*example),
                (path, manifest),
            ]))
        };
        assert_eq!(of("tests/Cargo.toml", &user("lora-tests")), []);
        let found = of("crates/lora-weights/Cargo.toml", &user("lora-weights"));
        assert_eq!(found.len(), 1);
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
