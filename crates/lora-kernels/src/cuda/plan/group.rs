//! Grouping of rows by table entry.

use crate::KernelPlan;
use crate::cuda::Kernel;
use crate::params::{GROUP_BLOCKS, GROUP_THREADS, GroupParams, MAX_GROUP_THREADS};

/// Shared memory for the counts of a grouping: with what the kernel has beside it, a block of every target has that much.
const COUNT_BYTES: u32 = 80 * 1024;
/// Rows whose keys are sorted rather than tallied, whatever the entries: two warps sort without waiting for each other much.
const MOST_SORTED_ROWS: u32 = 64;
/// What a block of a counted grouping keeps of an entry: every block's rows of it, where the next of its own goes, and a byte for those of each warp.
const ENTRY_COUNT_BYTES: u32 = (GROUP_BLOCKS + 1) * 4 + GROUP_THREADS / 32;
/// Entries whose counts a thread of such a block sends at a time.
const ENTRIES_SENT: u32 = 4;

/// How a grouping of rows is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupPlan {
    /// One block, a thread a row, or a cluster that counts more rows than that.
    pub launch: KernelPlan<Kernel>,
    /// Entries whose counts fit in shared memory; where rows are counted, more entries take more passes over them. 0 where the rows' keys are sorted.
    pub capacity: u32,
}

/// Where the entries of rows to group come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupSource {
    /// The rows' slots.
    Slots,
    /// Their tokens' adapters and their experts.
    Experts,
}

/// Plans a grouping of rows.
pub fn plan_group_rows(source: GroupSource, params: &GroupParams) -> GroupPlan {
    let (kernel, blocks, block, shared_bytes, capacity);
    if params.rows <= MAX_GROUP_THREADS {
        let tallies =
            u64::from(params.rows.div_ceil(32).next_power_of_two()) * u64::from(params.slots);
        let tallied = params.rows > MOST_SORTED_ROWS && tallies * 2 <= COUNT_BYTES.into();
        kernel = match source {
            GroupSource::Slots => Kernel::GroupRows,
            GroupSource::Experts => Kernel::GroupExperts,
        };
        blocks = 1;
        block = params.rows.next_power_of_two().max(32);
        capacity = if tallied { params.slots } else { 0 };
        shared_bytes = if tallied {
            (tallies as u32 * 2).next_multiple_of(4)
        } else {
            0
        };
    } else {
        kernel = match source {
            GroupSource::Slots => Kernel::GroupManyRows,
            GroupSource::Experts => Kernel::GroupManyExperts,
        };
        blocks = GROUP_BLOCKS;
        block = GROUP_THREADS;
        let most = COUNT_BYTES / ENTRY_COUNT_BYTES / ENTRIES_SENT * ENTRIES_SENT;
        capacity = params.slots.clamp(1, most).next_multiple_of(ENTRIES_SENT);
        shared_bytes = capacity * ENTRY_COUNT_BYTES;
    }
    let launch = KernelPlan {
        kernel,
        grid: [blocks, 1, 1],
        block,
        shared_bytes,
    };
    GroupPlan { launch, capacity }
}
