//! Vocabulary tables: recorded rows and logits, and the tables that the base model serves.

use super::golden::{Tensors, matrix, tensors};
use super::matrix::Matrix;
use crate::CliError;
use crate::files::read_bytes;
use half::bf16;
use lora_runtime::config::{ModelSpec, TokenTable};
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::Path;

/// A recorded vocabulary table: what went in, what the untouched table gave, what PEFT gave.
#[derive(Debug, Clone)]
pub struct GoldenTable {
    /// Path of the module.
    pub path: String,
    /// What went in.
    pub input: TableInput,
    /// `[rows, hidden]` of an embedding, `[rows, vocabulary]` of a head.
    pub base: Matrix,
    /// As `base`.
    pub out: Matrix,
    /// The base model's own table, `[vocabulary, hidden]`, where it was recorded.
    pub weight: Option<Matrix>,
}

/// What went into a vocabulary table.
#[derive(Debug, Clone)]
pub enum TableInput {
    /// Token ids, into the embedding.
    Tokens(Vec<i32>),
    /// `[rows, hidden]`, into the LM head.
    Hidden(Matrix),
}

impl GoldenTable {
    /// The table.
    pub fn table(&self) -> TokenTable {
        match self.input {
            TableInput::Tokens(_) => TokenTable::Embed,
            TableInput::Hidden(_) => TokenTable::LmHead,
        }
    }

    /// The recorded table at `path`; `None` where `path` is none, or what went in is not recorded.
    pub(super) fn read(
        (recorded, ids): (&Tensors, &TokenIds),
        path: &str,
        spec: &ModelSpec,
    ) -> Result<Option<Self>, String> {
        let input = match TokenTable::from_path(path) {
            Some(TokenTable::Embed) => ids.get(path).cloned().map(TableInput::Tokens),
            Some(TokenTable::LmHead) if recorded.contains_key(&format!("{path}|x")) => {
                Some(TableInput::Hidden(matrix(recorded, path, "x")?))
            }
            _ => None,
        };
        let Some(input) = input else {
            return Ok(None);
        };
        let weight = match recorded.contains_key(&format!("{path}|w")) {
            true => Some(matrix(recorded, path, "w")?),
            false => None,
        };
        let table = Self {
            path: path.to_owned(),
            input,
            base: matrix(recorded, path, "base")?,
            out: matrix(recorded, path, "out")?,
            weight,
        };
        table.check(spec)?;
        Ok(Some(table))
    }

    fn check(&self, spec: &ModelSpec) -> Result<(), String> {
        let (hidden, vocab) = (spec.hidden_size, spec.vocab_size);
        let (rows, width) = match &self.input {
            TableInput::Tokens(ids) => (ids.len(), hidden),
            TableInput::Hidden(x) if x.shape().1 == hidden => (x.shape().0, vocab),
            TableInput::Hidden(x) => {
                let width = x.shape().1;
                return Err(format!(
                    "{}|x is {width} wide, the model {hidden}",
                    self.path
                ));
            }
        };
        let weight = self.weight.as_ref().map(Matrix::shape);
        if self.base.shape() != (rows, width)
            || self.out.shape() != (rows, width)
            || weight.is_some_and(|shape| shape != (vocab, hidden))
        {
            return Err(format!(
                "{}: {rows} rows went in, base is {:?}, out {:?}, w {weight:?}, and the model has {vocab} tokens of {hidden}",
                self.path,
                self.base.shape(),
                self.out.shape(),
            ));
        }
        Ok(())
    }
}

/// Token ids by the path that they went into.
pub(super) type TokenIds = BTreeMap<String, Vec<i32>>;

/// The I64 tensors called `PATH|ids`.
pub(super) fn token_ids(bytes: &[u8]) -> Result<TokenIds, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    let mut found = TokenIds::new();
    for (name, view) in file.iter() {
        let Some(path) = name.strip_suffix("|ids") else {
            continue;
        };
        if view.dtype() != Dtype::I64 {
            return Err(format!("{name} is {:?}, I64 is wanted", view.dtype()));
        }
        let (words, _) = view.data().as_chunks::<8>();
        let ids = words.iter().map(|word| i64::from_le_bytes(*word));
        let ids = ids.map(|id| i32::try_from(id).map_err(|_| format!("{name} holds {id}")));
        found.insert(path.to_owned(), ids.collect::<Result<_, _>>()?);
    }
    Ok(found)
}

/// The base model's own tables, as far as they are known, rounded to BF16.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BaseTables {
    /// `[vocabulary, hidden]`.
    pub embed: Option<Vec<bf16>>,
    /// As `embed`, where head and embedding are two tables.
    pub lm_head: Option<Vec<bf16>>,
}

impl BaseTables {
    /// Those that the case in `dir` recorded, else those of a base model beside it: a folder `base_...` with the same `config.json`.
    ///
    /// # Errors
    /// A base model's file that cannot be read or does not hold together.
    pub fn find(dir: &Path, recorded: &[GoldenTable], spec: &ModelSpec) -> Result<Self, CliError> {
        let of = |table: TokenTable| {
            let recorded = recorded.iter().find(|golden| golden.table() == table)?;
            recorded.weight.as_ref().map(rounded)
        };
        let mut tables = Self {
            embed: of(TokenTable::Embed),
            lm_head: of(TokenTable::LmHead),
        };
        if tables.embed.is_none() || tables.lm_head.is_none() {
            let beside = Self::beside(dir, spec)?;
            tables.embed = tables.embed.or(beside.embed);
            tables.lm_head = tables.lm_head.or(beside.lm_head);
        }
        if spec.tied_embeddings {
            tables.embed = tables.embed.or(tables.lm_head.take());
            tables.lm_head = None;
        }
        Ok(tables)
    }

    /// Those of the base model beside `dir`; nothing where there is none.
    fn beside(dir: &Path, spec: &ModelSpec) -> Result<Self, CliError> {
        let config = std::fs::read(dir.join("config.json")).ok();
        let here = dir.canonicalize().ok();
        let folders = here
            .as_deref()
            .and_then(Path::parent)
            .map(std::fs::read_dir);
        let mut bases: Vec<_> = folders
            .into_iter()
            .flatten()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("base_"))
            .map(|entry| entry.path())
            .filter(|base| {
                config.is_some() && std::fs::read(base.join("config.json")).ok() == config
            })
            .collect();
        bases.sort();
        let Some(file) = bases.first().map(|base| base.join("model.safetensors")) else {
            return Ok(Self::default());
        };
        let bytes = read_bytes(&file, u64::MAX).map_err(|error| CliError::read(&file, error))?;
        let bad = |what: String| CliError::Golden {
            path: file.clone(),
            what,
        };
        let recorded = tensors(&bytes).map_err(bad)?;
        let table = |table: TokenTable| {
            let name = recorded.keys().find(|name| {
                let path = name.strip_suffix(".weight");
                path.is_some_and(|path| {
                    TokenTable::from_path(path) == Some(table) && !path.contains("visual")
                })
            })?;
            let (shape, values) = &recorded[name];
            let fits = shape[..] == [spec.vocab_size, spec.hidden_size];
            fits.then(|| values.iter().map(|v| bf16::from_f32(*v)).collect())
        };
        Ok(Self {
            embed: table(TokenTable::Embed),
            lm_head: table(TokenTable::LmHead),
        })
    }
}

fn rounded(matrix: &Matrix) -> Vec<bf16> {
    (0..matrix.shape().0)
        .flat_map(|row| matrix.row_bf16(row))
        .collect()
}
