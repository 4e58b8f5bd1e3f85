//! Names of whole rows and tables of the vocabulary.

use super::key::is_table_parent;
use super::{NameRules, Reject, RejectReason, TensorPath};
use crate::TensorId;
use lora_config::TokenTable;

/// A vocabulary table.
pub type OverlayModule = TokenTable;

/// What an overlay tensor holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OverlayTensorKind {
    /// `.token_adapter.base_layer.weight`: the table that the trained rows belong to, `[rows, hidden]`.
    Base,
    /// `.token_adapter.trainable_tokens_delta`: trained rows, `[ids, hidden]`; they replace rows, they are not added.
    Delta,
    /// `embed_tokens.weight`, `lm_head.weight`, `.modules_to_save.weight`: a whole table, `[rows, hidden]`.
    FullTable,
    /// `.lora_embedding_A`: `[r, rows]`.
    EmbeddingA,
    /// `.lora_embedding_B`: `[hidden, r]`.
    EmbeddingB,
}

impl OverlayTensorKind {
    /// Every kind.
    pub const ALL: [Self; 5] = [
        Self::Base,
        Self::Delta,
        Self::FullTable,
        Self::EmbeddingA,
        Self::EmbeddingB,
    ];
}

/// One overlay tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayTensor {
    /// The table.
    pub module: OverlayModule,
    /// Its part.
    pub kind: OverlayTensorKind,
    /// The tensor in its store.
    pub id: TensorId,
    /// Its name in the file.
    pub name: String,
    /// Its shape, as the header gives it.
    pub shape: Vec<usize>,
}

/// The overlay tensors of a file: at most one for each table and kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OverlayTensors {
    tensors: Vec<OverlayTensor>,
}

impl OverlayTensors {
    /// Takes a tensor in.
    ///
    /// # Errors
    /// Gives the tensor back if one with its table and kind is there already (duplicate-overlay-tensor).
    pub fn insert(&mut self, tensor: OverlayTensor) -> Result<(), OverlayTensor> {
        if self.get(tensor.module, tensor.kind).is_some() {
            return Err(tensor);
        }
        self.tensors.push(tensor);
        Ok(())
    }

    /// The tensor with this table and kind.
    pub fn get(&self, module: OverlayModule, kind: OverlayTensorKind) -> Option<&OverlayTensor> {
        self.tensors
            .iter()
            .find(|t| t.module == module && t.kind == kind)
    }

    /// The adapter's own whole table: its base, else a full table, which stands in for one.
    pub fn own_table(&self, module: OverlayModule) -> Option<&OverlayTensor> {
        self.get(module, OverlayTensorKind::Base)
            .or_else(|| self.get(module, OverlayTensorKind::FullTable))
    }

    /// All of them, in the order they were taken in.
    pub fn iter(&self) -> impl Iterator<Item = &OverlayTensor> {
        self.tensors.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }
}

/// The table and kind that a tensor's name stands for.
///
/// The table is the LM head where a segment of the path is `lm_head`, the embedding where one is `embed_tokens` or `shared`.
/// `None` for everything else: names without PEFT's prefix (unless the rules take them), weights of pairs, anything inside
/// decoder layers, and tables of other towers (`model.visual...`, `mtp...`). Names are to be tried here before
/// [`classify_key`](super::classify_key).
pub fn classify_overlay_key(
    name: &str,
    rules: &NameRules,
) -> Option<(OverlayModule, OverlayTensorKind)> {
    let path = TensorPath::parse(name, rules.accept_bare_names).ok()?;
    overlay_of(&path)
}

/// [`classify_overlay_key`] after [`TensorPath::parse`].
pub(crate) fn overlay_of(path: &TensorPath<'_>) -> Option<(OverlayModule, OverlayTensorKind)> {
    // Longer suffixes first: every other one ends in `.weight` too.
    const SUFFIXES: [(&str, OverlayTensorKind); 6] = [
        (".token_adapter.base_layer.weight", OverlayTensorKind::Base),
        (
            ".token_adapter.trainable_tokens_delta",
            OverlayTensorKind::Delta,
        ),
        (".modules_to_save.weight", OverlayTensorKind::FullTable),
        (".lora_embedding_A", OverlayTensorKind::EmbeddingA),
        (".lora_embedding_B", OverlayTensorKind::EmbeddingB),
        (".weight", OverlayTensorKind::FullTable),
    ];
    SUFFIXES.iter().find_map(|&(suffix, kind)| {
        let table = path.path.strip_suffix(suffix)?;
        Some((table_of(table)?, kind))
    })
}

/// True for `.original_module.weight` of a table: the base's own copy, which PEFT up to 0.2 wrote beside `.modules_to_save.weight`.
pub(crate) fn is_original_module(path: &TensorPath<'_>) -> bool {
    path.path
        .strip_suffix(".original_module.weight")
        .is_some_and(|table| table_of(table).is_some())
}

/// The table whose module path this is.
pub(crate) fn table_of(module: &str) -> Option<OverlayModule> {
    let (parent, last) = module.rsplit_once('.').unwrap_or(("", module));
    let table = match last {
        "lm_head" => TokenTable::LmHead,
        "embed_tokens" | "shared" => TokenTable::Embed,
        _ => return None,
    };
    is_table_parent(parent).then_some(table)
}

/// Refuses overlay tensors that nothing applies: low-rank LoRA of the embedding.
///
/// # Errors
/// [`RejectReason::LoraEmbeddingUnimplemented`], naming the first such tensor.
pub fn reject_pending_overlay(overlays: &OverlayTensors) -> Result<(), Reject> {
    let low_rank = |t: &&OverlayTensor| {
        matches!(
            t.kind,
            OverlayTensorKind::EmbeddingA | OverlayTensorKind::EmbeddingB
        )
    };
    match overlays.iter().find(low_rank) {
        None => Ok(()),
        Some(tensor) => Err(Reject::new(
            RejectReason::LoraEmbeddingUnimplemented,
            &tensor.name,
            format!(
                "low-rank LoRA of the embedding (shape {:?}) is not applied; merge it into full rows (modules_to_save)",
                tensor.shape
            ),
        )),
    }
}
