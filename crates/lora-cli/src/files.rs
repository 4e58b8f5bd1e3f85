//! Files that a command line names: read whole, but only where they are files of a size that makes sense.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Far over any `config.json` or `adapter_config.json`.
const MAX_JSON_BYTES: u64 = 16 << 20;

/// The text of a JSON file of at most 16 MiB.
///
/// # Errors
/// As [`read_bytes`], and bytes that are not UTF-8.
pub(crate) fn read_json(path: &Path) -> io::Result<String> {
    let bytes = read_bytes(path, MAX_JSON_BYTES)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// The contents of a regular file of at most `limit` bytes. A pipe or a device is refused, since opening or reading one can
/// go on forever.
///
/// # Errors
/// Nothing of that name, something that is no regular file, a file over the limit, and what reading meets.
pub(crate) fn read_bytes(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let meta = std::fs::metadata(path)?;
    let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    if !meta.is_file() {
        return invalid("not a regular file".to_owned());
    }
    if meta.len() > limit {
        return invalid(format!("{} bytes, over the limit of {limit}", meta.len()));
    }
    let mut bytes = Vec::new();
    // A file that grows after its size was looked up is not followed past the limit.
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_regular_file_is_refused_unopened() {
        let folder = read_bytes(Path::new("."), 10).expect_err("a folder");
        assert_eq!(folder.to_string(), "not a regular file");
        #[cfg(unix)]
        assert!(read_json(Path::new("/dev/zero")).is_err(), "never ends");
    }

    #[test]
    fn file_over_the_limit_is_refused_with_both_numbers() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let bytes = std::fs::read(&path).expect("this crate's manifest");
        assert_eq!(read_bytes(&path, bytes.len() as u64).expect("fits"), bytes);
        let error = read_bytes(&path, 3)
            .expect_err("over the limit")
            .to_string();
        assert_eq!(error, format!("{} bytes, over the limit of 3", bytes.len()));
    }

    #[test]
    fn absent_file_keeps_the_systems_answer() {
        let error = read_json(Path::new("no-such-file")).expect_err("absent");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
