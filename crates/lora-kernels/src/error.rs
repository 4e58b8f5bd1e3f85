use crate::cuda::CudaError;
use lora_weights::device::{DevicePtr, MemoryError};
use std::fmt;

/// What an address handed to a launch stands for, as errors name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Operand {
    name: &'static str,
    site: Option<u32>,
}

impl Operand {
    /// An operand that all sites of a launch share: `x`, `tiles`, ...
    pub const fn shared(name: &'static str) -> Self {
        Self { name, site: None }
    }

    /// An operand of one site, counted from 0 in the order the caller gave them.
    pub const fn of_site(name: &'static str, site: u32) -> Self {
        Self {
            name,
            site: Some(site),
        }
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.site {
            Some(site) => write!(f, "{} of site {site}", self.name),
            None => f.write_str(self.name),
        }
    }
}

/// Why a view, a buffer, a plan or a launch was refused. A refused launch has written nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Device memory refused.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// CUDA cannot be used, or refused a call.
    #[error(transparent)]
    Cuda(#[from] CudaError),

    /// A size outside what kernels support.
    #[error("{operand}: {quantity} is {value}, supported is {min}..={max}")]
    OutOfRange {
        /// Whose size.
        operand: Operand,
        /// Which size: `rank`, `k_in`, `n_out`, `rows`, ...
        quantity: &'static str,
        /// Its value.
        value: u64,
        /// Smallest supported value.
        min: u64,
        /// Largest supported value.
        max: u64,
    },

    /// Two sizes that must agree do not.
    #[error("{operand}: {quantity} is {found}, but {expected} is needed to match {source_of_size}")]
    SizeMismatch {
        /// Whose size.
        operand: Operand,
        /// Which size.
        quantity: &'static str,
        /// Its value.
        found: u64,
        /// The value that the other side has.
        expected: u64,
        /// The other side.
        source_of_size: &'static str,
    },

    /// A padded rank that is no multiple of the rank granule.
    #[error(
        "{operand}: padded rank {max_rank} is no multiple of {granule}; pack to lora_weights::padded_rank"
    )]
    UnpaddedRank {
        /// Whose rank.
        operand: Operand,
        /// The padded rank given.
        max_rank: u32,
        /// The rank granule.
        granule: u32,
    },

    /// Rows closer together than they are wide.
    #[error("{operand}: row stride {stride} is less than the {cols} columns of a row")]
    StrideTooSmall {
        /// Which matrix.
        operand: Operand,
        /// Elements from one row to the next.
        stride: u64,
        /// Columns.
        cols: u64,
    },

    /// An address that does not have the alignment kernels load with.
    #[error("{operand}: address {ptr} is not aligned to {align} bytes")]
    Misaligned {
        /// Which address.
        operand: Operand,
        /// The address.
        ptr: DevicePtr,
        /// Needed alignment in bytes.
        align: u64,
    },

    /// A null address where a launch needs memory.
    #[error("{operand}: the address is null")]
    Null {
        /// Which address.
        operand: Operand,
    },

    /// A view that ends outside the buffer it is made of, or outside the address space.
    #[error("{operand}: the view ends at byte {end} of {available}")]
    ViewOutside {
        /// Which view.
        operand: Operand,
        /// One past the view's last byte, counted from the start of the buffer (or address 0).
        end: u128,
        /// Bytes of the buffer (or of the address space).
        available: u128,
    },

    /// A launch would read or write elements that another of its operands writes.
    #[error("{first} and {second} overlap: what one writes the other would see or write too")]
    Overlap {
        /// One operand.
        first: Operand,
        /// The other.
        second: Operand,
    },

    /// Scratch that cannot hold even one pass of this launch.
    #[error(
        "scratch has {available} bytes, one pass of {rows} rows needs {needed}: size it by \
         ScratchSpec for this rank, width and number of sites"
    )]
    ScratchTooSmall {
        /// Bytes a pass needs.
        needed: u64,
        /// Bytes there are.
        available: u64,
        /// Rows of the smallest pass.
        rows: u32,
    },

    /// More rows than a row grouping was sized for.
    #[error("{rows} rows, but the row groups were sized for {capacity}")]
    TooManyRows {
        /// Rows given.
        rows: u64,
        /// Rows there is room for.
        capacity: u32,
    },

    /// A row that names a table entry which does not exist; only host builders can see it before upload.
    #[error("row {row} names slot {slot}, the tables have {entries} entries (negative = no delta)")]
    SlotOutOfRange {
        /// Row.
        row: u32,
        /// What it names.
        slot: i32,
        /// Entries there are.
        entries: u32,
    },

    /// An address range outside every allocation of the host backend.
    #[error("{operand}: {bytes} bytes at {ptr} are in no allocation of this backend")]
    OutsideAllocation {
        /// What the range stands for.
        operand: Operand,
        /// First address.
        ptr: DevicePtr,
        /// Bytes.
        bytes: u64,
    },

    /// Device data (a tile, a permutation, a row map, a rank table) that leads outside its operands.
    #[error("{operand}: entry {index} is {value}, the limit is {limit}")]
    BadIndex {
        /// Which list.
        operand: Operand,
        /// Which of its entries.
        index: u64,
        /// What it holds.
        value: u64,
        /// Values from here on are bad.
        limit: u64,
    },

    /// A tile whose permutation names one row of out twice.
    #[error("the permutation names row {row} twice in one tile")]
    RepeatedRow {
        /// Row of out.
        row: u32,
    },

    /// The host backend's worker threads could not be started.
    #[error("cannot start worker thread {index}: {detail}")]
    Thread {
        /// Which worker.
        index: usize,
        /// The system's own words.
        detail: String,
    },

    /// A SIMD level that this CPU does not have was asked for.
    #[error("this CPU has no {level:?}: the best it has is {best:?}")]
    NoSimd {
        /// What was asked for.
        level: crate::host::SimdLevel,
        /// What there is.
        best: crate::host::SimdLevel,
    },
}

impl KernelError {
    /// [`KernelError::OutOfRange`] unless `value` is in `min..=max`.
    pub(crate) fn check_range(
        operand: Operand,
        quantity: &'static str,
        value: u64,
        (min, max): (u64, u64),
    ) -> Result<(), Self> {
        if (min..=max).contains(&value) {
            return Ok(());
        }
        Err(Self::OutOfRange {
            operand,
            quantity,
            value,
            min,
            max,
        })
    }

    /// [`KernelError::Null`] or [`KernelError::Misaligned`] unless `ptr` can be loaded from in units of `align` bytes.
    pub(crate) fn check_ptr(operand: Operand, ptr: DevicePtr, align: u64) -> Result<(), Self> {
        if ptr.is_null() {
            return Err(Self::Null { operand });
        }
        if !ptr.0.is_multiple_of(align) {
            return Err(Self::Misaligned {
                operand,
                ptr,
                align,
            });
        }
        Ok(())
    }
}
