use std::path::Path;

/// A tensor of a store, by its position in [`AdapterStore::tensors`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub usize);

/// Element types that the safetensors format names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum TensorDtype {
    Bf16,
    F16,
    F32,
    /** Any other, by its name in the header. */
    Other(String),
}

/// What the header says of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMeta {
    /// Name as in the file.
    pub name: String,
    /// Element type.
    pub dtype: TensorDtype,
    /// Shape.
    pub shape: Vec<usize>,
}

/// An adapter's config text and tensors.
pub struct AdapterStore {}

impl AdapterStore {
    /// Opens a PEFT adapter folder.
    pub fn open(_dir: &Path) -> Result<Self, crate::Finding> {
        unimplemented!()
    }
    /// Text of `adapter_config.json`.
    pub fn config_json(&self) -> &str {
        unimplemented!()
    }
    /// Tensors in header order.
    pub fn tensors(&self) -> &[TensorMeta] {
        unimplemented!()
    }
    /// Raw little-endian bytes of a tensor.
    pub fn tensor_bytes(&self, _id: TensorId) -> &[u8] {
        unimplemented!()
    }
    /// Converts rows `rows` of a 2-D tensor to BF16 (nearest even), row `i` to `dst[i * dst_stride ..][..cols]`, both in elements.
    pub fn read_rows_bf16(
        &self,
        _id: TensorId,
        _rows: std::ops::Range<usize>,
        _dst: &mut [half::bf16],
        _dst_stride: usize,
    ) {
        unimplemented!()
    }
}
