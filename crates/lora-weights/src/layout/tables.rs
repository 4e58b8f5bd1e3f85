use super::{REGION_ALIGNMENT, mul};
use crate::WeightsError;
use crate::device::{DevicePtr, LoraPair, UploadCopy};

/// Bytes of one entry of each kind of table: addresses of A and B (u64), scale (f32), true rank (u32).
const ENTRY_BYTES: [u64; 4] = [8, 8, 4, 4];

/// Bytes a slot takes in all four tables of one module.
const ROW_BYTES: usize = 24;

/// The per-slot tables of every (layer, module) and router, in one allocation.
///
/// Four blocks follow each other: addresses of A (u64), addresses of B (u64), scales (f32), true ranks (u32). A block
/// holds one table a module, in the order of [`PoolLayout::regions`](super::PoolLayout::regions) and then of the MoE
/// layers' routers; a table holds one entry a slot. Within a block the tables lie at one pitch, so that all entries of
/// a slot are refreshed by four strided copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableLayout {
    tables: usize,
    slots: u32,
    /// First byte of each block, and one past the last.
    starts: [u64; 5],
    /// Bytes from one table of a block to the next.
    pitches: [u64; 4],
}

impl TableLayout {
    pub(super) fn new(tables: usize, slots: u32) -> Result<Self, WeightsError> {
        let what = "the tables";
        let mut starts = [0u64; 5];
        let mut pitches = [0u64; 4];
        for (kind, entry_bytes) in ENTRY_BYTES.into_iter().enumerate() {
            pitches[kind] = (u64::from(slots) * entry_bytes).next_multiple_of(REGION_ALIGNMENT);
            let block = mul(pitches[kind], tables as u64, what)?;
            starts[kind + 1] = starts[kind]
                .checked_add(block)
                .ok_or(WeightsError::LayoutOverflow { what })?;
        }
        Ok(Self {
            tables,
            slots,
            starts,
            pitches,
        })
    }

    /// Tables of each kind: modules, then routers.
    pub fn tables(&self) -> usize {
        self.tables
    }

    /// Bytes of all tables.
    pub fn bytes(&self) -> u64 {
        self.starts[4]
    }

    /// Bytes from the allocation's first to the A, B, scale and rank table of module `table`; `None` past the last.
    pub fn offsets(&self, table: usize) -> Option<[u64; 4]> {
        (table < self.tables)
            .then(|| [0, 1, 2, 3].map(|kind| self.starts[kind] + self.pitches[kind] * table as u64))
    }

    /// Bytes of the entries of one slot, as [`write_image`](Self::write_image) lays them out.
    pub(crate) fn image_bytes(&self) -> usize {
        self.tables * ROW_BYTES
    }

    /// Writes one slot's entries: addresses of A, of B, scales, ranks, one each a table, without gaps. Zero where `pairs`
    /// names no pair for a table.
    pub(crate) fn write_image(
        &self,
        pairs: impl Iterator<Item = (usize, LoraPair)>,
        image: &mut [u8],
    ) {
        image.fill(0);
        let block = |kind: usize| self.tables * [0, 8, 16, 20][kind];
        for (table, pair) in pairs {
            let mut put = |at: usize, bytes: &[u8]| {
                image[at..at + bytes.len()].copy_from_slice(bytes);
            };
            put(block(0) + table * 8, &pair.a.0.to_ne_bytes());
            put(block(1) + table * 8, &pair.b.0.to_ne_bytes());
            put(block(2) + table * 4, &pair.scale.to_ne_bytes());
            put(block(3) + table * 4, &pair.rank.to_ne_bytes());
        }
    }

    /// The four copies that bring an image, at `src_offset` of a staging buffer, into `slot`'s entries of the tables at
    /// `base`. Empty where there are no tables.
    pub(crate) fn copies(&self, base: DevicePtr, slot: u32, src_offset: usize) -> Vec<UploadCopy> {
        if self.tables == 0 {
            return Vec::new();
        }
        debug_assert!(slot < self.slots);
        let mut src = src_offset;
        (0..4)
            .map(|kind| {
                let row_bytes = ENTRY_BYTES[kind] as usize;
                let copy = UploadCopy {
                    src_offset: src,
                    src_stride: row_bytes,
                    dst: base.offset(self.starts[kind] + u64::from(slot) * ENTRY_BYTES[kind]),
                    dst_stride: self.pitches[kind] as usize,
                    row_bytes,
                    rows: self.tables,
                };
                src += row_bytes * self.tables;
                copy
            })
            .collect()
    }
}
