//! Typed views of device memory: BF16 matrices with a row stride, and lists of row numbers.

use crate::strided::Strided;
use crate::{KernelError, Operand};
use lora_weights::device::DevicePtr;
use std::marker::PhantomData;
use std::ops::Range;

#[cfg(test)]
mod tests;

/// Bytes of a BF16 element.
pub(crate) const ELEMENT: u64 = 2;

/// Bytes of an FP32 element.
pub(crate) const F32_ELEMENT: u64 = 4;

const MATRIX: Operand = Operand::shared("matrix view");

/// Geometry that all matrix views share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    ptr: DevicePtr,
    rows: usize,
    cols: usize,
    row_stride: usize,
    /// Bytes of an element.
    element: u64,
}

impl Shape {
    fn new(
        ptr: DevicePtr,
        (rows, cols): (usize, usize),
        row_stride: usize,
        element: u64,
    ) -> Result<Self, KernelError> {
        if cols > row_stride {
            return Err(KernelError::StrideTooSmall {
                operand: MATRIX,
                stride: row_stride as u64,
                cols: cols as u64,
            });
        }
        let shape = Self {
            ptr,
            rows,
            cols,
            row_stride,
            element,
        };
        if rows > 0 && cols > 0 {
            KernelError::check_ptr(MATRIX, ptr, element)?;
            let end = shape.extent().saturating_add(ptr.0.into());
            let available = u128::from(u64::MAX);
            if end > available {
                return Err(KernelError::ViewOutside {
                    operand: MATRIX,
                    end,
                    available,
                });
            }
        }
        Ok(shape)
    }

    /// Bytes from the first element to one past the last.
    fn extent(&self) -> u128 {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        let elements = (self.rows as u128 - 1) * self.row_stride as u128 + self.cols as u128;
        elements.saturating_mul(u128::from(self.element))
    }

    fn part(&self, rows: Range<usize>, cols: Range<usize>) -> Result<Self, KernelError> {
        for (quantity, range, size) in [("rows", &rows, self.rows), ("columns", &cols, self.cols)] {
            if range.start > range.end || range.end > size {
                return Err(KernelError::OutOfRange {
                    operand: MATRIX,
                    quantity,
                    value: range.end as u64,
                    min: range.start as u64,
                    max: size as u64,
                });
            }
        }
        // In range of a view whose extent was checked, so neither product nor sum overflows; an empty part keeps the address.
        let ptr = if rows.is_empty() || cols.is_empty() {
            self.ptr
        } else {
            let elements = (rows.start * self.row_stride + cols.start) as u64;
            self.ptr.offset(elements * self.element)
        };
        Ok(Self {
            ptr,
            rows: rows.len(),
            cols: cols.len(),
            ..*self
        })
    }

    fn strided(&self) -> Strided {
        Strided {
            base: self.ptr.0,
            rows: self.rows as u64,
            width: self.cols as u64 * self.element,
            stride: self.row_stride as u64 * self.element,
        }
    }
}

/// A BF16 matrix that kernels read: `rows x cols`, row-major, `row_stride` elements from one row to the next. Zero rows are legal.
///
/// `'a` is the borrow of the memory's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatRef<'a> {
    shape: Shape,
    owner: PhantomData<&'a [u8]>,
}

/// A BF16 matrix that kernels update in place; like [`MatRef`], but the only view of its elements. That is what keeps two sites
/// of one launch from writing the same output: it cannot be copied, and [`split_cols`](Self::split_cols) gives disjoint parts.
#[derive(Debug, PartialEq, Eq)]
pub struct MatMut<'a> {
    shape: Shape,
    owner: PhantomData<&'a mut [u8]>,
}

/// An FP32 matrix that kernels write; otherwise like [`MatMut`].
#[derive(Debug, PartialEq, Eq)]
pub struct F32MatMut<'a> {
    shape: Shape,
    owner: PhantomData<&'a mut [u8]>,
}

macro_rules! geometry {
    () => {
        /// Address of the first element.
        pub fn ptr(&self) -> DevicePtr {
            self.shape.ptr
        }

        /// Rows.
        pub fn rows(&self) -> usize {
            self.shape.rows
        }

        /// Columns.
        pub fn cols(&self) -> usize {
            self.shape.cols
        }

        /// Elements from one row to the next.
        pub fn row_stride(&self) -> usize {
            self.shape.row_stride
        }

        pub(crate) fn strided(&self) -> Strided {
            self.shape.strided()
        }
    };
}

impl<'a> MatRef<'a> {
    geometry!();

    /// A view of memory that an engine owns.
    ///
    /// # Errors
    /// [`KernelError::StrideTooSmall`], [`KernelError::Null`] or [`KernelError::Misaligned`] (2 bytes) where the view has elements, and
    /// [`KernelError::ViewOutside`] if it leaves the address space.
    ///
    /// # Safety
    /// The elements are BF16 in memory of the backend that the view is used with; they stay allocated, and nothing writes them, while a launch
    /// that got the view may run.
    pub unsafe fn from_raw(
        ptr: DevicePtr,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self, KernelError> {
        Shape::new(ptr, (rows, cols), row_stride, ELEMENT).map(Self::of)
    }

    /// The part of `rows` and all columns.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] if the range leaves the view.
    pub fn row_range(&self, rows: Range<usize>) -> Result<Self, KernelError> {
        self.shape.part(rows, 0..self.cols()).map(Self::of)
    }

    /// The part of all rows and `cols`.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] if the range leaves the view.
    pub fn col_range(&self, cols: Range<usize>) -> Result<Self, KernelError> {
        self.shape.part(0..self.rows(), cols).map(Self::of)
    }

    /// Whether the two views share an element. Exact for equal strides; views of different strides whose extents meet count as overlapping.
    pub fn overlaps(&self, out: &MatMut<'_>) -> bool {
        self.strided().overlaps(&out.strided())
    }

    fn of(shape: Shape) -> Self {
        Self {
            shape,
            owner: PhantomData,
        }
    }
}

impl<'a> MatMut<'a> {
    geometry!();

    /// A view of memory that an engine owns.
    ///
    /// # Errors
    /// As [`MatRef::from_raw`].
    ///
    /// # Safety
    /// As [`MatRef::from_raw`], and for the whole of `'a` nothing else reads or writes the elements but work ordered before or after
    /// the launches that get the view.
    pub unsafe fn from_raw(
        ptr: DevicePtr,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self, KernelError> {
        Shape::new(ptr, (rows, cols), row_stride, ELEMENT).map(Self::of)
    }

    /// The same view for a shorter time.
    pub fn reborrow(&mut self) -> MatMut<'_> {
        MatMut::of(self.shape)
    }

    /// The same view, to read.
    pub fn as_ref(&self) -> MatRef<'_> {
        MatRef::of(self.shape)
    }

    /// The part of `rows` and all columns.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] if the range leaves the view.
    pub fn row_range(self, rows: Range<usize>) -> Result<Self, KernelError> {
        let cols = self.cols();
        self.shape.part(rows, 0..cols).map(Self::of)
    }

    /// The part of all rows and `cols`.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] if the range leaves the view.
    pub fn col_range(self, cols: Range<usize>) -> Result<Self, KernelError> {
        let rows = self.rows();
        self.shape.part(0..rows, cols).map(Self::of)
    }

    /// Disjoint parts of consecutive columns, `widths` wide: how `[Q|K|V]` rows become three outputs. Columns past the last part are
    /// in none.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] if the widths add up to more than the view's columns.
    pub fn split_cols<const N: usize>(
        self,
        widths: [usize; N],
    ) -> Result<[MatMut<'a>; N], KernelError> {
        let mut end = 0_usize;
        let mut parts = [self.shape; N];
        for (part, width) in parts.iter_mut().zip(widths) {
            let start = end;
            end = start.saturating_add(width);
            *part = self.shape.part(0..self.rows(), start..end)?;
        }
        Ok(parts.map(Self::of))
    }

    fn of(shape: Shape) -> Self {
        Self {
            shape,
            owner: PhantomData,
        }
    }
}

impl<'a> F32MatMut<'a> {
    geometry!();

    /// A view of memory that an engine owns.
    ///
    /// # Errors
    /// As [`MatRef::from_raw`]; the alignment is 4 bytes.
    ///
    /// # Safety
    /// As [`MatMut::from_raw`], of FP32 elements.
    pub unsafe fn from_raw(
        ptr: DevicePtr,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self, KernelError> {
        let shape = Shape::new(ptr, (rows, cols), row_stride, F32_ELEMENT)?;
        let owner = PhantomData;
        Ok(Self { shape, owner })
    }
}

macro_rules! index_list {
    ($(#[$doc:meta])* $name:ident of $element:ty) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name<'a> {
            ptr: DevicePtr,
            len: usize,
            owner: PhantomData<&'a [u8]>,
        }

        impl<'a> $name<'a> {
            /// A view of memory that an engine owns.
            ///
            /// # Errors
            /// [`KernelError::Null`] or [`KernelError::Misaligned`] (4 bytes) where the list is not empty.
            ///
            /// # Safety
            /// The elements are in memory of the backend that the view is used with; they stay allocated, and nothing writes them, while a
            /// launch that got the view may run.
            pub unsafe fn from_raw(ptr: DevicePtr, len: usize) -> Result<Self, KernelError> {
                if len > 0 {
                    let operand = Operand::shared(stringify!($name));
                    KernelError::check_ptr(operand, ptr, size_of::<$element>() as u64)?;
                }
                Ok(Self {
                    ptr,
                    len,
                    owner: PhantomData,
                })
            }

            /// Address of the first element.
            pub fn ptr(&self) -> DevicePtr {
                self.ptr
            }

            /// Elements.
            pub fn len(&self) -> usize {
                self.len
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }
        }
    };
}

index_list! {
    /// Which table entry each row of a batch takes: `i32`, negative for none. An engine's `seq_slot` buffer.
    RowSlots of i32
}

index_list! {
    /// Which row of x each row of out reads: `u32`.
    RowIndices of u32
}

index_list! {
    /// The token of each row of a batch: `i32`.
    TokenIds of i32
}

index_list! {
    /// The experts that a router chose: `i32`, top-k a token, token by token.
    ExpertIds of i32
}

index_list! {
    /// The adapter slot whose experts each token of a MoE block takes: `i32`, negative for no fold.
    TokenAdapters of i32
}

index_list! {
    /// Which resident adapter of expert tables each slot of a pool is: `i32`, negative for none.
    ResidentOfSlot of i32
}

impl<'a> ResidentOfSlot<'a> {
    /// The part of `range`.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] if it leaves the list.
    pub fn range(self, range: Range<usize>) -> Result<Self, KernelError> {
        if range.start > range.end || range.end > self.len {
            return Err(KernelError::OutOfRange {
                operand: Operand::shared("ResidentOfSlot"),
                quantity: "elements",
                value: range.end as u64,
                min: range.start as u64,
                max: self.len as u64,
            });
        }
        Ok(Self {
            ptr: self
                .ptr
                .offset(range.start as u64 * size_of::<i32>() as u64),
            len: range.len(),
            owner: PhantomData,
        })
    }
}

impl<'a> From<RowSlots<'a>> for TokenAdapters<'a> {
    /// A step's row map as it is: a row of the batch is a token of the block.
    fn from(rows: RowSlots<'a>) -> Self {
        Self {
            ptr: rows.ptr,
            len: rows.len,
            owner: PhantomData,
        }
    }
}

#[cfg(test)]
impl MatMut<'static> {
    /// A view of no memory, for tests of what refuses it.
    pub(crate) fn unbacked(
        ptr: u64,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self, KernelError> {
        // SAFETY: no test that makes such a view gets it past a launcher's checks, so nothing is read or written through it.
        unsafe { Self::from_raw(DevicePtr(ptr), rows, cols, row_stride) }
    }
}
