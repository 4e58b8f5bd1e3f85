use lora_weights::device::DevicePtr;

/// A BF16 matrix that kernels read: `rows x cols`, `row_stride` elements from one row to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatRef {
    ptr: DevicePtr,
    rows: usize,
    cols: usize,
    row_stride: usize,
}

/// A BF16 matrix that kernels update in place.
#[derive(Debug, PartialEq, Eq)]
pub struct MatMut {
    ptr: DevicePtr,
    rows: usize,
    cols: usize,
    row_stride: usize,
}
