//! The config against the tensors.

use super::*;

#[test]

fn a_target_that_the_model_has_must_be_in_the_file() {
    let tensors = pair(Q0, 2, 32, 32);
    let finding = Try::new("", tensors).refused(AuditReason::UnmatchedTarget);
    assert!(
        finding.message.contains("layers.1.self_attn.q_proj"),
        "{finding}"
    );
    for fields in [
        r#""target_modules": ["q_proj", "lm_head"]"#,
        r#""target_modules": ["q_proj", "embed_tokens"]"#,
        r#""target_modules": ["q_proj", "mlp.up_proj"]"#,
        r#""target_modules": ".*\\.(q_proj|up_proj)""#,
    ] {
        Try::new(fields, both_q()).refused(AuditReason::UnmatchedTarget);
    }
    for fields in [
        r#""layers_to_transform": [0]"#,
        r#""exclude_modules": ["layers.1.self_attn.q_proj"]"#,
        r#""target_modules": ["layers.0.self_attn.q_proj"]"#,
    ] {
        Try::new(fields, pair(Q0, 2, 32, 32)).loads();
    }
}

#[test]

fn a_target_that_nobody_has_is_a_warning() {
    let fields = r#""target_modules": ["q_proj", "w1"]"#;
    let finding = Try::new(fields, both_q()).warns(AuditReason::UnmatchedTarget);
    assert!(finding.message.contains("`w1`"), "{finding}");
    let fields = r#""target_parameters": ["mlp.experts.gate_up_proj"]"#;
    Try::new(fields, both_q()).warns(AuditReason::UnmatchedTarget);
}

#[test]

fn parts_are_taken_where_the_policy_says_so() {
    let partial = |pool: &mut PoolSpec| pool.policy.allow_partial_targets = true;
    Try::new("", pair(Q0, 2, 32, 32))
        .with(partial)
        .warns(AuditReason::UnmatchedTarget);

    let gdn = "base_model.model.model.layers.0.linear_attn.in_proj_z";
    let q1 = pair(Q1, 2, 32, 64);
    let tensors: Vec<MemoryTensor> = pair(gdn, 2, 32, 24).into_iter().chain(q1).collect();
    let report = Try::new("", tensors)
        .on(specs::qwen3_5())
        .with(partial)
        .report();
    assert!(report.ok(), "{:?}", report.findings);
    assert_eq!(report.ignored.len(), 2);
    assert!(report.warnings().all(|f| f.reason == "gdn-target"));

    let mut tensors = both_q();
    tensors.push(tensor("base_model.model.model.norm.weight", 1, 32));
    Try::new("", tensors)
        .with(partial)
        .refused_as("unrecognized-tensor");
}

#[test]

fn nothing_left_to_apply_is_an_error() {
    let partial = |pool: &mut PoolSpec| pool.policy.allow_partial_targets = true;
    let gdn = "base_model.model.model.layers.0.linear_attn.in_proj_z";
    Try::new(r#""target_modules": ["in_proj_z"]"#, pair(gdn, 2, 32, 24))
        .on(specs::qwen3_5())
        .with(partial)
        .refused(AuditReason::NothingApplied);
}

#[test]

fn patterns_that_overlap_or_match_nothing_are_named() {
    let fields = r#""alpha_pattern": {"q_proj": 8, "layers.1.self_attn.q_proj": 2}"#;
    Try::new(fields, both_q()).warns(AuditReason::PatternOverlap);
    let fields = r#""alpha_pattern": {"v_proj": 8}"#;
    Try::new(fields, both_q()).warns(AuditReason::UnmatchedPattern);
}

#[test]

fn tensors_beside_the_targets_load_and_are_named() {
    let k = pair(
        "base_model.model.model.layers.0.self_attn.k_proj",
        2,
        32,
        16,
    );
    let finding = Try::new("", plus(k)).warns(AuditReason::UndeclaredTarget);
    assert!(finding.message.contains("k_proj"), "{finding}");
}

#[test]

fn a_warning_of_the_config_is_a_warning_of_the_audit() {
    let report = Try::new(r#""alpha_pattern": {"q_proj": -1}"#, both_q()).report();
    assert!(report.ok());
    assert!(report.warnings().any(|f| f.reason == "alpha-not-positive"));
}
