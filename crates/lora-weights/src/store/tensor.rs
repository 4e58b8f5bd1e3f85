use std::fmt;

/// A tensor of a store, by its position in [`AdapterStore::tensors`](crate::AdapterStore::tensors).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub usize);

/// Element type of a tensor. The first three load; the others are refused by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorDtype {
    /// bfloat16: taken as it is.
    Bf16,
    /// IEEE half precision: every value is rounded to BF16.
    F16,
    /// IEEE single precision: every value is rounded to BF16.
    F32,
    /// Another type of the safetensors format.
    Other(OtherDtype),
}

impl TensorDtype {
    /// Whether tensors of this type load.
    pub fn loads(self) -> bool {
        !matches!(self, Self::Other(_))
    }

    /// Bits of an element.
    pub(super) fn bits(self) -> u64 {
        match self {
            Self::Bf16 | Self::F16 => 16,
            Self::F32 => 32,
            Self::Other(OtherDtype(dtype)) => dtype.bitsize() as u64,
        }
    }
}

impl From<safetensors::Dtype> for TensorDtype {
    fn from(dtype: safetensors::Dtype) -> Self {
        match dtype {
            safetensors::Dtype::BF16 => Self::Bf16,
            safetensors::Dtype::F16 => Self::F16,
            safetensors::Dtype::F32 => Self::F32,
            other => Self::Other(OtherDtype(other)),
        }
    }
}

impl fmt::Display for TensorDtype {
    /// The format's own name: `BF16`, `F8_E4M3`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bf16 => f.write_str("BF16"),
            Self::F16 => f.write_str("F16"),
            Self::F32 => f.write_str("F32"),
            Self::Other(OtherDtype(dtype)) => dtype.fmt(f),
        }
    }
}

/// A type of the safetensors format that does not load: F64, 8-bit floats, integers. Shown by the format's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OtherDtype(safetensors::Dtype);

/// What a file says of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMeta {
    /// Name as in the file.
    pub name: String,
    /// Element type.
    pub dtype: TensorDtype,
    /// Shape, row-major.
    pub shape: Vec<usize>,
}
