//! `kernels/include/constants.cuh`: the numbers that kernels and Rust share, taken from the Rust constants, where each is
//! documented.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// Where the header lies, under the kernels folder.
pub(super) const HEADER: &str = "include/constants.cuh";

/// File whose integer constants kernels share, relative to the workspace root.
const PARAMS: &str = "crates/lora-kernels/src/params.rs";

/// Folder and name of the one shared constant that pool layouts own.
const RANK_GRANULE: (&str, &str) = ("crates/lora-weights/src", "RANK_GRANULE");

/// The header's text for the workspace at `root`, without its first line.
pub(super) fn header(root: &Path) -> Result<String> {
    let params = root.join(PARAMS);
    let mut constants = integers(&params)?;
    constants.extend(granule(root)?);
    let lines: String = constants.iter().map(Constant::declaration).collect();
    Ok(format!(
        "// from {PARAMS} and {}, where each number is documented\n#pragma once\n\n{lines}",
        RANK_GRANULE.0
    ))
}

/// One shared number.
struct Constant {
    name: String,
    value: u64,
}

impl Constant {
    /// `constexpr int kName = value;`, unsigned for flags.
    fn declaration(&self) -> String {
        let kind = if self.name.starts_with("FLAG_") {
            "unsigned"
        } else {
            "int"
        };
        let words = self.name.split('_').map(|word| {
            let (first, rest) = word.split_at(1);
            format!("{first}{}", rest.to_lowercase())
        });
        format!(
            "constexpr {kind} k{} = {};\n",
            words.collect::<String>(),
            self.value
        )
    }
}

/// Integer constants of a file that are visible outside it and whose value is a literal, in order.
fn integers(path: &Path) -> Result<Vec<Constant>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| shown.to_string())?;
    let file = syn::parse_file(&text).with_context(|| shown.to_string())?;
    let mut found = Vec::new();
    for item in file.items {
        let syn::Item::Const(item) = item else {
            continue;
        };
        let syn::Expr::Lit(syn::ExprLit {
            lit: syn::Lit::Int(value),
            ..
        }) = &*item.expr
        else {
            continue;
        };
        if !matches!(item.vis, syn::Visibility::Inherited) {
            let value = value
                .base10_parse()
                .with_context(|| format!("{shown}: {}", item.ident))?;
            found.push(Constant {
                name: item.ident.to_string(),
                value,
            });
        }
    }
    Ok(found)
}

/// The rank granule, wherever in its crate it stands.
fn granule(root: &Path) -> Result<Option<Constant>> {
    let (folder, name) = RANK_GRANULE;
    let files: Vec<PathBuf> = walkdir::WalkDir::new(root.join(folder))
        .sort_by_file_name()
        .into_iter()
        .filter_map(|entry| Some(entry.ok()?.into_path()))
        .filter(|path| path.extension().is_some_and(|e| e == "rs"))
        .collect();
    for file in files {
        if let Some(constant) = integers(&file)?.into_iter().find(|c| c.name == name) {
            return Ok(Some(constant));
        }
    }
    bail!("{folder} has no `pub const {name}` that is an integer literal")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_become_declarations() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for (path, text) in [
            (
                PARAMS,
                "pub const MAX_SITES: usize = 4;\nconst OWN: u32 = 1;\npub(crate) const FLAG_READY: u32 = 1;\n",
            ),
            (
                "crates/lora-weights/src/pool.rs",
                "pub const RANK_GRANULE: u32 = 16;\n",
            ),
        ] {
            std::fs::create_dir_all(dir.path().join(path).parent().expect("a folder"))
                .expect("folder is made");
            std::fs::write(dir.path().join(path), text).expect("file is written");
        }
        let header = header(dir.path()).expect("constants are there");
        let declared = "constexpr int kMaxSites = 4;\nconstexpr unsigned kFlagReady = 1;\nconstexpr int kRankGranule = 16;\n";
        assert!(header.ends_with(declared), "{header}");
    }

    #[test]
    fn header_in_the_repository_is_what_the_constants_give() {
        let root = crate::workspace::root();
        let header = format!(
            "{}{}",
            super::super::GENERATED,
            header(&root).expect("constants are there")
        );
        let existing = std::fs::read_to_string(root.join("kernels").join(HEADER))
            .expect("the header is there");
        assert_eq!(existing, header, "run `cargo xtask build-kernels`");
    }
}
