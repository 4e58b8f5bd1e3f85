//! What a safetensors file says of itself, without its data.

use super::header::{LENGTH_BYTES, header_bytes, parse_safetensors_header};
use super::{HeaderError, TensorId, TensorMeta};
use std::ops::Range;

/// Names, dtypes, shapes and byte ranges of a safetensors file: all that its header says, checked against the file's size.
///
/// It is made of the file's first bytes alone, so that an adapter on the other side of a network can be audited, and planned
/// into a slot, before its data is asked for.
///
/// ```
/// use lora_weights::{TensorId, WeightManifest};
///
/// let header = br#"{"x":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#;
/// let file = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 12]].concat();
/// let size = file.len() as u64;
///
/// let first = file[..8].try_into()?;
/// let prefix = WeightManifest::prefix_bytes(first, size)? as usize; // the length, and the header
/// let manifest = WeightManifest::parse(&file[..prefix], size)?;
/// assert_eq!(manifest.tensors()[0].shape, [2, 3]);
/// assert_eq!(manifest.range(TensorId(0)), size - 12..size);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightManifest {
    tensors: Vec<TensorMeta>,
    /// Each tensor's bytes, counted from the start of the file.
    ranges: Vec<Range<u64>>,
    file_bytes: u64,
}

impl WeightManifest {
    /// Bytes that [`parse`](Self::parse) needs of a file of `file_bytes` bytes that begins with `first`: the header's length,
    /// and the header. At most 100 MB and 8 bytes.
    ///
    /// # Errors
    /// [`HeaderError::TooShort`], [`HeaderError::TooLarge`] or [`HeaderError::PastEnd`].
    pub fn prefix_bytes(first: [u8; 8], file_bytes: u64) -> Result<u64, HeaderError> {
        Ok(LENGTH_BYTES + header_bytes(file_bytes, first)?)
    }

    /// Reads the first bytes of a file of `file_bytes` bytes; more than the header may be given.
    ///
    /// # Errors
    /// A [`HeaderError`] for the first thing that is wrong. Never panics; allocates a small multiple of the header's size.
    pub fn parse(prefix: &[u8], file_bytes: u64) -> Result<Self, HeaderError> {
        let given = prefix.len() as u64;
        let Some((first, rest)) = prefix.split_first_chunk() else {
            return Err(HeaderError::TooShort { bytes: given });
        };
        let declared = header_bytes(file_bytes, *first)?;
        let available = rest.len() as u64;
        let header = usize::try_from(declared)
            .ok()
            .and_then(|length| rest.get(..length))
            .ok_or(HeaderError::PastEnd {
                declared,
                available,
            })?;
        let data = LENGTH_BYTES + declared;
        let (tensors, ranges) = parse_safetensors_header(header, file_bytes - data)?
            .into_iter()
            // Within the file, whose size is 64 bits.
            .map(|entry| (entry.meta, data + entry.bytes.start..data + entry.bytes.end))
            .unzip();
        Ok(Self {
            tensors,
            ranges,
            file_bytes,
        })
    }

    /// Tensors in the header's order.
    pub fn tensors(&self) -> &[TensorMeta] {
        &self.tensors
    }

    /// A tensor's bytes, counted from the start of the file.
    ///
    /// # Panics
    /// If `id` is not of this manifest.
    pub fn range(&self, id: TensorId) -> Range<u64> {
        self.ranges[id.0].clone()
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Tensors and ranges, apart.
    pub(super) fn into_parts(self) -> (Vec<TensorMeta>, Vec<Range<u64>>) {
        (self.tensors, self.ranges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let length = (header.len() as u64).to_le_bytes();
        [&length[..], header.as_bytes(), &vec![0; data]].concat()
    }

    const TWO: &str = r#"{"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},"a":{"dtype":"F16","shape":[2,1],"data_offsets":[0,4]}}"#;

    #[test]
    fn ranges_count_from_the_start_of_the_file_in_header_order() {
        let file = file(TWO, 12);
        let size = file.len() as u64;
        let manifest = WeightManifest::parse(&file, size).unwrap();
        let data = size - 12;
        assert_eq!(manifest.range(TensorId(0)), data + 4..size);
        assert_eq!(manifest.range(TensorId(1)), data..data + 4);
        assert_eq!(manifest.tensors()[1].name, "a");
        assert_eq!(manifest.file_bytes(), size);
    }

    #[test]
    fn a_prefix_is_all_that_is_needed_and_less_is_refused_with_both_numbers() {
        let file = file(TWO, 12);
        let size = file.len() as u64;
        let prefix = WeightManifest::prefix_bytes(file[..8].try_into().unwrap(), size).unwrap();
        assert_eq!(prefix, size - 12);
        let prefix = prefix as usize;
        assert!(WeightManifest::parse(&file[..prefix], size).is_ok());
        let declared = TWO.len() as u64;
        assert_eq!(
            WeightManifest::parse(&file[..prefix - 1], size),
            Err(HeaderError::PastEnd {
                declared,
                available: declared - 1
            })
        );
        assert_eq!(
            WeightManifest::parse(&file[..5], size),
            Err(HeaderError::TooShort { bytes: 5 })
        );
    }

    #[test]
    fn a_file_of_another_size_is_refused() {
        let file = file(TWO, 12);
        let size = file.len() as u64;
        assert!(matches!(
            WeightManifest::parse(&file, size - 1),
            Err(HeaderError::DataPastEnd { .. })
        ));
        assert_eq!(
            WeightManifest::parse(&file, size + 3),
            Err(HeaderError::TrailingBytes { bytes: 3 })
        );
        assert!(matches!(
            WeightManifest::parse(&file, 9),
            Err(HeaderError::PastEnd { available: 1, .. })
        ));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_point_outside_the_file(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            length in prop::option::of(0u64..200),
            size in prop::option::of(any::<u64>()),
        ) {
            if let (Some(length), true) = (length, bytes.len() >= 8) {
                bytes[..8].copy_from_slice(&length.to_le_bytes());
            }
            let size = size.unwrap_or(bytes.len() as u64);
            if let Ok(manifest) = WeightManifest::parse(&bytes, size) {
                for id in 0..manifest.tensors().len() {
                    prop_assert!(manifest.range(TensorId(id)).end <= size);
                }
            }
        }
    }
}
