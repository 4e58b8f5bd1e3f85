//! Comments say why. They hold no plans, no dates and no leftovers: those belong in the tracker and the history.

use super::Violation;
use crate::workspace::Workspace;

/// Words that make a comment a note to oneself.
const WORDS: [&str; 4] = ["TODO", "FIXME", "XXX", "HACK"];

/// No comment of a source, script or manifest holds a forbidden word or a date.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let mut found = Vec::new();
    let rust = workspace.rust.iter().map(|f| (&f.path, comments(&f.text)));
    let others = workspace.files.iter().filter_map(|f| match f.extension() {
        "cu" | "cuh" | "h" => Some((&f.path, comments(&f.text))),
        "toml" | "sh" | "py" => Some((&f.path, hash_comments(&f.text))),
        _ if f.path == ".ci/run" => Some((&f.path, hash_comments(&f.text))),
        _ => None,
    });
    for (path, comments) in rust
        .chain(others)
        .filter(|(path, _)| path.as_str() != "xtask/src/tidy/comments.rs")
    {
        for (line, text) in comments {
            if let Some(word) = forbidden(&text) {
                found.push(Violation::at(
                    path,
                    line,
                    format!("a comment with {word:?}"),
                ));
            }
        }
    }
    found
}

/// The first forbidden word or date of a comment.
fn forbidden(comment: &str) -> Option<&str> {
    let mut words = comment.split(|c: char| !c.is_alphanumeric() && c != '-');
    words.find(|word| WORDS.contains(word) || is_date(word))
}

/// `YYYY-MM-DD` of this or the next century.
fn is_date(word: &str) -> bool {
    let parts: Vec<&str> = word.split('-').collect();
    let digits = |part: &str, n: usize| part.len() == n && part.bytes().all(|b| b.is_ascii_digit());
    matches!(parts[..], [y, m, d] if digits(y, 4) && y.starts_with("20") && digits(m, 2) && digits(d, 2))
}

/// `#` comments of a script or manifest, by line. A `#` inside quotes begins none.
fn hash_comments(text: &str) -> Vec<(usize, String)> {
    let comment = |line: &str| {
        let mut quote = None;
        for (at, c) in line.char_indices() {
            match quote {
                Some(open) if c == open => quote = None,
                Some(_) => {}
                None if c == '"' || c == '\'' => quote = Some(c),
                None if c == '#' => return Some(line[at..].to_owned()),
                None => {}
            }
        }
        None
    };
    text.lines()
        .enumerate()
        .filter_map(|(n, line)| Some((n + 1, comment(line)?)))
        .collect()
}

/// Line and block comments of Rust or CUDA source, block comments a line at a time. Strings hold none.
fn comments(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut line = 1;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let taken = if rest.starts_with("//") {
            let end = rest.find('\n').unwrap_or(rest.len());
            found.push((line, rest[..end].to_owned()));
            end
        } else if rest.starts_with("/*") {
            let end = block_end(rest);
            found.extend(
                rest[..end]
                    .lines()
                    .enumerate()
                    .map(|(n, l)| (line + n, l.to_owned())),
            );
            end
        } else if let Some(end) = raw_string_end(rest) {
            end
        } else if c == '"' {
            quoted_end(rest, '"')
        } else if c == '\'' {
            char_end(rest)
        } else if c.is_alphanumeric() || c == '_' {
            rest.find(|c: char| !c.is_alphanumeric() && c != '_')
                .unwrap_or(rest.len())
        } else {
            c.len_utf8()
        };
        line += rest[..taken].matches('\n').count();
        rest = &rest[taken..];
    }
    found
}

/// End of the block comment that `text` begins with, nested ones included.
fn block_end(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// End of the raw string that `text` begins with, or `None` where it begins with none.
fn raw_string_end(text: &str) -> Option<usize> {
    let prefix = ["br", "cr", "r"]
        .into_iter()
        .find(|p| text.starts_with(p))?;
    let hashes = text[prefix.len()..]
        .bytes()
        .take_while(|b| *b == b'#')
        .count();
    let open = prefix.len() + hashes;
    let body = text[open..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    Some(
        body.find(&close)
            .map_or(text.len(), |at| open + 1 + at + close.len()),
    )
}

/// End of the literal that `text` begins with, quoted by `quote` and escaped by backslashes.
fn quoted_end(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// End of the character literal or lifetime that `text` begins with.
fn char_end(text: &str) -> usize {
    let mut inner = text[1..].chars();
    match (inner.next(), inner.next()) {
        (Some('\\'), _) => quoted_end(text, '\''),
        (Some(c), Some('\'')) => 2 + c.len_utf8(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::{check, comments};
    use crate::tidy::planted;

    #[test]
    fn forbidden_word_or_date_is_found_in_every_kind_of_file() {
        let files = [
            ("crates/lora-config/src/a.rs", "fn f() {} // TODO: more"),
            (
                "crates/lora-config/src/b.rs",
                "/* fine\n since 2031-04-05 */",
            ),
            ("kernels/src/k.cu", "int a; // FIXME"),
            (".ci/run", "echo hi # XXX"),
            ("kernels/KERNEL.toml", "a = \"#\" # HACK"),
        ];
        for (path, text) in files {
            let found = check(&planted::workspace(&[(path, text)]));
            assert_eq!(found.len(), 1, "{path}");
        }
    }

    #[test]
    fn strings_are_no_comments() {
        let text = "const A: &str = \"// TODO\"; const B: &str = r#\"\" // TODO \"#; const C: char = '\"'; // fine";
        assert_eq!(comments(text), [(1, "// fine".to_owned())]);
        assert_eq!(
            comments("fn f<'a>(x: &'a str) {} // why"),
            [(1, "// why".to_owned())]
        );
    }
}
