//! Which rows of a batch share a table entry: built once a step, read by every routed launch of it.

mod experts;
mod grouping;

pub use experts::{ExpertRouting, ExpertSpace};
pub use grouping::Grouping;
use grouping::max_tiles;

use crate::{
    DeviceBuffer, GroupParams, KernelError, LARGE_TILE_ROWS, LoraBackend, MAX_ENTRIES, MAX_ROWS,
    Operand, RowSlots, SMALL_TILE_ROWS, Stream, Tile,
};
use lora_weights::device::{DeviceMemory, DevicePtr, UploadCopy};
use std::sync::Arc;

/// Byte offset of the tile list: the count before it has a cache line of its own.
const TILES_AT: u64 = 256;

/// What a [`RowGroups`] has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowGroupsSpec {
    /// Most rows of a batch, 1..=[`MAX_ROWS`].
    pub max_rows: u32,
    /// Entries of the tables that routes will have, 1..=[`MAX_ENTRIES`]: slots for dense modules, slots x experts for experts.
    pub entries: u32,
    /// Largest group cut into small tiles: [`LaunchOptions::gemv_max_m`](crate::LaunchOptions::gemv_max_m).
    pub small_max: u32,
    /// Rows are those of a MoE block: a router spreads them over many entries, so that tiles are seldom full. Above [`SMALL_TILE_ROWS`] a group is cut large,
    /// whatever `small_max`, unless the whole batch is cut small.
    pub spread: bool,
}

impl RowGroupsSpec {
    /// A batch of up to this many times `small_max` rows (288 by default) is cut into small tiles alone: kernels for small tiles alone need fewer registers,
    /// which wins over reading an adapter once for each 8 of its rows. docs/performance.md has the measurements.
    pub const SMALL_BATCH: u32 = 6;

    /// A MoE block's batch of up to this many rows an entry is cut into small tiles alone.
    pub const SMALL_ROWS_AN_ENTRY: u32 = 8;

    /// For dense modules.
    pub const fn new(max_rows: u32, entries: u32, small_max: u32) -> Self {
        Self {
            max_rows,
            entries,
            small_max,
            spread: false,
        }
    }

    /// For MoE blocks.
    pub const fn experts(max_rows: u32, entries: u32, small_max: u32) -> Self {
        Self {
            spread: true,
            ..Self::new(max_rows, entries, small_max)
        }
    }

    /// Rows of the largest batch that is cut into small tiles whatever its groups.
    fn small_batch(&self) -> u32 {
        let few = self.small_max.saturating_mul(Self::SMALL_BATCH);
        let spread = match self.spread {
            true => self.entries.saturating_mul(Self::SMALL_ROWS_AN_ENTRY),
            false => 0,
        };
        few.max(spread)
    }

    /// Room in the tile list: the most tiles that any batch of up to `max_rows` rows can give.
    pub fn max_tiles(&self) -> u32 {
        let small_batch = self.max_rows.min(self.small_batch());
        self.tile_bound(self.max_rows)
            .max(self.tile_bound(small_batch))
    }

    /// Largest group cut into small tiles in a batch of `rows` rows.
    pub fn small_max_of(&self, rows: u32) -> u32 {
        if rows <= self.small_batch() {
            rows.max(self.small_max)
        } else if self.spread {
            // A second small tile would read the adapter again.
            self.small_max.min(SMALL_TILE_ROWS)
        } else {
            self.small_max
        }
    }

    /// Tiles at most of a batch of `rows` rows.
    pub(crate) fn tile_bound(&self, rows: u32) -> u32 {
        max_tiles(rows, self.entries, self.small_max_of(rows))
    }

    /// Most rows that a tile of a batch of `rows` rows can have: [`SMALL_TILE_ROWS`] where no group can be cut large.
    pub(crate) fn tile_rows(&self, rows: u32) -> u32 {
        if rows <= self.small_max_of(rows) {
            SMALL_TILE_ROWS
        } else {
            LARGE_TILE_ROWS
        }
    }

    /// Device bytes that [`RowGroups::new`] allocates.
    pub fn bytes(&self) -> u64 {
        self.perm_at() + u64::from(self.max_rows) * size_of::<u32>() as u64
    }

    fn perm_at(&self) -> u64 {
        TILES_AT + u64::from(self.max_tiles()) * size_of::<Tile>() as u64
    }

    fn check(&self) -> Result<(), KernelError> {
        let operand = Operand::shared("row groups");
        let check = |quantity, value: u32, max: u32| {
            KernelError::check_range(operand, quantity, value.into(), (1, max.into()))
        };
        check("max_rows", self.max_rows, MAX_ROWS)?;
        check("entries", self.entries, MAX_ENTRIES)
    }
}

/// The rows of a batch grouped by table entry, in device buffers allocated once.
///
/// [`build`](Self::build) fills them on the device and is legal under graph capture: a replayed graph groups whatever `seq_slot` then
/// holds. [`build_host`](Self::build_host) gives the same grouping from host values, and refuses slots that do not exist.
///
/// Dense modules use entries = slots. Experts use entries = residents x experts and [`build_experts`](Self::build_experts), a row a (token, chosen expert).
#[derive(Debug)]
pub struct RowGroups {
    buffer: DeviceBuffer,
    spec: RowGroupsSpec,
    rows: u32,
}

impl RowGroups {
    /// Allocates for `spec`, with no rows in it.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for sizes outside the limits; what the allocation gives.
    pub fn new(memory: Arc<dyn DeviceMemory>, spec: RowGroupsSpec) -> Result<Self, KernelError> {
        spec.check()?;
        Ok(Self {
            buffer: DeviceBuffer::zeroed(memory, spec.bytes())?,
            spec,
            rows: 0,
        })
    }

    /// What it has room for.
    pub fn spec(&self) -> &RowGroupsSpec {
        &self.spec
    }

    /// Rows of the batch it was last built for; 0 before that.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Enqueues the grouping of `seq_slot` on `stream`. A row whose slot is negative, or at or past the entries, is in no group.
    ///
    /// No rows: nothing is enqueued, and launches with these groups return early.
    ///
    /// # Errors
    /// [`KernelError::TooManyRows`]; what the backend gives.
    pub fn build(
        &mut self,
        backend: &dyn LoraBackend,
        stream: Stream,
        seq_slot: RowSlots<'_>,
    ) -> Result<(), KernelError> {
        let rows = self.admit(seq_slot.len())?;
        if rows > 0 {
            let params = GroupParams {
                seq_slot: seq_slot.ptr().0,
                ..self.params(rows)
            };
            backend.group_rows(stream, &params)?;
        }
        self.rows = rows;
        Ok(())
    }

    /// Where a grouping of `rows` rows goes, and by which limits.
    fn params(&self, rows: u32) -> GroupParams {
        GroupParams {
            seq_slot: 0,
            tile_count: self.tile_count_ptr().0,
            tiles: self.tiles_ptr().0,
            perm: self.perm_ptr().0,
            rows,
            slots: self.spec.entries,
            small_max: self.spec.small_max_of(rows),
            max_tiles: self.spec.tile_bound(rows),
        }
    }

    /// Groups on the host and uploads, blocking: for engines that have the slots on the host anyway. Not legal under graph capture.
    ///
    /// # Errors
    /// [`KernelError::TooManyRows`]; [`KernelError::SlotOutOfRange`] for the first slot at or past the entries, before anything is
    /// uploaded; what the upload gives.
    pub fn build_host(&mut self, seq_slot: &[i32]) -> Result<(), KernelError> {
        let rows = self.admit(seq_slot.len())?;
        let entries = self.spec.entries;
        let bad = |slot: i32| slot >= 0 && slot as u32 >= entries;
        if let Some(row) = seq_slot.iter().position(|&slot| bad(slot)) {
            return Err(KernelError::SlotOutOfRange {
                row: row as u32,
                slot: seq_slot[row],
                entries,
            });
        }
        if rows > 0 {
            self.upload(&Grouping::of_rows(
                seq_slot,
                entries,
                self.spec.small_max_of(rows),
            ))?;
        }
        self.rows = rows;
        Ok(())
    }

    /// Reads the grouping back, blocking: for tests and reports. The stream it was built on must have been synchronized.
    ///
    /// # Errors
    /// What the download gives.
    pub fn download(&self) -> Result<Grouping, KernelError> {
        if self.rows == 0 {
            return Ok(Grouping::default());
        }
        let bound = self.spec.tile_bound(self.rows) as usize;
        let count = self.buffer.download::<u32>(0, 1)?[0] as usize;
        let first = TILES_AT as usize / size_of::<Tile>();
        let tiles: Vec<Tile> = self.buffer.download(first, count.min(bound))?;
        let routed: u64 = tiles.iter().map(|tile| u64::from(tile.count)).sum();
        let perm_at = self.spec.perm_at() as usize / size_of::<u32>();
        let perm = self
            .buffer
            .download(perm_at, routed.min(self.rows.into()) as usize)?;
        Ok(Grouping { tiles, perm })
    }

    /// Most rows that a tile can have, for the rows it was last built for.
    pub(crate) fn tile_rows(&self) -> u32 {
        self.spec.tile_rows(self.rows)
    }

    /// Tiles at most, for the rows it was last built for.
    pub(crate) fn current_max_tiles(&self) -> u32 {
        self.spec.tile_bound(self.rows)
    }

    pub(crate) fn tile_count_ptr(&self) -> DevicePtr {
        self.buffer.ptr()
    }

    pub(crate) fn tiles_ptr(&self) -> DevicePtr {
        self.buffer.ptr().offset(TILES_AT)
    }

    pub(crate) fn perm_ptr(&self) -> DevicePtr {
        self.buffer.ptr().offset(self.spec.perm_at())
    }

    fn admit(&self, rows: usize) -> Result<u32, KernelError> {
        match u32::try_from(rows) {
            Ok(rows) if rows <= self.spec.max_rows => Ok(rows),
            _ => Err(KernelError::TooManyRows {
                rows: rows as u64,
                capacity: self.spec.max_rows,
            }),
        }
    }

    fn upload(&self, grouping: &Grouping) -> Result<(), KernelError> {
        let count = [grouping.tiles.len() as u32];
        let parts: [(DevicePtr, &[u8]); 3] = [
            (self.tile_count_ptr(), bytemuck::cast_slice(&count)),
            (self.tiles_ptr(), bytemuck::cast_slice(&grouping.tiles)),
            (self.perm_ptr(), bytemuck::cast_slice(&grouping.perm)),
        ];
        let memory = self.buffer.memory();
        let mut staging = memory.stage(parts.iter().map(|(_, bytes)| bytes.len()).sum())?;
        let mut copies = Vec::with_capacity(parts.len());
        let mut at = 0;
        for (dst, bytes) in parts {
            if bytes.is_empty() {
                continue;
            }
            staging.bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
            copies.push(UploadCopy::contiguous(at, dst, bytes.len()));
            at += bytes.len();
        }
        memory.upload(staging, &copies)?.wait()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_batch_is_cut_small_up_to_a_few_rows_an_entry() {
        let dense = RowGroupsSpec::new(10_000, 128, 48);
        let experts = RowGroupsSpec::experts(10_000, 128, 48);
        let tile_rows = |rows| (dense.tile_rows(rows), experts.tile_rows(rows));
        assert_eq!(tile_rows(288), (8, 8));
        assert_eq!(tile_rows(1024), (LARGE_TILE_ROWS, 8));
        assert_eq!(tile_rows(1025), (LARGE_TILE_ROWS, LARGE_TILE_ROWS));
        for rows in [288, 1024, 1025, 10_000] {
            assert!(experts.tile_bound(rows) <= experts.max_tiles());
        }
    }

    use crate::host::HostBackend;

    fn groups(max_rows: u32, entries: u32) -> (Arc<HostBackend>, RowGroups) {
        let backend = Arc::new(HostBackend::new());
        let spec = RowGroupsSpec::new(max_rows, entries, 48);
        let groups = RowGroups::new(backend.clone(), spec).unwrap();
        (backend, groups)
    }

    #[test]
    fn device_and_host_builders_agree() {
        let (backend, mut groups) = groups(300, 7);
        let slots: Vec<i32> = (0..300).map(|row| (row * row) % 9 - 2).collect();
        let kept: Vec<i32> = slots.iter().map(|&s| if s < 7 { s } else { -1 }).collect();
        groups.build_host(&kept).unwrap();
        let by_host = groups.download().unwrap();
        let buffer = DeviceBuffer::from_slice(backend.clone(), &slots).unwrap();
        groups
            .build(&*backend, Stream::OWN, buffer.row_slots(300).unwrap())
            .unwrap();
        assert_eq!(groups.download().unwrap(), by_host);
        assert_eq!(by_host, Grouping::of_rows(&slots, 7, 48));
    }

    #[test]
    fn the_host_builder_refuses_a_slot_past_the_table() {
        let (_backend, mut groups) = groups(4, 2);
        groups.build_host(&[0, 1]).unwrap();
        let error = groups.build_host(&[0, -1, 2]).unwrap_err();
        assert_eq!(
            error,
            KernelError::SlotOutOfRange {
                row: 2,
                slot: 2,
                entries: 2
            }
        );
        assert_eq!(groups.rows(), 2, "a refused build changes nothing");
    }

    #[test]
    fn more_rows_than_capacity_are_refused() {
        let (_backend, mut groups) = groups(4, 2);
        let error = groups.build_host(&[0; 5]).unwrap_err();
        assert_eq!(
            error,
            KernelError::TooManyRows {
                rows: 5,
                capacity: 4
            }
        );
    }

    #[test]
    fn no_rows_and_all_base_rows_are_legal() {
        let (_backend, mut groups) = groups(4, 2);
        groups.build_host(&[]).unwrap();
        assert_eq!(groups.download().unwrap(), Grouping::default());
        groups.build_host(&[-1, i32::MIN]).unwrap();
        assert_eq!(groups.rows(), 2);
        assert_eq!(groups.download().unwrap(), Grouping::default());
    }

    #[test]
    fn sizes_outside_the_limits_are_refused() {
        let backend = Arc::new(HostBackend::new());
        for (max_rows, entries) in [(0, 1), (1, 0), (MAX_ROWS + 1, 1), (1, MAX_ENTRIES + 1)] {
            let spec = RowGroupsSpec::new(max_rows, entries, 48);
            let error = RowGroups::new(backend.clone(), spec).unwrap_err();
            assert!(matches!(error, KernelError::OutOfRange { .. }));
        }
    }
}
