//! Files of an adapter folder.

use super::header::LENGTH_BYTES;
use super::{Data, HeaderError, StoreError, WeightManifest, Weights};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

pub(crate) const CONFIG: &str = "adapter_config.json";
pub(crate) const WEIGHTS: &str = "adapter_model.safetensors";
const PICKLE: &str = "adapter_model.bin";
const SHARD_INDEX: &str = "adapter_model.safetensors.index.json";
const MLX: &str = "adapters.safetensors";

/// Files of weights in formats that do not load, the likeliest first.
pub(crate) const OTHER_WEIGHTS: [&str; 3] = [SHARD_INDEX, PICKLE, MLX];

/// Far over any config that PEFT writes; a pattern for each expert of a large model takes less.
pub(crate) const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Reads the config's text.
pub(crate) fn open_config(dir: &Path) -> Result<String, StoreError> {
    let path = dir.join(CONFIG);
    if !dir.is_dir() {
        return Err(StoreError::NotAFolder {
            path: dir.to_owned(),
        });
    }
    let Some((file, bytes)) = open_file(&path)? else {
        return Err(StoreError::MissingConfig { path });
    };
    if bytes > MAX_CONFIG_BYTES {
        return Err(StoreError::ConfigTooLarge {
            path,
            bytes,
            limit: MAX_CONFIG_BYTES,
        });
    }
    let mut text = Vec::new();
    // The size was looked up before: a file that grows meanwhile is not followed.
    file.take(MAX_CONFIG_BYTES)
        .read_to_end(&mut text)
        .map_err(|source| io_error(&path, source))?;
    String::from_utf8(text).map_err(|error| StoreError::ConfigNotUtf8 {
        path,
        valid_up_to: error.utf8_error().valid_up_to(),
    })
}

/// Checks the header of the weights file and maps it.
pub(crate) fn open_weights(dir: &Path) -> Result<Weights, StoreError> {
    let path = dir.join(WEIGHTS);
    let Some((mut file, file_bytes)) = open_file(&path)? else {
        return Err(missing_weights(dir, path));
    };
    let header_error = |source| StoreError::Header {
        path: path.clone(),
        source,
    };
    let prefix = read_prefix(&mut file, file_bytes).map_err(|problem| match problem {
        Problem::Header(source) => header_error(source),
        Problem::Io(source) => io_error(&path, source),
    })?;
    let manifest = WeightManifest::parse(&prefix, file_bytes).map_err(header_error)?;
    let map = map_file(&file).map_err(|source| io_error(&path, source))?;
    if (map.len() as u64) < file_bytes {
        let available = map.len() as u64;
        return Err(StoreError::Header {
            path,
            source: HeaderError::PastEnd {
                declared: file_bytes,
                available,
            },
        });
    }
    let (tensors, ranges) = manifest.into_parts();
    // Within the map, whose length is a `usize`.
    let spans = ranges
        .into_iter()
        .map(|range| range.start as usize..range.end as usize)
        .collect();
    Ok(Weights {
        tensors,
        data: Data::File { map, spans },
    })
}

/// Maps a whole file for reading.
#[allow(unsafe_code)]
fn map_file(file: &File) -> io::Result<memmap2::Mmap> {
    // SAFETY: `file` is a regular file that is open for reading. `map` asks that nobody writes to it while it is mapped, which no
    // program can enforce and which `AdapterStore` therefore asks of its caller in so many words. What is mapped is only ever
    // read as numbers, of which any bit pattern is one: the header, whose contents decide lengths, was read into memory of
    // our own before it was checked, so that a change cannot turn a checked range into an unchecked one.
    unsafe { memmap2::Mmap::map(file) }
}

/// Where a folder holds neither of an adapter's files, but subfolders that do: the error that says so.
pub(crate) fn several_adapters(dir: &Path) -> Option<StoreError> {
    if dir.join(CONFIG).exists() || dir.join(WEIGHTS).exists() {
        return None;
    }
    let mut folders: Vec<String> = std::fs::read_dir(dir)
        .ok()?
        .filter_map(Result::ok)
        .filter(|entry| entry.path().join(CONFIG).is_file())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    folders.sort();
    (!folders.is_empty()).then(|| StoreError::SeveralAdapters {
        path: dir.to_owned(),
        folders,
    })
}

fn missing_weights(dir: &Path, path: PathBuf) -> StoreError {
    let other = OTHER_WEIGHTS
        .into_iter()
        .find(|name| dir.join(name).exists());
    match other.map(|name| (name, dir.join(name))) {
        None => StoreError::MissingWeights { path },
        Some((SHARD_INDEX, path)) => StoreError::Sharded { path },
        Some((PICKLE, path)) => StoreError::Pickle { path },
        Some((_, path)) => StoreError::Mlx { path },
    }
}

enum Problem {
    Io(io::Error),
    Header(HeaderError),
}

/// The header's length and the header.
fn read_prefix(file: &mut File, file_bytes: u64) -> Result<Vec<u8>, Problem> {
    if file_bytes < LENGTH_BYTES {
        return Err(Problem::Header(HeaderError::TooShort { bytes: file_bytes }));
    }
    let mut first = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut first).map_err(Problem::Io)?;
    let bytes = WeightManifest::prefix_bytes(first, file_bytes).map_err(Problem::Header)?;
    let mut prefix = vec![0; bytes as usize];
    let (length, header) = prefix.split_at_mut(first.len());
    length.copy_from_slice(&first);
    file.read_exact(header).map_err(Problem::Io)?;
    Ok(prefix)
}

/// A regular file and its size; `None` where there is nothing of that name. A pipe or a device is refused, since opening one
/// can wait forever.
fn open_file(path: &Path) -> Result<Option<(File, u64)>, StoreError> {
    let error = |source| io_error(path, source);
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_file() => {}
        Ok(_) => {
            return Err(error(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            )));
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(error(e)),
    }
    let file = File::open(path).map_err(error)?;
    let bytes = file.metadata().map_err(error)?.len();
    Ok(Some((file, bytes)))
}

fn io_error(path: &Path, source: io::Error) -> StoreError {
    StoreError::Io {
        path: path.to_owned(),
        source,
    }
}
