//! What a crate must not know, where a dependency gives it away (`docs/architecture.md` has the whole list).

use super::Violation;
use crate::workspace::Workspace;

/// (crate, what it must not know, dependencies that would be that knowledge).
const MUST_NOT_KNOW: [(&str, &str, &[&str]); 6] = [
    (
        "lora-config",
        "tensors and devices",
        &["safetensors", "half", "memmap2", "cudarc"],
    ),
    ("lora-weights", "kernels and CUDA", &["cudarc"]),
    (
        "lora-kernels",
        "PEFT, JSON and tensor files",
        &["lora-config", "serde_json", "safetensors", "toml"],
    ),
    ("lora-moe", "how a backend launches", &["cudarc", "rayon"]),
    (
        "lora-overlay",
        "how a backend launches",
        &["cudarc", "rayon"],
    ),
    (
        "lora-runtime",
        "kernel parameters and file formats",
        &["cudarc", "serde_json", "safetensors", "memmap2"],
    ),
];

/// No crate depends on what would make it know a thing it must not. Tests may.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let mut found = Vec::new();
    for member in &workspace.members {
        let Some((_, what, banned)) = MUST_NOT_KNOW.iter().find(|(name, ..)| *name == member.name)
        else {
            continue;
        };
        for (table, dependency, _) in member.dependencies() {
            if table != "dev-dependencies" && banned.contains(&dependency) {
                let message = format!(
                    "{} must not know {what}: it may not depend on {dependency}",
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
    fn forbidden_knowledge_is_found() {
        let manifest = planted::member("lora-weights", "cudarc.workspace = true");
        let found = check(&planted::with_manifest("lora-weights", &manifest));
        assert_eq!(found.len(), 1);
        assert!(
            found[0].message.contains("kernels and CUDA"),
            "{}",
            found[0]
        );
    }

    #[test]
    fn tests_may_know_more() {
        let manifest =
            planted::member("lora-weights", "") + "[dev-dependencies]\ncudarc.workspace = true\n";
        assert_eq!(
            check(&planted::with_manifest("lora-weights", &manifest)),
            []
        );
    }
}
