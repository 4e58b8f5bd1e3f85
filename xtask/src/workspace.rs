//! The workspace as text: every file that a rule may look at, read once.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Folders that hold nothing of ours.
const SKIPPED_DIRS: [&str; 3] = ["target", ".git", "node_modules"];

/// Extensions of the files that rules read. `.ci/run` has none and is taken by name.
const EXTENSIONS: [&str; 11] = [
    "rs", "toml", "cu", "cuh", "h", "ptx", "md", "sh", "py", "txt", "svg",
];

/// The workspace that this xtask was built from.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace")
        .to_path_buf()
}

/// Cargo's target folder, `CARGO_TARGET_DIR` or `target` under `root`.
pub(crate) fn target_dir(root: &Path) -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root.join(dir),
        None => root.join("target"),
    }
}

/// One file, its path relative to the workspace root with `/` between segments.
#[derive(Debug)]
pub(crate) struct SourceFile {
    /// Relative path.
    pub(crate) path: String,
    /// Contents.
    pub(crate) text: String,
}

impl SourceFile {
    /// The extension, empty where there is none.
    pub(crate) fn extension(&self) -> &str {
        match self.path.rsplit_once('.') {
            Some((_, extension)) if !extension.contains('/') => extension,
            _ => "",
        }
    }
}

/// A Rust source file with its syntax tree.
pub(crate) struct RustFile {
    /// Relative path.
    pub(crate) path: String,
    /// Contents.
    pub(crate) text: String,
    /// Syntax tree, spans with line numbers.
    pub(crate) tree: syn::File,
    /// The same as tokens, macro bodies included.
    pub(crate) tokens: proc_macro2::TokenStream,
}

/// A member's `Cargo.toml`.
#[derive(Debug)]
pub(crate) struct Manifest {
    /// Relative path.
    pub(crate) path: String,
    /// `package.name`.
    pub(crate) name: String,
    /// The whole file.
    pub(crate) table: toml::Table,
}

impl Manifest {
    /// The folder of the member, relative, without a trailing slash.
    pub(crate) fn dir(&self) -> &str {
        self.path.strip_suffix("/Cargo.toml").unwrap_or("")
    }

    /// Every dependency as (table, name, entry), target-specific tables included.
    pub(crate) fn dependencies(&self) -> Vec<(&'static str, &str, &toml::Value)> {
        const TABLES: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];
        let targets = self.table.get("target").and_then(toml::Value::as_table);
        let scopes = std::iter::once(&self.table).chain(
            targets
                .into_iter()
                .flat_map(toml::Table::values)
                .filter_map(toml::Value::as_table),
        );
        let mut found = Vec::new();
        for scope in scopes {
            for table in TABLES {
                let entries = scope.get(table).and_then(toml::Value::as_table);
                found.extend(
                    entries
                        .into_iter()
                        .flatten()
                        .map(|(name, entry)| (table, name.as_str(), entry)),
                );
            }
        }
        found
    }
}

/// All files of a workspace.
pub(crate) struct Workspace {
    /// Files that are not Rust, by path.
    pub(crate) files: Vec<SourceFile>,
    /// Rust files, by path.
    pub(crate) rust: Vec<RustFile>,
    /// The root `Cargo.toml`.
    pub(crate) manifest: toml::Table,
    /// Members' manifests, by path. Not that of `fuzz/`, which is a workspace of its own.
    pub(crate) members: Vec<Manifest>,
}

impl Workspace {
    /// Reads the workspace at `root`.
    pub(crate) fn load(root: &Path) -> Result<Self> {
        let mut workspace = Self {
            files: Vec::new(),
            rust: Vec::new(),
            manifest: toml::Table::new(),
            members: Vec::new(),
        };
        for (path, full) in paths(root)? {
            let text = std::fs::read_to_string(&full).with_context(|| path.clone())?;
            if path.ends_with(".rs") {
                let tokens = text.parse().map_err(|e| anyhow::anyhow!("{path}: {e}"))?;
                let tree = syn::parse_file(&text).with_context(|| path.clone())?;
                workspace.rust.push(RustFile {
                    path,
                    text,
                    tree,
                    tokens,
                });
                continue;
            }
            if path == "Cargo.toml" {
                workspace.manifest = text.parse().with_context(|| path.clone())?;
            } else if path.ends_with("/Cargo.toml") {
                let table: toml::Table = text.parse().with_context(|| path.clone())?;
                if table.contains_key("workspace") {
                    // The root of a workspace of its own, which cannot inherit anything from this one.
                    continue;
                }
                let name = table
                    .get("package")
                    .and_then(|p| p.get("name"))
                    .and_then(toml::Value::as_str);
                let name = name
                    .with_context(|| format!("{path}: no package.name"))?
                    .to_owned();
                workspace.members.push(Manifest {
                    path: path.clone(),
                    name,
                    table,
                });
            }
            workspace.files.push(SourceFile { path, text });
        }
        Ok(workspace)
    }
}

/// (relative, full) paths of the files that rules read, sorted.
fn paths(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let walk = walkdir::WalkDir::new(root)
        .sort_by_file_name()
        .into_iter()
        .filter_entry(|entry| {
            let skipped = entry.file_type().is_dir()
                && entry
                    .file_name()
                    .to_str()
                    .is_some_and(|n| SKIPPED_DIRS.contains(&n));
            entry.depth() == 0 || !skipped
        });
    let mut found = Vec::new();
    for entry in walk {
        let entry = entry?;
        let relative = entry
            .path()
            .strip_prefix(root)?
            .to_string_lossy()
            .replace('\\', "/");
        let extension = entry
            .path()
            .extension()
            .and_then(|e| e.to_str())
            .unwrap_or("");
        if entry.file_type().is_file() && (EXTENSIONS.contains(&extension) || relative == ".ci/run")
        {
            found.push((relative, entry.into_path()));
        }
    }
    Ok(found)
}
