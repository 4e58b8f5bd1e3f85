//! Rows and tables of the vocabulary.

use super::*;

fn overlays(pool: &mut PoolSpec) {
    pool.policy.overlays = true;
}

fn delta(rows: usize) -> MemoryTensor {
    tensor(
        format!("{EMBED}.token_adapter.trainable_tokens_delta"),
        rows,
        32,
    )
}

#[test]
fn vocabulary_rows_load_where_the_policy_takes_them() {
    let fields = r#""trainable_token_indices": [5, 3]"#;
    Try::new(fields, plus([delta(2)])).refused(AuditReason::OverlayUnapplied);
    let report = Try::new(fields, plus([delta(2)])).with(overlays).loads();
    assert_eq!(report.applied, 5);
    assert_eq!(report.bytes.overlay, 2 * 32 * 2);
    assert_eq!(report.overlay_rows.embed.replaced, 2);
    let report = Try::new("", plus([tensor(format!("{HEAD}.weight"), 51, 32)]))
        .with(overlays)
        .loads();
    let head = OverlayTableRows {
        replaced: 48,
        extension: 3,
    };
    assert_eq!(report.overlay_rows.lm_head, head);
}

#[test]
fn rows_of_an_own_table_and_trained_rows_past_it_are_counted_once() {
    let base = |rows| tensor(format!("{EMBED}.token_adapter.base_layer.weight"), rows, 32);
    let fields = r#""trainable_token_indices": [5, 45, 3, 47]"#;
    let rows = |base| {
        let report = Try::new(fields, plus([delta(4), base]))
            .with(overlays)
            .loads();
        report.overlay_rows.embed
    };
    let counted = |replaced, extension| OverlayTableRows {
        replaced,
        extension,
    };
    assert_eq!(rows(base(40)), counted(42, 0));
    assert_eq!(rows(base(50)), counted(48, 2));
}

#[test]
fn rows_and_ids_agree() {
    let check =
        |fields: &'static str, tensors: Vec<MemoryTensor>| Try::new(fields, tensors).with(overlays);
    let ids = r#""trainable_token_indices": [5, 3]"#;
    check(ids, plus([delta(3)])).refused(AuditReason::TokenCountMismatch);
    check(ids, both_q()).refused(AuditReason::TokenRowsMissing);
    check("", plus([delta(2)])).refused(AuditReason::TokenIdsMissing);
    let far = r#""trainable_token_indices": [5, 48]"#;
    check(far, plus([delta(2)])).refused(AuditReason::TokenBeyondVocab);
    let base = || tensor(format!("{EMBED}.token_adapter.base_layer.weight"), 49, 32);
    check(far, plus([delta(2), base()])).loads();
    let wide = tensor(
        format!("{EMBED}.token_adapter.trainable_tokens_delta"),
        2,
        33,
    );
    check(ids, plus([wide])).refused(AuditReason::ShapeMismatch);
}

#[test]
fn a_tied_head_shares_the_embeddings_rows() {
    let fields = r#""trainable_token_indices": {"embed_tokens": [5, 3], "lm_head": [5, 3]}"#;
    let mut tied = specs::llama();
    tied.tied_embeddings = true;
    Try::new(fields, plus([delta(2)]))
        .on(tied)
        .with(overlays)
        .loads();
    Try::new(fields, plus([delta(2)]))
        .with(overlays)
        .refused(AuditReason::TokenRowsMissing);
}

#[test]
fn saved_tables_are_there_once() {
    let fields = r#""modules_to_save": ["lm_head"]"#;
    Try::new(fields, both_q()).refused(AuditReason::SavedModuleMissing);
    let table = || tensor(format!("{HEAD}.weight"), 48, 32);
    Try::new(fields, plus([table()])).with(overlays).loads();
    let second = tensor(format!("{HEAD}.modules_to_save.weight"), 48, 32);
    Try::new(fields, plus([table(), second]))
        .with(overlays)
        .refused(AuditReason::DuplicateOverlayTensor);
    let base = tensor(format!("{HEAD}.token_adapter.base_layer.weight"), 48, 32);
    Try::new(fields, plus([table(), base]))
        .with(overlays)
        .refused(AuditReason::DuplicateOverlayTensor);
    let original = tensor(format!("{HEAD}.original_module.weight"), 48, 32);
    Try::new(fields, plus([table(), original]))
        .with(overlays)
        .warns(AuditReason::IgnoredExtra);
}

#[test]
fn low_rank_tables_are_refused_and_checked_for_their_tie() {
    let a = tensor(format!("{EMBED}.lora_embedding_A"), 2, 48);
    Try::new("", plus([a])).refused_as(RejectReason::LoraEmbeddingUnimplemented.as_str());
    let head = pair(HEAD, 2, 32, 48);
    let report = Try::new("", plus(head)).report();
    assert_eq!(report.errors().count(), 2);
    assert!(
        report
            .errors()
            .all(|f| f.reason == "lm-head-lora-unimplemented")
    );

    let mut tied = specs::llama();
    tied.tied_embeddings = true;
    let mismatched = |value: f32| {
        let mut values = vec![0.5; 64];
        values[7] = value;
        let b = MemoryTensor::from_f32(format!("{EMBED}.lora_embedding_B"), [32, 2], &values);
        let tensors = plus(pair(HEAD, 2, 32, 48).into_iter().chain([b]));
        let report = Try::new(r#""ensure_weight_tying": true"#, tensors)
            .on(tied.clone())
            .report();
        report
            .errors()
            .any(|f| f.reason == AuditReason::TiedLoraMismatch.as_str())
    };
    assert!(mismatched(0.25));
    assert!(!mismatched(0.5));
}
