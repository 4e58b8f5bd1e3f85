//! Largest sizes that launches take. What kernels share with Rust stands in `params.rs`.

/// Largest rank, true or padded.
pub const MAX_RANK: u32 = 512;

/// Largest width of x and of out.
pub const MAX_WIDTH: u32 = 1 << 20;

/// Alignment of A and B in bytes: kernels load 16 bytes at a time.
pub const PAIR_ALIGN: u64 = 16;

/// Most entries that a table or a grouping can have: 4096 slots of a dense module, or (slot, expert) pairs up to 4096 x 512.
pub const MAX_ENTRIES: u32 = 4096 * 512;

/// Most rows of a launch or a grouping.
pub const MAX_ROWS: u32 = 1 << 24;
