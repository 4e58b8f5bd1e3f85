//! Staging buffers of plain memory, recycled, and the copies out of them.

use super::memory::Arena;
use lora_weights::device::{HostStaging, MemoryError, StagingBuffer, UploadCopy};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// Buffers kept for reuse at most.
const KEPT: usize = 4;

/// Bytes copied while the memory is locked, so that launches do not wait long for an upload to other addresses.
const PIECE: usize = 256 << 10;

/// Buffers that came back. 64-bit words, so that what is staged can be viewed as any element type.
#[derive(Debug, Default)]
pub(super) struct StagingPool {
    kept: Mutex<Vec<Vec<u64>>>,
}

impl StagingPool {
    /// A zeroed buffer of `bytes` bytes, 8-byte aligned.
    pub(super) fn stage(
        self: &Arc<Self>,
        bytes: usize,
    ) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        let words = self.take(bytes.div_ceil(size_of::<u64>()));
        Ok(Box::new(Recycled {
            staging: Some(HostStaging::reusing(words, bytes)?),
            home: Arc::downgrade(self),
        }))
    }

    /// The smallest kept buffer that holds `words` and is not mostly too large for them.
    fn take(&self, words: usize) -> Vec<u64> {
        let mut kept = self.kept.lock();
        let fitting = kept
            .iter()
            .enumerate()
            .filter(|(_, buffer)| (words..=2 * words.max(512)).contains(&buffer.capacity()))
            .min_by_key(|(_, buffer)| buffer.capacity());
        match fitting.map(|(index, _)| index) {
            Some(index) => kept.swap_remove(index),
            None => Vec::new(),
        }
    }

    pub(super) fn trim(&self) {
        self.kept.lock().clear();
    }

    fn put_back(&self, buffer: Vec<u64>) {
        let mut kept = self.kept.lock();
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push(buffer);
    }
}

struct Recycled {
    /// There until it is dropped.
    staging: Option<HostStaging>,
    home: Weak<StagingPool>,
}

impl StagingBuffer for Recycled {
    fn bytes(&self) -> &[u8] {
        self.staging.as_ref().map_or(&[], HostStaging::bytes)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.staging
            .as_mut()
            .map_or(&mut [], HostStaging::bytes_mut)
    }
}

impl Drop for Recycled {
    fn drop(&mut self) {
        if let (Some(home), Some(staging)) = (self.home.upgrade(), self.staging.take()) {
            home.put_back(staging.into_words());
        }
    }
}

/// Runs `copy` piecewise: `lock` is taken anew for each piece, and each piece is checked anew.
pub(super) fn run_copy<G: std::ops::DerefMut<Target = Arena>>(
    source: &[u8],
    copy: &UploadCopy,
    lock: impl Fn() -> G,
) -> Result<(), MemoryError> {
    check_copy(source, copy)?;
    if copy.rows == 0 || copy.row_bytes == 0 {
        return Ok(());
    }
    let mut arena = lock();
    arena.check(copy.dst, extent(copy, copy.dst_stride))?;
    let mut moved = 0;
    for (from, to) in copy.row_starts() {
        for at in (0..copy.row_bytes).step_by(PIECE) {
            let len = PIECE.min(copy.row_bytes - at);
            if moved + len > PIECE {
                drop(arena);
                arena = lock();
                moved = 0;
            }
            let piece = &source[from + at..from + at + len];
            arena
                .bytes_mut(to.offset(at as u64), len)?
                .copy_from_slice(piece);
            moved += len;
        }
    }
    Ok(())
}

/// Refuses rows that leave the source or overlap in the destination.
fn check_copy(source: &[u8], copy: &UploadCopy) -> Result<(), MemoryError> {
    let bad = |side| MemoryError::BadCopy {
        rows: copy.rows as u64,
        row_bytes: copy.row_bytes as u64,
        side,
    };
    if copy.rows == 0 || copy.row_bytes == 0 {
        return Ok(());
    }
    let end = |stride: usize| {
        (copy.rows - 1)
            .checked_mul(stride)
            .and_then(|last| last.checked_add(copy.row_bytes))
    };
    let source_end = end(copy.src_stride).and_then(|bytes| bytes.checked_add(copy.src_offset));
    if source_end.is_none_or(|end| end > source.len()) {
        return Err(bad("source"));
    }
    if (copy.rows > 1 && copy.dst_stride < copy.row_bytes) || end(copy.dst_stride).is_none() {
        return Err(bad("destination"));
    }
    Ok(())
}

/// Bytes from the first to one past the last of a checked copy.
fn extent(copy: &UploadCopy, stride: usize) -> usize {
    (copy.rows - 1) * stride + copy.row_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_zeroed() {
        let pool = Arc::new(StagingPool::default());
        let mut first = pool.stage(1001).unwrap();
        first.bytes_mut().fill(7);
        let address = first.bytes().as_ptr();
        drop(first);
        let second = pool.stage(1000).unwrap();
        assert_eq!(second.bytes().as_ptr(), address, "recycled");
        assert_eq!(second.bytes(), [0; 1000]);
        assert!(pool.stage(0).unwrap().bytes().is_empty());
    }

    #[test]
    fn a_buffer_may_outlive_its_pool() {
        let pool = Arc::new(StagingPool::default());
        let buffer = pool.stage(8).unwrap();
        drop(pool);
        assert_eq!(buffer.bytes(), [0; 8]);
    }

    #[test]
    fn an_impossible_buffer_is_an_error() {
        let pool = Arc::new(StagingPool::default());
        assert!(matches!(
            pool.stage(usize::MAX),
            Err(MemoryError::OutOfMemory { .. })
        ));
    }
}
