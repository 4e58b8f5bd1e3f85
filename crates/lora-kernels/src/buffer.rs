//! An owned piece of device memory.

use crate::view::{ELEMENT, F32_ELEMENT};
use crate::{
    ExpertIds, F32MatMut, KernelError, MatMut, MatRef, Operand, ResidentOfSlot, RowIndices,
    RowSlots, TokenAdapters, TokenIds,
};
use bytemuck::Pod;
use lora_weights::device::{DeviceMemory, DevicePtr, MemoryError};
use std::fmt;
use std::sync::Arc;

const BUFFER: Operand = Operand::shared("device buffer");

/// A zeroed allocation on a backend, freed on drop. Views of it are safe to make because they borrow it.
///
/// The caller still orders device work: a buffer must outlive, and a read back must come after, the launches that use it
/// ([`LoraBackend::synchronize`](crate::LoraBackend::synchronize)).
///
/// ```
/// use half::bf16;
/// use lora_kernels::{DeviceBuffer, host::HostBackend};
/// use std::sync::Arc;
///
/// let backend = Arc::new(HostBackend::new());
/// let mut buffer = DeviceBuffer::from_slice(backend, &[bf16::ONE; 6])?;
/// let out = buffer.mat_mut(2, 3, 3)?;
/// assert_eq!((out.rows(), out.cols()), (2, 3));
/// assert_eq!(buffer.download::<bf16>(4, 2)?, [bf16::ONE; 2]);
/// # Ok::<(), lora_kernels::KernelError>(())
/// ```
pub struct DeviceBuffer {
    memory: Arc<dyn DeviceMemory>,
    ptr: DevicePtr,
    bytes: u64,
}

impl DeviceBuffer {
    /// `bytes` zeroed bytes. Zero bytes is legal.
    ///
    /// # Errors
    /// What [`DeviceMemory::alloc_zeroed`] gives.
    pub fn zeroed(memory: Arc<dyn DeviceMemory>, bytes: u64) -> Result<Self, KernelError> {
        let ptr = memory.alloc_zeroed(bytes)?;
        Ok(Self { memory, ptr, bytes })
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// What allocation and upload give.
    pub fn from_slice<T: Pod>(
        memory: Arc<dyn DeviceMemory>,
        values: &[T],
    ) -> Result<Self, KernelError> {
        let mut buffer = Self::zeroed(memory, size_of_val(values) as u64)?;
        buffer.upload(0, values)?;
        Ok(buffer)
    }

    /// Address of the first byte; null for an empty buffer.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The memory it was allocated from.
    pub fn memory(&self) -> &Arc<dyn DeviceMemory> {
        &self.memory
    }

    /// Writes `values` from element `first` on, blocking.
    ///
    /// # Errors
    /// [`KernelError::ViewOutside`] if they do not fit; what the upload gives.
    pub fn upload<T: Pod>(&mut self, first: usize, values: &[T]) -> Result<(), KernelError> {
        let dst = self.at::<T>(first, values.len())?;
        Ok(self
            .memory
            .upload_blocking(dst, bytemuck::cast_slice(values))?)
    }

    /// Reads `len` elements from element `first` on, blocking.
    ///
    /// # Errors
    /// [`KernelError::ViewOutside`] if there are fewer; what the download gives.
    pub fn download<T: Pod>(&self, first: usize, len: usize) -> Result<Vec<T>, KernelError> {
        let src = self.at::<T>(first, len)?;
        let mut values = vec![T::zeroed(); len];
        if len > 0 {
            self.memory
                .download(src, bytemuck::cast_slice_mut(&mut values))?;
        }
        Ok(values)
    }

    /// A BF16 matrix from the first element on.
    ///
    /// # Errors
    /// [`KernelError::ViewOutside`] if it is larger than the buffer; [`KernelError::StrideTooSmall`].
    pub fn mat(
        &self,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<MatRef<'_>, KernelError> {
        let ptr = self.matrix((rows, cols), row_stride, ELEMENT)?;
        // SAFETY: the view is inside this allocation, which the borrow keeps alive and unwritten.
        unsafe { MatRef::from_raw(ptr, rows, cols, row_stride) }
    }

    /// A BF16 matrix from the first element on, to update.
    ///
    /// # Errors
    /// As [`mat`](Self::mat).
    pub fn mat_mut(
        &mut self,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<MatMut<'_>, KernelError> {
        let ptr = self.matrix((rows, cols), row_stride, ELEMENT)?;
        // SAFETY: the view is inside this allocation, which the borrow keeps alive and to itself.
        unsafe { MatMut::from_raw(ptr, rows, cols, row_stride) }
    }

    /// An FP32 matrix from the first element on, to write.
    ///
    /// # Errors
    /// As [`mat`](Self::mat).
    pub fn f32_mat_mut(
        &mut self,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<F32MatMut<'_>, KernelError> {
        let ptr = self.matrix((rows, cols), row_stride, F32_ELEMENT)?;
        // SAFETY: the view is inside this allocation, which the borrow keeps alive and to itself.
        unsafe { F32MatMut::from_raw(ptr, rows, cols, row_stride) }
    }

    /// The first `len` elements as an `i32` list.
    ///
    /// # Errors
    /// [`KernelError::ViewOutside`] if there are fewer.
    pub fn row_slots(&self, len: usize) -> Result<RowSlots<'_>, KernelError> {
        let ptr = self.at::<i32>(0, len)?;
        // SAFETY: the view is inside this allocation, which the borrow keeps alive and unwritten.
        unsafe { RowSlots::from_raw(ptr, len) }
    }

    /// The first `len` elements as a `u32` list.
    ///
    /// # Errors
    /// [`KernelError::ViewOutside`] if there are fewer.
    pub fn row_indices(&self, len: usize) -> Result<RowIndices<'_>, KernelError> {
        let ptr = self.at::<u32>(0, len)?;
        // SAFETY: the view is inside this allocation, which the borrow keeps alive and unwritten.
        unsafe { RowIndices::from_raw(ptr, len) }
    }

    /// The first `len` elements as tokens.
    ///
    /// # Errors
    /// [`KernelError::ViewOutside`] if there are fewer.
    pub fn token_ids(&self, len: usize) -> Result<TokenIds<'_>, KernelError> {
        let ptr = self.at::<i32>(0, len)?;
        // SAFETY: the view is inside this allocation, which the borrow keeps alive and unwritten.
        unsafe { TokenIds::from_raw(ptr, len) }
    }

    /// The first `len` elements as expert numbers.
    ///
    /// # Errors
    /// [`KernelError::ViewOutside`] if there are fewer.
    pub fn expert_ids(&self, len: usize) -> Result<ExpertIds<'_>, KernelError> {
        let ptr = self.at::<i32>(0, len)?;
        // SAFETY: the view is inside this allocation, which the borrow keeps alive and unwritten.
        unsafe { ExpertIds::from_raw(ptr, len) }
    }

    /// The first `len` elements as adapter slots of tokens.
    ///
    /// # Errors
    /// [`KernelError::ViewOutside`] if there are fewer.
    pub fn token_adapters(&self, len: usize) -> Result<TokenAdapters<'_>, KernelError> {
        let ptr = self.at::<i32>(0, len)?;
        // SAFETY: the view is inside this allocation, which the borrow keeps alive and unwritten.
        unsafe { TokenAdapters::from_raw(ptr, len) }
    }

    /// The first `len` elements as resident numbers of slots.
    ///
    /// # Errors
    /// [`KernelError::ViewOutside`] if there are fewer.
    pub fn resident_of_slot(&self, len: usize) -> Result<ResidentOfSlot<'_>, KernelError> {
        let ptr = self.at::<i32>(0, len)?;
        // SAFETY: the view is inside this allocation, which the borrow keeps alive and unwritten.
        unsafe { ResidentOfSlot::from_raw(ptr, len) }
    }

    fn matrix(
        &self,
        (rows, cols): (usize, usize),
        row_stride: usize,
        element: u64,
    ) -> Result<DevicePtr, KernelError> {
        let elements = match (rows, cols) {
            (0, _) | (_, 0) => 0,
            _ => (rows as u128 - 1) * row_stride as u128 + cols as u128,
        };
        self.check(elements.saturating_mul(element.into()))?;
        Ok(self.ptr)
    }

    fn at<T>(&self, first: usize, len: usize) -> Result<DevicePtr, KernelError> {
        let size = size_of::<T>() as u128;
        self.check((first as u128 + len as u128).saturating_mul(size))?;
        Ok(self.ptr.offset(first as u64 * size as u64))
    }

    fn check(&self, end: u128) -> Result<(), KernelError> {
        let available = u128::from(self.bytes);
        if end > available {
            return Err(KernelError::ViewOutside {
                operand: BUFFER,
                end,
                available,
            });
        }
        Ok(())
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let freed: Result<(), MemoryError> = self.memory.free(self.ptr);
        if let Err(error) = freed {
            tracing::error!(%error, "a device buffer could not be freed");
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("ptr", &self.ptr)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}
