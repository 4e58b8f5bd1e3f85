//! Recorded module outputs: what PEFT computed, to compare with.
//!
//! A `golden.safetensors` holds, for each recorded module, F32 tensors named by the module's path: `PATH|x` the rows that
//! went in, `PATH|base` what the untouched module gave, `PATH|out` what PEFT gave. For stacked experts it holds the
//! parameter before and after, `PATH|w` and `PATH|w_adapted`, the block's input `BLOCK|hidden`, its output `BLOCK|out`, and `BLOCK|top_k_index` and
//! `BLOCK|top_k_weights` where a router chose.

use super::block::GoldenBlock;
use super::matrix::Matrix;
use super::stacked;
use super::tables::{GoldenTable, TokenIds, token_ids};
use crate::CliError;
use crate::files::read_bytes;
use lora_runtime::config::ModelSpec;
use lora_runtime::weights::{LoraTarget, NameRules, classify_key};
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::Path;

/// One recorded module: rows in, what the base gave, what PEFT gave.
#[derive(Debug, Clone)]
pub struct GoldenSite {
    /// Path of the module, with the expert's number where a stacked parameter was split.
    pub path: String,
    /// Global layer index.
    pub layer: usize,
    /// The module inside the layer.
    pub target: LoraTarget,
    /// `[rows, k_in]`.
    pub x: Matrix,
    /// `[rows, n_out]`.
    pub base: Matrix,
    /// `[rows, n_out]`.
    pub out: Matrix,
}

/// Everything recorded that a delta can be compared with.
#[derive(Debug, Clone, Default)]
pub struct Golden {
    /// Recorded modules, by path.
    pub sites: Vec<GoldenSite>,
    /// Recorded expert blocks that can be compared whole.
    pub blocks: Vec<GoldenBlock>,
    /// Recorded vocabulary tables.
    pub tables: Vec<GoldenTable>,
    /// Paths of recorded modules that are no place for a delta or an overlay (norms).
    pub skipped: Vec<String>,
}

/// F32 and integer tensors of a golden file, by name.
pub(super) type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

impl Golden {
    /// Reads the file at `path`. A file that is not there holds nothing to compare.
    ///
    /// # Errors
    /// A file that cannot be read or parsed, and recorded tensors whose shapes do not fit each other.
    pub fn read(path: &Path, spec: &ModelSpec) -> Result<Self, CliError> {
        let bytes = match read_bytes(path, u64::MAX) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            Err(error) => return Err(CliError::read(path, error)),
        };
        let bad = |what: String| CliError::Golden {
            path: path.to_path_buf(),
            what,
        };
        let (tensors, ids) = (
            tensors(&bytes).map_err(bad)?,
            token_ids(&bytes).map_err(bad)?,
        );
        Self::from_tensors((&tensors, &ids), spec).map_err(bad)
    }

    /// Sorts recorded tensors into sites.
    pub(super) fn from_tensors(
        (tensors, ids): (&Tensors, &TokenIds),
        spec: &ModelSpec,
    ) -> Result<Self, String> {
        let rules = NameRules {
            modules: lora_runtime::weights::ModuleSet::everything(),
            ..NameRules::default()
        };
        let mut golden = Self::default();
        for path in tensors.keys().filter_map(|name| name.strip_suffix("|out")) {
            if is_expert_block(tensors, path) {
                golden
                    .blocks
                    .extend(GoldenBlock::read(tensors, path, spec)?);
                continue;
            }
            if let Some(table) = GoldenTable::read((tensors, ids), path, spec)? {
                golden.tables.push(table);
                continue;
            }
            let placed = classify_key(
                &format!("base_model.model.{path}.lora_A.weight"),
                spec,
                &rules,
            );
            match (placed, tensors.contains_key(&format!("{path}|x"))) {
                (Ok((layer, target, _)), true) => golden.sites.push(GoldenSite {
                    path: path.to_owned(),
                    layer,
                    target,
                    x: matrix(tensors, path, "x")?,
                    base: matrix(tensors, path, "base")?,
                    out: matrix(tensors, path, "out")?,
                }),
                _ => golden.skipped.push(path.to_owned()),
            }
        }
        for path in tensors
            .keys()
            .filter_map(|name| name.strip_suffix("|w_adapted"))
        {
            golden.sites.extend(stacked::sites(tensors, path, spec)?);
        }
        for site in &golden.sites {
            site.check(spec)?;
        }
        golden
            .sites
            .sort_by(|a, b| (a.layer, a.target, &a.path).cmp(&(b.layer, b.target, &b.path)));
        Ok(golden)
    }
}

impl GoldenSite {
    /// Rows agree with each other, widths with the model.
    fn check(&self, spec: &ModelSpec) -> Result<(), String> {
        let (x, base, out) = (self.x.shape(), self.base.shape(), self.out.shape());
        if base != out || x.0 != base.0 {
            return Err(format!(
                "{}: x is {x:?}, base {base:?}, out {out:?}",
                self.path
            ));
        }
        let dims = self.target.dims(spec, self.layer);
        if dims != Some((out.1, x.1)) {
            return Err(format!(
                "{}: recorded as {} to {} wide, in the model (out, in) is {dims:?}",
                self.path, x.1, out.1
            ));
        }
        Ok(())
    }
}

/// Whether `path` is a whole expert block, recorded with its routing: it is compared expert by expert, and whole where everything in it is known.
fn is_expert_block(tensors: &Tensors, path: &str) -> bool {
    tensors.contains_key(&format!("{path}|hidden"))
}

/// The recorded 2-D tensor `path|role`.
pub(super) fn matrix(tensors: &Tensors, path: &str, role: &str) -> Result<Matrix, String> {
    let name = format!("{path}|{role}");
    let (shape, values) = tensors
        .get(&name)
        .ok_or_else(|| format!("{name} is missing"))?;
    match shape[..] {
        [rows, cols] => Ok(Matrix::new(rows, cols, values.clone())),
        _ => Err(format!(
            "{name} has shape {shape:?}, two dimensions are wanted"
        )),
    }
}

/// The F32 tensors of a file, and its numbers of experts and tokens, which F32 holds exactly; others are left out.
pub(super) fn tensors(bytes: &[u8]) -> Result<Tensors, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    let mut found = Tensors::new();
    for (name, view) in file.iter() {
        let values = match view.dtype() {
            Dtype::F32 => {
                let (words, _) = view.data().as_chunks::<4>();
                words.iter().map(|word| f32::from_le_bytes(*word)).collect()
            }
            Dtype::I64 => {
                let (words, _) = view.data().as_chunks::<8>();
                words
                    .iter()
                    .map(|word| i64::from_le_bytes(*word) as f32)
                    .collect()
            }
            _ => continue,
        };
        found.insert(name.to_owned(), (view.shape().to_vec(), values));
    }
    Ok(found)
}
