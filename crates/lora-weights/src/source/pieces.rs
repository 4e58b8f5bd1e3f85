//! Which reads bring a file's tensors.

use crate::{TensorId, WeightManifest};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges of at most `piece_bytes` bytes that cover every tensor, in file order. A boundary lies inside a tensor only where the
/// tensor is larger than a piece.
pub(super) fn plan(weights: &WeightManifest, piece_bytes: u64) -> Vec<Range<u64>> {
    let piece_bytes = piece_bytes.max(1);
    let mut pieces: Vec<Range<u64>> = Vec::new();
    for (_, tensor) in in_file_order(weights) {
        match pieces.last_mut() {
            Some(last) if tensor.end - last.start <= piece_bytes && last.end == tensor.start => {
                last.end = tensor.end;
            }
            _ => {
                let starts = (tensor.start..tensor.end)
                    .step_by(piece_bytes.try_into().unwrap_or(usize::MAX));
                pieces.extend(
                    starts.map(|start| start..tensor.end.min(start.saturating_add(piece_bytes))),
                );
            }
        }
    }
    pieces
}

fn in_file_order(weights: &WeightManifest) -> Vec<(TensorId, Range<u64>)> {
    let ids = (0..weights.tensors().len()).map(TensorId);
    let mut order: Vec<_> = ids.map(|id| (id, weights.range(id))).collect();
    order.sort_by_key(|(_, range)| (range.start, range.end));
    order
}

/// Tensors, put together from the pieces that have come, in any order.
pub(super) struct Assembly {
    /// In file order.
    order: Vec<(TensorId, Range<u64>)>,
    tensors: Vec<Bytes>,
    /// Parts of tensors that came in several pieces, by where they start.
    parts: BTreeMap<u64, Bytes>,
}

impl Assembly {
    pub(super) fn new(weights: &WeightManifest) -> Self {
        Self {
            order: in_file_order(weights),
            tensors: vec![Bytes::new(); weights.tensors().len()],
            parts: BTreeMap::new(),
        }
    }

    /// Takes a piece of the plan, which starts at `start`.
    pub(super) fn take(&mut self, start: u64, piece: &Bytes) {
        let end = start + piece.len() as u64;
        let first = self.order.partition_point(|(_, range)| range.end <= start);
        for (id, range) in &self.order[first..] {
            if range.start >= end {
                break;
            }
            if range.is_empty() {
                continue;
            }
            // Lengths of a buffer that exists.
            let here = range.start.max(start)..range.end.min(end);
            let bytes = piece.slice((here.start - start) as usize..(here.end - start) as usize);
            if here == *range {
                self.tensors[id.0] = bytes;
                continue;
            }
            self.parts.insert(here.start, bytes);
            let have: usize = self
                .parts
                .range(range.clone())
                .map(|(_, part)| part.len())
                .sum();
            if have as u64 == range.end - range.start {
                let mut whole = Vec::with_capacity(have);
                let mut rest = self.parts.split_off(&range.start);
                let mut after = rest.split_off(&range.end);
                rest.values().for_each(|part| whole.extend_from_slice(part));
                self.parts.append(&mut after);
                self.tensors[id.0] = whole.into();
            }
        }
    }

    /// Every tensor's bytes, in the header's order, once all pieces have been taken.
    pub(super) fn finish(self) -> Vec<Bytes> {
        self.tensors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A file of tensors of these sizes, U8, in an order of names that is not the file's.
    fn file(sizes: &[u64]) -> (Vec<u8>, WeightManifest) {
        let mut entries = Vec::new();
        let mut at = 0;
        for (i, size) in sizes.iter().enumerate() {
            let end = at + size;
            entries.push(format!(
                r#""{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{at},{end}]}}"#
            ));
            at = end;
        }
        entries.reverse();
        let header = format!("{{{}}}", entries.join(","));
        let data: Vec<u8> = (0..at).map(|i| (i % 251) as u8).collect();
        let file = [
            &(header.len() as u64).to_le_bytes()[..],
            header.as_bytes(),
            &data,
        ]
        .concat();
        let manifest = WeightManifest::parse(&file, file.len() as u64).unwrap();
        (file, manifest)
    }

    #[test]
    fn small_tensors_share_a_piece_and_large_ones_take_several() {
        let (file, manifest) = file(&[3, 4, 2, 25, 1]);
        let data = file.len() as u64 - 35;
        let pieces: Vec<_> = plan(&manifest, 10)
            .into_iter()
            .map(|p| p.start - data..p.end - data)
            .collect();
        assert_eq!(pieces, [0..9, 9..19, 19..29, 29..35]);
    }

    proptest! {
        #[test]
        fn every_tensor_comes_out_whole_whatever_the_order_of_its_pieces(
            sizes in prop::collection::vec(0u64..40, 0..12),
            piece_bytes in 0u64..50,
            seed in any::<u64>(),
        ) {
            let (file, manifest) = file(&sizes);
            let mut pieces = plan(&manifest, piece_bytes);
            let covered: u64 = pieces.iter().map(|p| p.end - p.start).sum();
            prop_assert_eq!(covered, sizes.iter().sum::<u64>());
            prop_assert!(pieces.iter().all(|p| p.end - p.start <= piece_bytes.max(1)));
            pieces.sort_by_key(|p| p.start.wrapping_mul(seed | 1));
            let mut assembly = Assembly::new(&manifest);
            for piece in pieces {
                let bytes = Bytes::copy_from_slice(&file[piece.start as usize..piece.end as usize]);
                assembly.take(piece.start, &bytes);
            }
            for (id, tensor) in assembly.finish().into_iter().enumerate() {
                let range = manifest.range(TensorId(id));
                prop_assert_eq!(&tensor[..], &file[range.start as usize..range.end as usize]);
            }
        }
    }
}
