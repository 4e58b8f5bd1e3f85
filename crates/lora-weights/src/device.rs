//! Device memory as this workspace sees it: addresses, the [`DeviceMemory`] trait, and the plain values
//! ([`LoraPair`], [`LoraRoute`]) that packed adapters are handed to launchers as. Free of PEFT.

use std::fmt;

/// An address in device memory (or in the host backend's own allocations). 0 is null.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The null address.
    pub const NULL: Self = Self(0);

    /// True for address 0.
    pub fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` further on.
    ///
    /// # Panics
    /// On overflow of the 64-bit address.
    pub fn offset(self, bytes: u64) -> Self {
        Self(
            self.0
                .checked_add(bytes)
                .expect("device address overflows 64 bits"),
        )
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Why device memory could not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The device has not that much memory free.
    #[error("device memory: {requested} bytes asked for, {free} free")]
    OutOfMemory {
        /// Bytes asked for.
        requested: u64,
        /// Bytes free.
        free: u64,
    },
    /// An address range that is in no live allocation.
    #[error("device memory: {bytes} bytes at {ptr} are outside every allocation")]
    OutOfBounds {
        /// First address.
        ptr: DevicePtr,
        /// Length of the range.
        bytes: u64,
    },
    /// A copy whose rows leave the staging buffer or overlap in the destination.
    #[error("device memory: copy of {rows} rows of {row_bytes} bytes does not fit its {side}")]
    BadCopy {
        /// Rows of the copy.
        rows: u64,
        /// Bytes a row.
        row_bytes: u64,
        /// `source` or `destination`.
        side: &'static str,
    },
    /// The driver refused.
    #[error("device memory: {operation} failed: {detail}")]
    Driver {
        /// What was asked of the driver.
        operation: &'static str,
        /// The driver's own words.
        detail: String,
    },
}

/// Free and total bytes of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free now.
    pub free: u64,
    /// Total.
    pub total: u64,
}

/// Host memory that uploads read from: pinned where the backend has pinned memory.
pub trait StagingBuffer: Send {
    /// The bytes, zero when new, at an address that is a multiple of 8.
    fn bytes(&self) -> &[u8];
    /// The same bytes, to fill.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// One strided copy out of a staging buffer: `rows` rows of `row_bytes` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UploadCopy {
    /// First byte in the staging buffer.
    pub src_offset: usize,
    /// Bytes from one source row to the next.
    pub src_stride: usize,
    /// First destination address.
    pub dst: DevicePtr,
    /// Bytes from one destination row to the next.
    pub dst_stride: usize,
    /// Bytes a row.
    pub row_bytes: usize,
    /// Rows.
    pub rows: usize,
}

impl UploadCopy {
    /// One contiguous run.
    pub fn contiguous(src_offset: usize, dst: DevicePtr, bytes: usize) -> Self {
        Self {
            src_offset,
            src_stride: bytes,
            dst,
            dst_stride: bytes,
            row_bytes: bytes,
            rows: 1,
        }
    }

    /// Each row: where it begins in the staging buffer, and its destination.
    pub fn row_starts(&self) -> impl Iterator<Item = (usize, DevicePtr)> {
        let Self {
            src_offset,
            src_stride,
            dst,
            dst_stride,
            rows,
            ..
        } = *self;
        (0..rows).map(move |row| {
            let dst = dst.offset((row * dst_stride) as u64);
            (src_offset + row * src_stride, dst)
        })
    }
}

/// Staging memory in plain host memory, for implementations that have none better.
#[derive(Debug)]
pub struct HostStaging {
    /// 64-bit words, so that the bytes are aligned as the trait promises.
    words: Vec<u64>,
    bytes: usize,
}

impl HostStaging {
    /// `bytes` zeroed bytes.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`] where the host has not that much.
    pub fn zeroed(bytes: usize) -> Result<Self, MemoryError> {
        Self::reusing(Vec::new(), bytes)
    }

    /// `bytes` zeroed bytes in an allocation that is there already, grown where it is too small.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn reusing(mut words: Vec<u64>, bytes: usize) -> Result<Self, MemoryError> {
        let needed = bytes.div_ceil(size_of::<u64>());
        words.clear();
        words
            .try_reserve_exact(needed)
            .map_err(|_| MemoryError::OutOfMemory {
                requested: bytes as u64,
                free: 0,
            })?;
        words.resize(needed, 0);
        Ok(Self { words, bytes })
    }

    /// The allocation, to be reused.
    pub fn into_words(self) -> Vec<u64> {
        self.words
    }
}

impl StagingBuffer for HostStaging {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }
}

/// An upload under way. Dropping it without waiting waits first, so that the staging memory outlives the copy.
pub trait Completion: Send {
    /// True once every copy has landed. Never blocks.
    fn is_done(&self) -> Result<bool, MemoryError>;
    /// Blocks until every copy has landed and gives the staging buffer back.
    fn wait(self: Box<Self>) -> Result<Box<dyn StagingBuffer>, MemoryError>;
    /// The driver's event handle (`CUevent` as an integer) that other streams can wait on; `None` where the
    /// backend has none.
    fn event(&self) -> Option<u64> {
        None
    }
}

/// An upload that has already happened, for implementations whose copies are done when they return.
pub struct Landed(pub Box<dyn StagingBuffer>);

impl Completion for Landed {
    fn is_done(&self) -> Result<bool, MemoryError> {
        Ok(true)
    }

    fn wait(self: Box<Self>) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        Ok(self.0)
    }
}

/// The only way this crate reaches memory that kernels read.
///
/// Uploads run on streams of the implementation's own, so that launches on an engine's streams never wait for them; a
/// small one (row maps, table entries) does not wait for a large one (a slot image) that was started before it. What an upload
/// wrote is visible to launches enqueued after its [`Completion`] is done.
pub trait DeviceMemory: Send + Sync {
    /// `bytes` zeroed bytes, 256-byte aligned, at an address fixed until [`free`](Self::free). Zero bytes is legal and gives null.
    /// Waits for no launch: adapters with parts beside the pool allocate while others serve.
    fn alloc_zeroed(&self, bytes: u64) -> Result<DevicePtr, MemoryError>;

    /// [`alloc_zeroed`](Self::alloc_zeroed) for memory that lives as long as the pool and is allocated before anything is served: it
    /// may wait for the device, and comes from the allocator that an engine can register with a network card.
    fn alloc_resident(&self, bytes: u64) -> Result<DevicePtr, MemoryError> {
        self.alloc_zeroed(bytes)
    }

    /// Gives an allocation back, without waiting for launches unless it is a resident one. `ptr` must be what an allocation
    /// returned; null is a no-op. The caller makes sure that no launch still reads it.
    fn free(&self, ptr: DevicePtr) -> Result<(), MemoryError>;

    /// Free and total bytes now.
    fn memory_info(&self) -> Result<MemoryInfo, MemoryError>;

    /// A zeroed staging buffer of `bytes` bytes.
    fn stage(&self, bytes: usize) -> Result<Box<dyn StagingBuffer>, MemoryError>;

    /// Frees staging buffers that are kept for reuse, if any are.
    fn trim_staging(&self) {}

    /// Starts `copies` out of `source`, in order. On an error nothing is known of the destination's contents.
    fn upload(
        &self,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError>;

    /// Copies device bytes back, blocking: for reports and tests.
    fn download(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), MemoryError>;

    /// Stages, uploads and waits: for small, rare writes.
    fn upload_blocking(&self, dst: DevicePtr, src: &[u8]) -> Result<(), MemoryError> {
        if src.is_empty() {
            return Ok(());
        }
        let mut staging = self.stage(src.len())?;
        staging.bytes_mut().copy_from_slice(src);
        self.upload(staging, &[UploadCopy::contiguous(0, dst, src.len())])?
            .wait()?;
        Ok(())
    }
}

/// One packed adapter on one module: A is `[max_rank, k_in]`, B `[n_out, max_rank]`, both BF16 and row-major; rows of A and
/// columns of B at and past `rank` are zero. Of a pair that lies in a pool, `max_rank` is [`padded_rank`](crate::padded_rank) of its own rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoraPair {
    /// Address of A, 16-byte aligned.
    pub a: DevicePtr,
    /// Address of B, 16-byte aligned.
    pub b: DevicePtr,
    /// True rank.
    pub rank: u32,
    /// Columns of A: width of x.
    pub k_in: u32,
    /// Rows of B: width of out.
    pub n_out: u32,
    /// FP32 scale, never folded into B.
    pub scale: f32,
    /// Padded rank: rows of A, and B's row stride in elements.
    pub max_rank: u32,
}

/// The per-slot tables of one (layer, module), each `[slots]` long at an address fixed for life.
///
/// An entry's rows of B lie [`padded_rank`](crate::padded_rank) of its own true rank apart, whatever `max_rank` is: a small adapter in a pool
/// for large ones costs the bytes of a small adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoraRoute {
    /// u64 addresses of A; 0 = the slot does not adapt this module.
    pub a_table: DevicePtr,
    /// u64 addresses of B.
    pub b_table: DevicePtr,
    /// f32 scales; 0.0 = unused slot.
    pub scale_table: DevicePtr,
    /// u32 true ranks.
    pub rank_table: DevicePtr,
    /// Entries of each table.
    pub slots: u32,
    /// Width of x.
    pub k_in: u32,
    /// Width of out.
    pub n_out: u32,
    /// Largest padded rank that an entry may have.
    pub max_rank: u32,
}
