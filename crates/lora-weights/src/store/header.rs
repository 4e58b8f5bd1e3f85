//! The safetensors header, read strictly.
//!
//! The `safetensors` crate keeps the last of two entries with one name and looks a tensor up by name; here the header
//! comes from strangers, so a second entry is an error that names the tensor, entries keep their order, and an unknown field is not
//! passed over. Names and sizes of dtypes are the crate's.

use super::{HeaderError, TensorMeta};
use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{self, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::ops::Range;

/// Bytes before the header: its length, little-endian.
pub(crate) const LENGTH_BYTES: u64 = 8;

/// The format's own limit for a header.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// More dimensions than any weight has; bounds what a shape can make this parser allocate.
const MAX_DIMS: usize = 8;

/// One tensor of a header: what it is, and where its bytes are, counted from the end of the header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderEntry {
    /// Name, dtype and shape.
    pub meta: TensorMeta,
    /// Its bytes, after the header.
    pub bytes: Range<u64>,
}

/// Checks the length that a file of `file_bytes` bytes declares for its header in its first eight bytes.
///
/// # Errors
/// [`HeaderError::TooShort`], [`HeaderError::TooLarge`] or [`HeaderError::PastEnd`].
pub(super) fn header_bytes(file_bytes: u64, first: [u8; 8]) -> Result<u64, HeaderError> {
    let declared = u64::from_le_bytes(first);
    if declared > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLarge {
            declared,
            limit: MAX_HEADER_BYTES,
        });
    }
    let available = file_bytes
        .checked_sub(LENGTH_BYTES)
        .ok_or(HeaderError::TooShort { bytes: file_bytes })?;
    if declared > available {
        return Err(HeaderError::PastEnd {
            declared,
            available,
        });
    }
    Ok(declared)
}

/// Reads a safetensors header (the JSON alone) of a file that has `data_bytes` bytes after it.
///
/// Entries come in header order. Every byte of the data belongs to exactly one tensor.
///
/// ```
/// use lora_weights::{HeaderError, parse_safetensors_header};
///
/// let header = br#"{"x":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#;
/// let entries = parse_safetensors_header(header, 12).unwrap();
/// assert_eq!(entries[0].meta.shape, [2, 3]);
///
/// let cut = parse_safetensors_header(header, 11).unwrap_err();
/// assert!(matches!(cut, HeaderError::DataPastEnd { end: 12, available: 11, .. }));
/// ```
///
/// # Errors
/// A [`HeaderError`] for the first thing that is wrong. Never panics; allocates a small multiple of `header`'s size.
pub fn parse_safetensors_header(
    header: &[u8],
    data_bytes: u64,
) -> Result<Vec<HeaderEntry>, HeaderError> {
    if header.first() != Some(&b'{') {
        return Err(HeaderError::NotJson {
            detail: "it does not begin with `{`".to_owned(),
        });
    }
    let mut failure = None;
    let mut parser = serde_json::Deserializer::from_slice(header);
    let parsed = HeaderSeed {
        failure: &mut failure,
    }
    .deserialize(&mut parser)
    .and_then(|entries| parser.end().map(|()| entries));
    let raw = match (parsed, failure) {
        (_, Some(failure)) => return Err(failure),
        (Err(error), None) => {
            return Err(HeaderError::NotJson {
                detail: error.to_string(),
            });
        }
        (Ok(raw), None) => raw,
    };
    let entries = raw
        .into_iter()
        .map(|(name, raw)| check_entry(name, raw))
        .collect::<Result<Vec<_>, _>>()?;
    check_names(entries.iter().map(|entry| entry.meta.name.as_str()))?;
    check_coverage(&entries, data_bytes)?;
    Ok(entries)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Dims,
    data_offsets: (u64, u64),
}

struct Dims(Vec<usize>);

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DimsVisitor;
        impl<'de> Visitor<'de> for DimsVisitor {
            type Value = Dims;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a shape of at most {MAX_DIMS} dimensions")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element::<usize>()? {
                    if dims.len() == MAX_DIMS {
                        return Err(de::Error::invalid_length(MAX_DIMS + 1, &self));
                    }
                    dims.push(dim);
                }
                Ok(Dims(dims))
            }
        }
        deserializer.deserialize_seq(DimsVisitor)
    }
}

/// Reads the header's object. A failure inside an entry is put into `failure`, so that it names its tensor.
struct HeaderSeed<'f> {
    failure: &'f mut Option<HeaderError>,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Vec<(String, RawEntry)>;
    fn deserialize<D: de::Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Vec<(String, RawEntry)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        let mut metadata_seen = false;
        while let Some(name) = map.next_key::<String>()? {
            let problem = if name == "__metadata__" {
                let again = std::mem::replace(&mut metadata_seen, true);
                match map.next_value::<Metadata>() {
                    Ok(Metadata) if again => Err(de::Error::custom("named twice in the header")),
                    Ok(Metadata) => Ok(()),
                    Err(error) => Err(error),
                }
            } else {
                map.next_value::<RawEntry>()
                    .map(|entry| entries.push((name.clone(), entry)))
            };
            if let Err(error) = problem {
                *self.failure = Some(HeaderError::BadEntry {
                    tensor: name,
                    detail: error.to_string(),
                });
                return Err(error);
            }
        }
        Ok(entries)
    }
}

/// `__metadata__`: strings to strings. Nothing in it changes what tensors mean, so only its form is checked.
struct Metadata;

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MetadataVisitor;
        impl<'de> Visitor<'de> for MetadataVisitor {
            type Value = Metadata;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                while map.next_entry::<String, String>()?.is_some() {}
                Ok(Metadata)
            }
        }
        deserializer.deserialize_map(MetadataVisitor)
    }
}

fn check_entry(name: String, raw: RawEntry) -> Result<HeaderEntry, HeaderError> {
    let Dims(shape) = raw.shape;
    let (begin, end) = raw.data_offsets;
    let text: StrDeserializer<'_, de::value::Error> = raw.dtype.as_str().into_deserializer();
    let Ok(dtype) = safetensors::Dtype::deserialize(text) else {
        return Err(HeaderError::UnknownDtype {
            tensor: name,
            dtype: raw.dtype,
        });
    };
    let Some(actual) = end.checked_sub(begin) else {
        return Err(HeaderError::Reversed {
            tensor: name,
            begin,
            end,
        });
    };
    let meta = TensorMeta {
        name,
        dtype: dtype.into(),
        shape,
    };
    check_size(&meta, actual)?;
    Ok(HeaderEntry {
        meta,
        bytes: begin..end,
    })
}

/// `actual` bytes are what shape and dtype take.
pub(super) fn check_size(meta: &TensorMeta, actual: u64) -> Result<(), HeaderError> {
    let times = |bits: u64, &dim: &usize| bits.checked_mul(dim as u64);
    let tensor = || meta.name.clone();
    let shape = || meta.shape.clone();
    let Some(bits) = meta.shape.iter().try_fold(meta.dtype.bits(), times) else {
        return Err(HeaderError::SizeOverflow {
            tensor: tensor(),
            shape: shape(),
        });
    };
    if !bits.is_multiple_of(8) {
        let detail = format!(
            "shape {:?} of {} does not fill its last byte",
            meta.shape, meta.dtype
        );
        return Err(HeaderError::BadEntry {
            tensor: tensor(),
            detail,
        });
    }
    let expected = bits / 8;
    if actual != expected {
        return Err(HeaderError::SizeMismatch {
            tensor: tensor(),
            shape: shape(),
            dtype: meta.dtype,
            expected,
            actual,
        });
    }
    Ok(())
}

/// No two entries of one name.
pub(super) fn check_names<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), HeaderError> {
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(HeaderError::DuplicateName {
            tensor: pair[0].to_owned(),
        }),
    }
}

/// Every byte after the header belongs to exactly one tensor.
fn check_coverage(entries: &[HeaderEntry], data_bytes: u64) -> Result<(), HeaderError> {
    let mut order: Vec<&HeaderEntry> = entries.iter().collect();
    order.sort_by_key(|entry| (entry.bytes.start, entry.bytes.end));
    let mut covered = 0;
    let mut previous: Option<&HeaderEntry> = None;
    for entry in order {
        let tensor = || entry.meta.name.clone();
        let begin = entry.bytes.start;
        if let Some(bytes) = begin.checked_sub(covered).filter(|&bytes| bytes > 0) {
            return Err(HeaderError::Hole {
                tensor: tensor(),
                begin,
                bytes,
            });
        }
        if begin < covered {
            return Err(HeaderError::Overlap {
                tensor: tensor(),
                other: previous.map_or_else(String::new, |p| p.meta.name.clone()),
                begin,
            });
        }
        covered = entry.bytes.end;
        if covered > data_bytes {
            return Err(HeaderError::DataPastEnd {
                tensor: tensor(),
                end: covered,
                available: data_bytes,
            });
        }
        previous = Some(entry);
    }
    match data_bytes - covered {
        0 => Ok(()),
        bytes => Err(HeaderError::TrailingBytes { bytes }),
    }
}
