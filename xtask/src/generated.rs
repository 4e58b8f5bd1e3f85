//! Files under docs/ that a command makes from the sources: written by the command, held by a rule of `tidy`.

use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// Files of a folder by path; the text that belongs there, `None` where no file does.
pub(crate) type Files = BTreeMap<String, Option<String>>;

/// Arguments of a command that makes such files.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Write nothing: fail if a file is not what the sources give.
    #[arg(long)]
    pub(crate) check: bool,
}

/// What is wrong in the folder `dir`, where `wanted` is all that belongs there.
pub(crate) fn stale(workspace: &Workspace, dir: &str, wanted: BTreeMap<String, String>) -> Files {
    let mut stale: Files = wanted
        .into_iter()
        .map(|(path, text)| (path, Some(text)))
        .collect();
    let in_dir = |path: &str| {
        path.strip_prefix(dir)
            .is_some_and(|rest| rest.starts_with('/'))
    };
    for file in workspace.files.iter().filter(|file| in_dir(&file.path)) {
        match stale.get(&file.path) {
            Some(Some(text)) if *text == file.text => drop(stale.remove(&file.path)),
            Some(_) => {}
            None => drop(stale.insert(file.path.clone(), None)),
        }
    }
    stale
}

/// Puts `stale` right under `root`, or fails where it was only to be checked.
pub(crate) fn settle(root: &Path, stale: Files, args: &Args, command: &str) -> Result<()> {
    if args.check && !stale.is_empty() {
        let paths: Vec<&str> = stale.keys().map(String::as_str).collect();
        bail!("stale: {}; run `cargo xtask {command}`", paths.join(", "));
    }
    for (path, text) in stale {
        let full = root.join(&path);
        match text {
            Some(text) => {
                let dir = full.parent().context("a file has a folder")?;
                std::fs::create_dir_all(dir).with_context(|| path.clone())?;
                std::fs::write(&full, text).with_context(|| path.clone())?;
            }
            None => std::fs::remove_file(&full).with_context(|| path.clone())?,
        }
        println!("{path}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Args, settle, stale};
    use crate::tidy::planted;
    use crate::workspace::Workspace;
    use std::collections::BTreeMap;

    #[test]
    fn files_are_written_removed_and_then_fresh() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        planted::write(dir.path(), "Cargo.toml", planted::ROOT_MANIFEST);
        planted::write(dir.path(), "docs/made/old.txt", "old");
        planted::write(dir.path(), "docs/made/changed.txt", "before");
        planted::write(dir.path(), "docs/made-by-hand.txt", "kept");
        let wanted = || {
            let texts = [
                ("docs/made/changed.txt", "after"),
                ("docs/made/new.txt", "new"),
            ];
            BTreeMap::from(texts.map(|(path, text)| (path.to_owned(), text.to_owned())))
        };
        let found = || {
            let workspace = Workspace::load(dir.path()).expect("it loads");
            stale(&workspace, "docs/made", wanted())
        };
        assert_eq!(found().len(), 3);
        let check = Args { check: true };
        settle(dir.path(), found(), &check, "make").expect_err("three files are stale");
        settle(dir.path(), found(), &Args { check: false }, "make").expect("they are written");
        assert!(found().is_empty());
        settle(dir.path(), found(), &check, "make").expect("nothing is stale");
        assert!(dir.path().join("docs/made-by-hand.txt").exists());
    }
}
