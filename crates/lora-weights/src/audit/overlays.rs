//! Rows and tables of the vocabulary, and low-rank pairs on them.

use super::AuditReason;
use super::context::{Context, Findings};
use super::inventory::{Halves, Inventory};
use super::pairs::check_dtype;
use super::{OverlayRows, OverlayTableRows};
use crate::{OverlayTensor, OverlayTensorKind, OverlayTensors, RejectReason, TensorId};
use lora_config::{AdapterConfig, TokenTable};

const TABLES: [TokenTable; 2] = [TokenTable::Embed, TokenTable::LmHead];

/// Checks every overlay tensor and, where there is a config, that it and the file name the same rows and tables.
pub(super) fn check(context: Context<'_>, inventory: &Inventory, findings: &mut Findings) {
    for tensor in inventory.overlays.iter() {
        check_tensor(context, tensor, findings);
    }
    let Some(config) = context.config else {
        return;
    };
    for table in TABLES {
        check_whole(&inventory.overlays, table, findings);
        check_tokens(context, (config, &inventory.overlays), table, findings);
    }
    check_saved(context, (config, &inventory.overlays), findings);
    if config.ensure_weight_tying() && context.spec.tied_embeddings {
        check_tied(context, inventory, findings);
    }
}

/// Tensors that an overlay takes rows from, where the policy takes overlays.
pub(super) fn applied(context: Context<'_>, overlays: &OverlayTensors) -> usize {
    let tensors = overlays.iter().filter(|tensor| !is_low_rank(tensor));
    if context.pool.policy.overlays {
        tensors.count()
    } else {
        0
    }
}

fn is_low_rank(tensor: &OverlayTensor) -> bool {
    matches!(
        tensor.kind,
        OverlayTensorKind::EmbeddingA | OverlayTensorKind::EmbeddingB
    )
}

/// Rows that each table's overlay replaces at most, and those it offers past the vocabulary.
pub(super) fn rows(context: Context<'_>, overlays: &OverlayTensors) -> OverlayRows {
    let of_table = |table| {
        let trained = context.config.and_then(|config| trained_ids(config, table));
        let vocab = context.spec.vocab_size;
        let own = own_rows(overlays, table);
        let past_own = |id: &&u32| (own.min(vocab)..vocab).contains(&(**id as usize));
        let has_delta = overlays.get(table, OverlayTensorKind::Delta).is_some();
        let trained = trained.filter(|_| has_delta).into_iter().flatten();
        OverlayTableRows {
            replaced: (own.min(vocab) + trained.filter(past_own).count()) as u64,
            extension: own.saturating_sub(vocab) as u64,
        }
    };
    OverlayRows {
        embed: of_table(TokenTable::Embed),
        lm_head: of_table(TokenTable::LmHead),
    }
}

/// Rows of the adapter's own table, 0 without.
fn own_rows(overlays: &OverlayTensors, table: TokenTable) -> usize {
    let own = overlays.own_table(table);
    own.and_then(|tensor| tensor.shape.first().copied())
        .unwrap_or(0)
}

/// Bytes of the rows and tables as BF16, before rows that equal the served ones are left out. Saturates.
pub(super) fn bytes(overlays: &OverlayTensors) -> u64 {
    let elements = |tensor: &OverlayTensor| {
        let dims = tensor.shape.iter().map(|&dim| dim as u64);
        dims.fold(1u64, u64::saturating_mul)
    };
    let tables = overlays.iter().filter(|tensor| !is_low_rank(tensor));
    let sum = tables.map(elements).fold(0, u64::saturating_add);
    sum.saturating_mul(2)
}

fn check_tensor(context: Context<'_>, tensor: &OverlayTensor, findings: &mut Findings) {
    check_dtype(context, tensor.id, findings);
    let (hidden, vocab) = (context.spec.hidden_size, context.spec.vocab_size);
    let (fits, wanted) = match (tensor.kind, tensor.shape.as_slice()) {
        (OverlayTensorKind::EmbeddingA, &[_, columns]) => {
            (columns == vocab, format!("[r, {vocab}]"))
        }
        (OverlayTensorKind::EmbeddingA, _) => (false, format!("[r, {vocab}]")),
        (OverlayTensorKind::EmbeddingB, &[rows, _]) => (rows == hidden, format!("[{hidden}, r]")),
        (OverlayTensorKind::EmbeddingB, _) => (false, format!("[{hidden}, r]")),
        (_, &[rows, width]) => (rows > 0 && width == hidden, format!("[rows, {hidden}]")),
        _ => (false, format!("[rows, {hidden}]")),
    };
    if !fits {
        let message = format!("shape {:?}, and the model asks for {wanted}", tensor.shape);
        findings.error(AuditReason::ShapeMismatch, &tensor.name, message);
    }
    match tensor.kind {
        OverlayTensorKind::EmbeddingA | OverlayTensorKind::EmbeddingB => {
            let message = "low-rank LoRA of the embedding is not applied; merge it into full rows (modules_to_save)";
            findings.reject(
                RejectReason::LoraEmbeddingUnimplemented,
                &tensor.name,
                message,
            );
        }
        _ if !context.pool.policy.overlays => {
            let message = format!(
                "replaces rows of {}, and nothing applies them: register the engine's served tables (LoraRuntime::serve_tables), or apply them \
                 and say so (LoadPolicy::overlays)",
                tensor.module.peft_name()
            );
            findings.error(AuditReason::OverlayUnapplied, &tensor.name, message);
        }
        _ => {}
    }
}

/// One whole table for a table: which of two would serve is not defined.
fn check_whole(overlays: &OverlayTensors, table: TokenTable, findings: &mut Findings) {
    let get = |kind| overlays.get(table, kind);
    let (base, full) = (OverlayTensorKind::Base, OverlayTensorKind::FullTable);
    if let (Some(base), Some(full)) = (get(base), get(full)) {
        let message = format!(
            "a second whole table for {}: {} is one",
            table.peft_name(),
            base.name
        );
        findings.error(AuditReason::DuplicateOverlayTensor, &full.name, message);
    }
}

/// Ids and rows of one table: both there, as many of one as of the other, every id in the vocabulary.
fn check_tokens(
    context: Context<'_>,
    (config, overlays): (&AdapterConfig, &OverlayTensors),
    table: TokenTable,
    findings: &mut Findings,
) {
    let delta = overlays.get(table, OverlayTensorKind::Delta);
    let name = table.peft_name();
    match (trained_ids(config, table), delta) {
        (None, None) => {}
        (None, Some(delta)) => {
            let message =
                format!("trained rows of {name}, and trainable_token_indices has no ids for them");
            findings.error(AuditReason::TokenIdsMissing, &delta.name, message);
        }
        // A tied head shares the embedding's rows, and PEFT saves them once.
        (Some(ids), None)
            if table == TokenTable::LmHead
                && context.spec.tied_embeddings
                && trained_ids(config, TokenTable::Embed) == Some(ids) => {}
        (Some(ids), None) => {
            let message = format!(
                "trainable_token_indices names {} ids of {name}, and the file holds no rows for them",
                ids.len()
            );
            findings.error_all(AuditReason::TokenRowsMissing, message);
        }
        (Some(ids), Some(delta)) => {
            let rows = delta.shape.first().copied().unwrap_or(0);
            if rows != ids.len() {
                let message = format!(
                    "{rows} rows (shape {:?}), and trainable_token_indices names {} ids of {name}",
                    delta.shape,
                    ids.len()
                );
                findings.error(AuditReason::TokenCountMismatch, &delta.name, message);
            }
            check_ids(context, (ids, delta), overlays, findings);
        }
    }
}

fn trained_ids(config: &AdapterConfig, table: TokenTable) -> Option<&[u32]> {
    let tokens = config.trainable_tokens()?;
    match table {
        TokenTable::Embed => tokens.embed.as_deref(),
        TokenTable::LmHead => tokens.lm_head.as_deref(),
    }
}

/// Ids are in the model's vocabulary or in the adapter's own table.
fn check_ids(
    context: Context<'_>,
    (ids, delta): (&[u32], &OverlayTensor),
    overlays: &OverlayTensors,
    findings: &mut Findings,
) {
    let own = own_rows(overlays, delta.module);
    let vocab = context.spec.vocab_size;
    let is_beyond = |id: &&u32| **id as usize >= vocab.max(own);
    if let Some(first) = ids.iter().find(is_beyond) {
        let message = format!(
            "token id {first} ({} such ids) of {}: the model has {vocab} tokens, the adapter's own table {own} rows",
            ids.iter().filter(is_beyond).count(),
            delta.module.peft_name()
        );
        findings.error(AuditReason::TokenBeyondVocab, &delta.name, message);
    }
}

/// Every table of `modules_to_save` is in the file.
fn check_saved(
    context: Context<'_>,
    (config, overlays): (&AdapterConfig, &OverlayTensors),
    findings: &mut Findings,
) {
    let has = |table| overlays.get(table, OverlayTensorKind::FullTable).is_some();
    for saved in config.modules_to_save() {
        // Tied tables are one parameter, which PEFT saves under one of its names when told to keep them tied.
        let by_tie = context.spec.tied_embeddings
            && config.ensure_weight_tying()
            && TABLES.into_iter().any(has);
        if !has(saved.table) && !by_tie {
            let message = format!(
                "modules_to_save names `{}`, and the file holds no {}.weight",
                saved.name,
                saved.table.peft_name()
            );
            findings.error_all(AuditReason::SavedModuleMissing, message);
        }
    }
}

/// With `ensure_weight_tying`, `lm_head.lora_A` is `lora_embedding_B` transposed and `lm_head.lora_B` is `lora_embedding_A`
/// transposed.
fn check_tied(context: Context<'_>, inventory: &Inventory, findings: &mut Findings) {
    let Some(Halves { a, b, .. }) = &inventory.head else {
        return;
    };
    let embedding = |kind| {
        inventory
            .overlays
            .get(TokenTable::Embed, kind)
            .map(|t| t.id)
    };
    let sides = [
        (*a, embedding(OverlayTensorKind::EmbeddingB)),
        (*b, embedding(OverlayTensorKind::EmbeddingA)),
    ];
    for (head, embedding) in sides {
        let (Some(head), Some(embedding)) = (head, embedding) else {
            continue;
        };
        if !is_transpose(context, head, embedding) {
            let message = format!(
                "ensure_weight_tying is set, and this is not the transpose of {}",
                context.name(embedding)
            );
            findings.error(AuditReason::TiedLoraMismatch, context.name(head), message);
        }
    }
}

/// Same dtype, swapped shape, the same bytes in every element as far as the values are there.
fn is_transpose(context: Context<'_>, one: TensorId, other: TensorId) -> bool {
    let (&[rows, columns], &[m, n]) = (context.shape(one), context.shape(other)) else {
        return false;
    };
    if (rows, columns) != (n, m) || context.tensor(one).dtype != context.tensor(other).dtype {
        return false;
    }
    let Some(store) = context.values else {
        return true; // Not known; what the header alone tells is no mismatch.
    };
    let (x, y) = (store.tensor_bytes(one), store.tensor_bytes(other));
    let size = x.len().checked_div(rows * columns).unwrap_or(0);
    let at = |index: usize| index * size..(index + 1) * size;
    (0..rows).all(|i| (0..columns).all(|j| x[at(i * columns + j)] == y[at(j * rows + i)]))
}
