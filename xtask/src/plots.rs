//! `cargo xtask plots`: measured times beside their byte floors, drawn from the tables of docs/performance.md.
//!
//! The tables are the record; a plot is made of each that has a line `<!-- plot: NAME: TITLE -->` above it.

mod draw;
mod table;

use crate::generated::{self, Args, Files};
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// The document whose tables are drawn.
const SOURCE: &str = "docs/performance.md";

/// Where the plots lie.
const DIR: &str = "docs/plots";

/// Writes or checks the plots of the workspace at `root`.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let stale = stale(&Workspace::load(root)?)?;
    generated::settle(root, stale, args, "plots")
}

/// The plots that are not what the tables give.
pub(crate) fn stale(workspace: &Workspace) -> Result<Files> {
    let document = workspace.files.iter().find(|file| file.path == SOURCE);
    let wanted = wanted(document.map_or("", |file| &file.text))?;
    Ok(generated::stale(workspace, DIR, wanted))
}

/// The plots that `document` asks for, by path.
fn wanted(document: &str) -> Result<BTreeMap<String, String>> {
    let mut plots = BTreeMap::new();
    for table in table::marked(document).context(SOURCE)? {
        let name = format!("{}.svg", table.name);
        if !document.contains(&format!("](plots/{name})")) {
            bail!("{SOURCE} asks for the plot {name} and does not show it: `![...](plots/{name})`");
        }
        let svg = draw::svg(&table).with_context(|| name.clone())?;
        if plots.insert(format!("{DIR}/{name}"), svg).is_some() {
            bail!("{SOURCE}: two tables are called {name}");
        }
    }
    Ok(plots)
}

#[cfg(test)]
mod tests {
    use super::wanted;

    const TABLE: &str = "<!-- plot: dense: Deltas -->\n| rank | us | floor us |\n|---|---|---|\n| 16 | 10.8 | 0.7 |\n\n\
        ![Deltas](plots/dense.svg)\n";

    #[test]
    fn plot_follows_the_numbers_of_its_table() {
        let plots = |document: &str| wanted(document).expect("it is drawn");
        let drawn = &plots(TABLE)["docs/plots/dense.svg"];
        assert!(drawn.contains("10.8 us"), "{drawn}");
        assert_ne!(plots(TABLE), plots(&TABLE.replace("10.8", "9.9")));
        assert_eq!(plots(TABLE), plots(TABLE));
    }

    #[test]
    fn plot_that_the_document_does_not_show_is_an_error() {
        let error = wanted(&TABLE.replace("plots/dense", "plots/other")).expect_err("no link");
        assert!(error.to_string().contains("does not show it"), "{error}");
    }
}
