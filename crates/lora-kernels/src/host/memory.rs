//! The host backend's memory: every address a launch names is looked up here before it is touched.

use super::Capacity;
use crate::{KernelError, Operand};
use bytemuck::Pod;
use lora_weights::device::{DevicePtr, MemoryError, MemoryInfo};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;

/// Alignment of allocations, that of a CUDA device.
const ALIGN: u64 = 256;

/// One live allocation.
struct Block {
    raw: NonNull<u8>,
    layout: Layout,
    /// First aligned byte in it.
    start: NonNull<u8>,
    bytes: u64,
}

/// All live allocations. Whoever holds it has all of their bytes to itself.
pub(super) struct Arena {
    blocks: BTreeMap<u64, Block>,
    used: u64,
    capacity: Capacity,
}

// SAFETY: the pointers are to allocations that the arena owns, and only reachable through it.
unsafe impl Send for Arena {}

/// `T`s in one allocation, checked when it was made. To use it, the arena that made it must still be held, by this thread or by one that waits for
/// this thread.
#[derive(Debug)]
pub(super) struct Span<T> {
    ptr: NonNull<T>,
    len: usize,
}

impl<T> Clone for Span<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Span<T> {}

// SAFETY: a span is an address and a length; reading and writing through it is unsafe and says what must hold.
unsafe impl<T: Pod> Send for Span<T> {}
// SAFETY: a shared span gives no access that an owned one does not; reading and writing stay unsafe.
unsafe impl<T: Pod> Sync for Span<T> {}

impl<T: Pod> Span<T> {
    /// Its first address.
    pub(super) fn address(self) -> u64 {
        self.ptr.as_ptr() as u64
    }

    /// Its length in bytes.
    pub(super) fn bytes(self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }

    /// The elements of `range`.
    ///
    /// # Safety
    /// The arena that made the span is held, and nothing writes these elements, for all of `'a`.
    ///
    /// # Panics
    /// If the range leaves the span.
    #[inline(always)]
    pub(super) unsafe fn read<'a>(self, range: Range<usize>) -> &'a [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in the span, so in one live allocation, aligned and initialised (zeroed or written as `Pod`); unwritten by the caller's word.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().add(range.start), range.len()) }
    }

    /// The elements of `range`, to write.
    ///
    /// # Safety
    /// The arena that made the span is held, and nothing else reads or writes these elements, for all of `'a`.
    ///
    /// # Panics
    /// If the range leaves the span.
    #[inline(always)]
    pub(super) unsafe fn write<'a>(self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: as in `read`; nobody else's by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().add(range.start), range.len()) }
    }
}

impl Arena {
    pub(super) fn new(capacity: Capacity) -> Self {
        Self {
            blocks: BTreeMap::new(),
            used: 0,
            capacity,
        }
    }

    pub(super) fn info(&self) -> MemoryInfo {
        self.capacity.info(self.used)
    }

    pub(super) fn alloc_zeroed(&mut self, bytes: u64) -> Result<DevicePtr, MemoryError> {
        if bytes == 0 {
            return Ok(DevicePtr::NULL);
        }
        let free = self.info().free;
        let refused = MemoryError::OutOfMemory {
            requested: bytes,
            free,
        };
        if bytes > free {
            return Err(refused);
        }
        // Room to align inside: asking the system for the alignment itself would make it write the zeros, page by page, at once.
        let layout = bytes
            .checked_add(ALIGN)
            .and_then(|size| usize::try_from(size).ok())
            .and_then(|size| Layout::from_size_align(size, align_of::<u128>()).ok());
        let Some(layout) = layout else {
            return Err(refused);
        };
        // SAFETY: the layout's size is at least ALIGN, so not zero.
        let Some(raw) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            return Err(refused);
        };
        let shift = raw.as_ptr().align_offset(ALIGN as usize);
        // SAFETY: the shift is less than ALIGN, by which the allocation is longer than what is handed out.
        let start = unsafe { raw.add(shift) };
        let address = start.as_ptr() as u64;
        self.used += bytes;
        self.blocks.insert(
            address,
            Block {
                raw,
                layout,
                start,
                bytes,
            },
        );
        Ok(DevicePtr(address))
    }

    pub(super) fn free(&mut self, ptr: DevicePtr) -> Result<(), MemoryError> {
        if ptr.is_null() {
            return Ok(());
        }
        let Some(block) = self.blocks.remove(&ptr.0) else {
            return Err(MemoryError::OutOfBounds { ptr, bytes: 0 });
        };
        self.used -= block.bytes;
        block.free();
        Ok(())
    }

    /// `bytes` bytes at `ptr`, if they are in one allocation.
    fn find(&self, ptr: DevicePtr, bytes: u64) -> Option<NonNull<u8>> {
        let (&base, block) = self.blocks.range(..=ptr.0).next_back()?;
        let offset = ptr.0 - base;
        if offset.checked_add(bytes)? > block.bytes {
            return None;
        }
        // SAFETY: the offset is inside the block, or one past its end where `bytes` is 0.
        Some(unsafe { block.start.add(offset as usize) })
    }

    /// The bytes from `ptr` on, to copy to or from.
    pub(super) fn bytes(&self, ptr: DevicePtr, len: usize) -> Result<&[u8], MemoryError> {
        let start = self.located(ptr, len)?;
        // SAFETY: `len` bytes of a live allocation, initialised by `alloc_zeroed`. Nothing writes them: writing takes the arena exclusively, or a span whose user
        // vouches that nothing reads.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) })
    }

    /// The bytes from `ptr` on, to write.
    pub(super) fn bytes_mut(
        &mut self,
        ptr: DevicePtr,
        len: usize,
    ) -> Result<&mut [u8], MemoryError> {
        let start = self.located(ptr, len)?;
        // SAFETY: as in `bytes`, and the arena is held exclusively.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) })
    }

    /// Refuses a range that is not in one allocation.
    pub(super) fn check(&self, ptr: DevicePtr, len: usize) -> Result<(), MemoryError> {
        self.located(ptr, len).map(|_| ())
    }

    fn located(&self, ptr: DevicePtr, len: usize) -> Result<NonNull<u8>, MemoryError> {
        if len == 0 {
            return Ok(NonNull::dangling());
        }
        self.find(ptr, len as u64).ok_or(MemoryError::OutOfBounds {
            ptr,
            bytes: len as u64,
        })
    }

    /// `len` elements at `ptr`, for tasks that run on several threads.
    pub(super) fn span<T: Pod>(
        &self,
        operand: Operand,
        ptr: u64,
        len: u64,
    ) -> Result<Span<T>, KernelError> {
        let ptr = DevicePtr(ptr);
        KernelError::check_ptr(operand, ptr, align_of::<T>() as u64)?;
        let bytes = len.saturating_mul(size_of::<T>() as u64);
        let start = self.find(ptr, bytes);
        start.map_or(
            Err(KernelError::OutsideAllocation {
                operand,
                ptr,
                bytes,
            }),
            |start| {
                Ok(Span {
                    ptr: start.cast(),
                    len: len as usize,
                })
            },
        )
    }

    /// `len` elements at `ptr`, to read now.
    pub(super) fn list<T: Pod>(
        &self,
        operand: Operand,
        ptr: u64,
        len: u64,
    ) -> Result<&[T], KernelError> {
        let span = self.span(operand, ptr, len)?;
        // SAFETY: the arena is held while it is borrowed. Nothing writes: see `bytes`.
        Ok(unsafe { span.read(0..span.len) })
    }

    /// Writes `values` to `ptr`.
    pub(super) fn store<T: Pod>(
        &mut self,
        operand: Operand,
        ptr: u64,
        values: &[T],
    ) -> Result<(), KernelError> {
        let span = self.span(operand, ptr, values.len() as u64)?;
        // SAFETY: the arena is held exclusively.
        unsafe { span.write(0..span.len) }.copy_from_slice(values);
        Ok(())
    }
}

impl Block {
    fn free(self) {
        // SAFETY: `raw` came from `alloc_zeroed` with this layout, and the block is consumed.
        unsafe { dealloc(self.raw.as_ptr(), self.layout) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        std::mem::take(&mut self.blocks)
            .into_values()
            .for_each(Block::free);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const X: Operand = Operand::shared("x");

    fn arena(limit: u64) -> Arena {
        Arena::new(Capacity::Limit(limit))
    }

    #[test]
    fn allocations_are_aligned_zeroed_and_counted() {
        let mut arena = arena(10_000);
        let a = arena.alloc_zeroed(300).unwrap();
        let b = arena.alloc_zeroed(1).unwrap();
        assert!(a.0.is_multiple_of(ALIGN) && b.0.is_multiple_of(ALIGN));
        assert_eq!(arena.bytes(a, 300).unwrap(), [0; 300]);
        assert_eq!(arena.info().free, 10_000 - 301);
        arena.free(a).unwrap();
        assert_eq!(arena.info().free, 10_000 - 1);
    }

    #[test]
    fn more_than_is_free_is_refused_with_both_numbers() {
        let mut arena = arena(1000);
        arena.alloc_zeroed(600).unwrap();
        for requested in [401, u64::MAX] {
            let error = arena.alloc_zeroed(requested).unwrap_err();
            assert_eq!(
                error,
                MemoryError::OutOfMemory {
                    requested,
                    free: 400
                }
            );
        }
    }

    #[test]
    fn ranges_outside_one_allocation_are_refused() {
        let mut arena = arena(10_000);
        let a = arena.alloc_zeroed(64).unwrap();
        assert!(arena.span::<u32>(X, a.0, 16).is_ok());
        for (ptr, len) in [
            (a.0, 17),
            (a.0 + 4, 16),
            (a.0 - 4, 1),
            (a.0 + 64, 1),
            (a.0, u64::MAX),
        ] {
            let error = arena.span::<u32>(X, ptr, len).unwrap_err();
            assert!(
                matches!(error, KernelError::OutsideAllocation { .. }),
                "{error}"
            );
        }
        assert!(matches!(
            arena.span::<u32>(X, a.0 + 2, 1).unwrap_err(),
            KernelError::Misaligned { .. }
        ));
        assert!(matches!(
            arena.span::<u32>(X, 0, 1).unwrap_err(),
            KernelError::Null { .. }
        ));
    }

    #[test]
    fn freeing_what_was_not_allocated_is_refused() {
        let mut arena = arena(10_000);
        let a = arena.alloc_zeroed(64).unwrap();
        assert!(arena.free(DevicePtr(a.0 + 16)).is_err());
        arena.free(DevicePtr::NULL).unwrap();
        arena.free(a).unwrap();
        assert!(arena.free(a).is_err());
        assert!(arena.bytes(a, 1).is_err());
    }

    #[test]
    fn no_bytes_are_null() {
        assert_eq!(arena(0).alloc_zeroed(0).unwrap(), DevicePtr::NULL);
    }
}
