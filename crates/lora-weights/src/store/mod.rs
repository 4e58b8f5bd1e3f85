//! An adapter's files, opened and checked in form: the config's text, and tensors whose bytes are read where they lie.

mod convert;
mod error;
mod header;
mod manifest;
mod open;
mod tensor;
#[cfg(test)]
mod tests;

pub(crate) use convert::Walk;
pub use error::{HeaderError, StoreError};
#[cfg(feature = "source")]
pub(crate) use header::LENGTH_BYTES;
pub use header::{HeaderEntry, parse_safetensors_header};
pub use manifest::WeightManifest;
#[cfg(feature = "source")]
pub(crate) use open::{CONFIG, MAX_CONFIG_BYTES, OTHER_WEIGHTS, WEIGHTS};
pub(crate) use open::{open_config, open_weights, several_adapters};
pub use tensor::{OtherDtype, TensorDtype, TensorId, TensorMeta};

use half::bf16;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An adapter's config text and tensors, from a folder or from memory.
///
/// Tensors of a folder are mapped, not read. **The file must not be written to or cut short while the store is open**: a
/// change is seen as other numbers than those audited, a cut ends the process with SIGBUS. Replace an adapter's file by
/// renaming another over it, which leaves the open one as it was.
pub struct AdapterStore {
    config_json: String,
    weights: Weights,
    path: Option<PathBuf>,
}

/// Tensors and their bytes.
pub(crate) struct Weights {
    tensors: Vec<TensorMeta>,
    data: Data,
}

enum Data {
    /// A mapped file; the bytes of each tensor within it.
    File {
        map: memmap2::Mmap,
        spans: Vec<Range<usize>>,
    },
    /// One buffer a tensor.
    Memory(Vec<TensorData>),
}

type TensorData = Box<dyn AsRef<[u8]> + Send + Sync>;

/// A tensor that is in memory already.
pub struct MemoryTensor {
    meta: TensorMeta,
    data: TensorData,
}

impl MemoryTensor {
    /// A tensor from its little-endian bytes, row-major. `data` is kept, not copied: a `Vec<u8>`, an `Arc<[u8]>`, whatever lends
    /// its bytes.
    pub fn new(
        name: impl Into<String>,
        dtype: TensorDtype,
        shape: impl Into<Vec<usize>>,
        data: impl AsRef<[u8]> + Send + Sync + 'static,
    ) -> Self {
        let meta = TensorMeta {
            name: name.into(),
            dtype,
            shape: shape.into(),
        };
        Self {
            meta,
            data: Box::new(data),
        }
    }

    /// A BF16 tensor; the values are copied.
    pub fn from_bf16(
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        values: &[bf16],
    ) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(name, TensorDtype::Bf16, shape, bytes)
    }

    /// An F32 tensor; the values are copied.
    pub fn from_f32(name: impl Into<String>, shape: impl Into<Vec<usize>>, values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(name, TensorDtype::F32, shape, bytes)
    }
}

impl AdapterStore {
    /// Opens a PEFT adapter folder: reads `adapter_config.json`, checks the header of `adapter_model.safetensors` and maps the
    /// rest.
    ///
    /// The config is not parsed here. Nothing is allocated that the file's real size does not justify.
    ///
    /// # Errors
    /// A [`StoreError`] that names the file: missing, a pickle, sharded, MLX's, a folder of several adapters, unreadable, or
    /// with a header that does not describe the file.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        if let Some(several) = several_adapters(dir) {
            return Err(several);
        }
        Ok(Self {
            config_json: open_config(dir)?,
            weights: open_weights(dir)?,
            path: Some(dir.to_owned()),
        })
    }

    /// A store of tensors that are in memory already, as a training loop holds them.
    ///
    /// ```
    /// use lora_weights::{AdapterStore, MemoryTensor};
    ///
    /// let a = MemoryTensor::from_f32("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", [2, 4], &[0.5; 8]);
    /// let store = AdapterStore::from_tensors(r#"{"peft_type": "LORA"}"#, [a]).unwrap();
    /// assert_eq!(store.tensors()[0].shape, [2, 4]);
    /// ```
    ///
    /// # Errors
    /// [`HeaderError::DuplicateName`], or [`HeaderError::SizeMismatch`] where bytes do not fit shape and dtype.
    pub fn from_tensors(
        config_json: impl Into<String>,
        tensors: impl IntoIterator<Item = MemoryTensor>,
    ) -> Result<Self, HeaderError> {
        let (metas, data): (Vec<TensorMeta>, Vec<TensorData>) =
            tensors.into_iter().map(|t| (t.meta, t.data)).unzip();
        header::check_names(metas.iter().map(|meta| meta.name.as_str()))?;
        for (meta, data) in metas.iter().zip(&data) {
            header::check_size(meta, (**data).as_ref().len() as u64)?;
        }
        Ok(Self {
            config_json: config_json.into(),
            weights: Weights {
                tensors: metas,
                data: Data::Memory(data),
            },
            path: None,
        })
    }

    pub(crate) fn from_parts(config_json: String, weights: Weights, dir: &Path) -> Self {
        Self {
            config_json,
            weights,
            path: Some(dir.to_owned()),
        }
    }

    /// The folder, for a store that has one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Text of `adapter_config.json`.
    pub fn config_json(&self) -> &str {
        &self.config_json
    }

    /// Tensors in the header's order.
    pub fn tensors(&self) -> &[TensorMeta] {
        &self.weights.tensors
    }

    /// What is said of one tensor.
    ///
    /// # Panics
    /// If `id` is not of this store.
    pub fn tensor(&self, id: TensorId) -> &TensorMeta {
        &self.weights.tensors[id.0]
    }

    /// A tensor's bytes, little-endian, row-major, of any alignment.
    ///
    /// # Panics
    /// If `id` is not of this store.
    pub fn tensor_bytes(&self, id: TensorId) -> &[u8] {
        match &self.weights.data {
            Data::File { map, spans } => &map[spans[id.0].clone()],
            Data::Memory(data) => (*data[id.0]).as_ref(),
        }
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        let bytes = |id| self.tensor_bytes(TensorId(id)).len() as u64;
        (0..self.weights.tensors.len()).map(bytes).sum()
    }

    /// Reads rows `rows` of a 2-D tensor as BF16 (F16 and F32 rounded to nearest, ties to even), row `i` of them to
    /// `dst[i * dst_stride..][..columns]`; `dst_stride` is in elements.
    ///
    /// # Panics
    /// If the tensor is not 2-D, its dtype does not load, or the rows leave the tensor or `dst`: the audit answers for all of
    /// them but the last.
    pub fn read_rows_bf16(
        &self,
        id: TensorId,
        rows: Range<usize>,
        dst: &mut [bf16],
        dst_stride: usize,
    ) {
        let columns = match *self.tensor(id).shape.as_slice() {
            [_, columns] => columns,
            ref shape => panic!("rows of a tensor of shape {shape:?}"),
        };
        let walk = Walk {
            start: rows.start * columns,
            counts: [rows.len(), columns],
            src: [columns, 1],
            dst: [dst_stride, 1],
        };
        self.walk_bf16(id, &walk, dst);
    }

    /// Reads a strided walk of a tensor as BF16.
    pub(crate) fn walk_bf16(&self, id: TensorId, walk: &Walk, dst: &mut [bf16]) {
        let bytes = self.tensor_bytes(id);
        convert::convert(self.tensor(id).dtype, bytes, walk, dst);
    }
}

impl std::fmt::Debug for AdapterStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdapterStore")
            .field("path", &self.path)
            .field("tensors", &self.weights.tensors.len())
            .finish_non_exhaustive()
    }
}
