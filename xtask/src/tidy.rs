//! `cargo xtask tidy`: the rules of this workspace that neither rustc nor clippy holds.
//!
//! A rule is a function over a [`Workspace`] and lives in a file of its own, with a test that plants a violation.

mod attributes;
mod comments;
mod doc_links;
mod doc_names;
mod environment;
mod functions;
mod generated;
mod kernel_names;
mod knowledge;
mod layers;
mod lints;
mod msrv;
mod outliers;
mod stale;
mod unsafe_code;
mod versions;

use crate::workspace::Workspace;
use anyhow::{Result, bail};
use std::fmt;
use std::path::Path;

/// A place that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    /// File, relative to the workspace root.
    path: String,
    /// Line, where there is one to point at.
    line: Option<usize>,
    /// What is wrong and what is asked for.
    message: String,
}

impl Violation {
    fn at(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line: Some(line),
            message: message.into(),
        }
    }

    fn of(path: &str, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line: None,
            message: message.into(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.path, self.message),
            None => write!(f, "{}: {}", self.path, self.message),
        }
    }
}

/// A named rule.
struct Rule {
    name: &'static str,
    check: fn(&Workspace) -> Vec<Violation>,
}

const RULES: [Rule; 16] = [
    Rule {
        name: "layers",
        check: layers::check,
    },
    Rule {
        name: "knowledge",
        check: knowledge::check,
    },
    Rule {
        name: "lints",
        check: lints::check,
    },
    Rule {
        name: "unsafe",
        check: unsafe_code::check,
    },
    Rule {
        name: "arguments",
        check: functions::check_arguments,
    },
    Rule {
        name: "attributes",
        check: attributes::check,
    },
    Rule {
        name: "environment",
        check: environment::check,
    },
    Rule {
        name: "kernel-names",
        check: kernel_names::check,
    },
    Rule {
        name: "comments",
        check: comments::check,
    },
    Rule {
        name: "versions",
        check: versions::check,
    },
    Rule {
        name: "generated",
        check: generated::check,
    },
    Rule {
        name: "msrv",
        check: msrv::check,
    },
    Rule {
        name: "public-items",
        check: stale::check_public_items,
    },
    Rule {
        name: "doc-links",
        check: doc_links::check,
    },
    Rule {
        name: "doc-names",
        check: doc_names::check,
    },
    Rule {
        name: "plots",
        check: stale::check_plots,
    },
];

/// Runs every rule over the workspace at `root`, prints what breaks one, then the outliers.
pub(crate) fn run(root: &Path) -> Result<()> {
    let workspace = Workspace::load(root)?;
    let mut broken = 0;
    for rule in &RULES {
        for violation in (rule.check)(&workspace) {
            println!("tidy[{}] {violation}", rule.name);
            broken += 1;
        }
    }
    for outlier in outliers::list(&workspace) {
        println!("outlier  {outlier}");
    }
    if broken > 0 {
        bail!("tidy: {broken} violation(s) of {} rules", RULES.len());
    }
    println!(
        "tidy: {} rules hold over {} Rust files",
        RULES.len(),
        workspace.rust.len()
    );
    Ok(())
}

#[cfg(test)]
pub(crate) mod planted {
    //! A small workspace that holds every rule, for tests to plant a violation in.

    use crate::workspace::Workspace;
    use std::path::Path;

    /// The root manifest of the planted workspace.
    pub(crate) const ROOT_MANIFEST: &str = r#"
[workspace]
members = ["crates/*"]
[workspace.package]
rust-version = "1.90"
[workspace.dependencies]
lora-config = { path = "crates/lora-config" }
serde = "1"
[workspace.lints.rust]
missing_docs = "deny"
[workspace.lints.clippy]
too_many_arguments = "deny"
undocumented_unsafe_blocks = "deny"
"#;

    /// The manifest of a member, with `dependencies` under `[dependencies]`.
    pub(crate) fn member(name: &str, dependencies: &str) -> String {
        format!(
            "[package]\nname = \"{name}\"\nrust-version.workspace = true\n[lints]\nworkspace = true\n\
             [dependencies]\n{dependencies}\n"
        )
    }

    /// Writes one file, its folders too.
    pub(crate) fn write(root: &Path, path: &str, text: &str) {
        let full = root.join(path);
        std::fs::create_dir_all(full.parent().expect("a file has a folder"))
            .expect("folder is made");
        std::fs::write(full, text).expect("file is written");
    }

    /// The list of public items of a crate that offers none.
    pub(crate) fn write_list(root: &Path, name: &str) {
        let empty = crate::public_items::text(name, &[]);
        write(root, &crate::public_items::path(name), &empty);
    }

    /// [`workspace`] with this manifest for a crate.
    pub(crate) fn with_manifest(name: &str, manifest: &str) -> Workspace {
        workspace(&[(&format!("crates/{name}/Cargo.toml"), manifest)])
    }

    /// A workspace of `lora-config` and `lora-weights` that breaks no rule, with `files` written over it.
    pub(crate) fn workspace(files: &[(&str, &str)]) -> Workspace {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let library = "//! A crate.\n#![forbid(unsafe_code)]\n";
        write(dir.path(), "Cargo.toml", ROOT_MANIFEST);
        write(
            dir.path(),
            "crates/lora-config/Cargo.toml",
            &member("lora-config", "serde.workspace = true"),
        );
        write(dir.path(), "crates/lora-config/src/lib.rs", library);
        write(
            dir.path(),
            "crates/lora-weights/Cargo.toml",
            &member("lora-weights", "lora-config.workspace = true"),
        );
        write(
            dir.path(),
            "crates/lora-weights/src/lib.rs",
            "//! A crate.\n#![deny(unsafe_code)]\n",
        );
        for name in ["lora-config", "lora-weights"] {
            write_list(dir.path(), name);
        }
        for (path, text) in files {
            write(dir.path(), path, text);
        }
        Workspace::load(dir.path()).expect("the planted workspace parses")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clean_workspace_breaks_no_rule() {
        let workspace = planted::workspace(&[]);
        for rule in &RULES {
            assert_eq!((rule.check)(&workspace), [], "rule {}", rule.name);
        }
    }

    #[test]
    fn run_fails_on_a_violation_and_names_the_count() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::fs::create_dir_all(dir.path().join("crates/lora-config/src")).expect("folder is made");
        std::fs::write(dir.path().join("Cargo.toml"), planted::ROOT_MANIFEST)
            .expect("file is written");
        let manifest = planted::member("lora-config", "serde = \"1\"");
        std::fs::write(dir.path().join("crates/lora-config/Cargo.toml"), manifest)
            .expect("file is written");
        let library = "//! A crate.\n#![forbid(unsafe_code)]\n";
        std::fs::write(dir.path().join("crates/lora-config/src/lib.rs"), library)
            .expect("file is written");
        planted::write_list(dir.path(), "lora-config");
        let error = run(dir.path()).expect_err("a version outside the root manifest");
        assert!(error.to_string().contains("1 violation"), "{error}");
    }
}
