//! Tables of times in Markdown, each with a line `<!-- plot: NAME: TITLE -->` above it.

use anyhow::{Context, Result, bail};

/// Columns that mean something to a plot; those before `us` say what a row is.
const TIME: &str = "us";
const FLOOR: &str = "floor us";
const REACH: &str = "to reach";

/// A table to draw.
#[derive(Debug, PartialEq)]
pub(super) struct Table {
    /// File name of the plot, without its ending.
    pub(super) name: String,
    pub(super) title: String,
    /// Headers of the columns that say what a row is.
    pub(super) labels: Vec<String>,
    pub(super) rows: Vec<Row>,
}

/// One measured shape.
#[derive(Debug, PartialEq)]
pub(super) struct Row {
    pub(super) labels: Vec<String>,
    /// Measured, microseconds.
    pub(super) us: f64,
    /// What the bytes alone take, microseconds.
    pub(super) floor: f64,
    /// What was to be reached, microseconds.
    pub(super) reach: Option<f64>,
}

/// The marked tables of a document, in order.
pub(super) fn marked(document: &str) -> Result<Vec<Table>> {
    let mut lines = document.lines();
    let mut tables = Vec::new();
    while let Some(line) = lines.next() {
        let mark = line
            .strip_prefix("<!-- plot: ")
            .and_then(|l| l.strip_suffix(" -->"));
        let Some(mark) = mark else { continue };
        let (name, title) = mark
            .split_once(": ")
            .with_context(|| format!("`{mark}` is not NAME: TITLE"))?;
        let body: Vec<&str> = lines
            .by_ref()
            .skip_while(|l| l.trim().is_empty())
            .take_while(|l| l.starts_with('|'))
            .collect();
        tables.push(parse(name, title, &body).with_context(|| format!("the table of {name}"))?);
    }
    Ok(tables)
}

fn parse(name: &str, title: &str, lines: &[&str]) -> Result<Table> {
    let [header, _, body @ ..] = lines else {
        bail!("no table follows its mark");
    };
    let header = cells(header);
    let column = |name: &str| header.iter().position(|h| *h == name);
    let time = column(TIME).with_context(|| format!("no column `{TIME}`"))?;
    let floor = column(FLOOR).with_context(|| format!("no column `{FLOOR}`"))?;
    let reach = column(REACH);
    let rows = body.iter().map(|line| {
        let cells = cells(line);
        if cells.len() != header.len() {
            bail!("`{line}` has not {} cells", header.len());
        }
        Ok(Row {
            labels: cells[..time].iter().map(ToString::to_string).collect(),
            us: microseconds(cells[time])?,
            floor: microseconds(cells[floor])?,
            reach: reach.map(|at| microseconds(cells[at])).transpose()?,
        })
    });
    Ok(Table {
        name: name.to_owned(),
        title: title.to_owned(),
        labels: header[..time].iter().map(ToString::to_string).collect(),
        rows: rows.collect::<Result<_>>()?,
    })
}

fn cells(line: &str) -> Vec<&str> {
    line.trim()
        .trim_matches('|')
        .split('|')
        .map(str::trim)
        .collect()
}

/// The number that a cell begins with: `70 (not reached)` is 70.
fn microseconds(cell: &str) -> Result<f64> {
    let number = cell.split_whitespace().next().unwrap_or_default();
    match number.parse::<f64>() {
        Ok(us) if us > 0.0 && us.is_finite() => Ok(us),
        _ => bail!("`{cell}` does not begin with a time"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Row, Table, marked};

    #[test]
    fn marked_table_is_read_by_its_headers() {
        let document = "| a | us |\n\n<!-- plot: dense: Deltas -->\n\n| rank | rows | us | to reach | floor us | TB/s |\n|---|---|---|---|---|---|\n\
            | 16 | 8, 8 | 17.6 | 20 | 5.3 | 1.3 |\n| 16 | 1 | 71 | 70 (not reached) | 52.4 | 3 |\n\nText.\n";
        let row = |label: &str, us, floor, reach| Row {
            labels: vec!["16".to_owned(), label.to_owned()],
            us,
            floor,
            reach: Some(reach),
        };
        let wanted = Table {
            name: "dense".to_owned(),
            title: "Deltas".to_owned(),
            labels: vec!["rank".to_owned(), "rows".to_owned()],
            rows: vec![row("8, 8", 17.6, 5.3, 20.0), row("1", 71.0, 52.4, 70.0)],
        };
        assert_eq!(marked(document).expect("it is read"), [wanted]);
    }

    #[test]
    fn table_that_cannot_be_drawn_is_an_error() {
        let mark = "<!-- plot: a: A -->\n";
        for (table, why) in [
            ("Text.\n", "no table"),
            ("| rank | us |\n|---|---|\n| 16 | 1 |\n", "no floor"),
            ("| us | floor us |\n|---|---|\n| fast | 1 |\n", "no number"),
            ("| us | floor us |\n|---|---|\n| 1 |\n", "a cell missing"),
        ] {
            assert!(marked(&format!("{mark}{table}")).is_err(), "{why}");
        }
    }
}
