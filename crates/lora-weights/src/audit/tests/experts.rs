//! Experts and routers, one tensor each or all in one.

use super::*;

fn expert(n: usize) -> Vec<MemoryTensor> {
    let module = |proj: &str| format!("{EXPERTS1}.{n}.{proj}");
    [
        pair(&module("gate_proj"), 2, 32, 12),
        pair(&module("up_proj"), 2, 32, 12),
        pair(&module("down_proj"), 2, 12, 32),
    ]
    .into_iter()
    .flatten()
    .collect()
}

const EXPERT_TARGETS: &str =
    r#""target_modules": ["experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"]"#;

#[test]

fn experts_need_a_region_and_fit_it() {
    let three = || (0..3).flat_map(expert);
    let off = |pool: &mut PoolSpec| pool.experts = None;
    let finding = Try::new(EXPERT_TARGETS, expert(0))
        .on(specs::qwen3_moe())
        .with(off)
        .refused(AuditReason::ExpertLoraDisabled);
    assert!(finding.message.contains("6 tensors"), "{finding}");

    let small = |pool: &mut PoolSpec| pool.experts.as_mut().unwrap().max_rank = 1;
    let report = Try::new(EXPERT_TARGETS, expert(0))
        .on(specs::qwen3_moe())
        .with(small)
        .report();
    assert_eq!(report.errors().count(), 3);
    assert!(
        report
            .errors()
            .all(|f| f.reason == "expert-rank-exceeds-cap")
    );

    let report = Try::new(EXPERT_TARGETS, three())
        .on(specs::qwen3_moe())
        .report();
    assert!(report.ok());
    assert_eq!(
        report.bytes.expert,
        expert_router_bytes(&report.pairs, 8).unwrap()
    );
    assert!(report.pairs.iter().all(|pair| pair.rank == 2));
}

#[test]

fn missing_experts_are_named_and_load() {
    let tensors = expert(0)
        .into_iter()
        .chain(expert(2))
        .chain(pair(Q0, 2, 32, 32));
    let fields = r#""target_modules": ["layers.0.self_attn.q_proj", "gate_proj"], "exclude_modules": ["layers.0.mlp.gate_proj", "shared_expert.gate_proj"]"#;
    let report = Try::new(fields, tensors).on(specs::qwen3_moe()).report();
    assert!(report.ok(), "{:?}", report.findings);
    let missing = report
        .warnings()
        .find(|f| f.reason == "experts-missing")
        .unwrap();
    assert!(
        missing.message.contains("2 of 3 experts' gate_proj"),
        "{missing}"
    );
}

/// Stacked pairs on layer 1 of the MoE model: A covers `dim_a`, B `dim_b`.
fn stacked(module: &str, rank: usize, dim_a: usize, dim_b: usize) -> [MemoryTensor; 2] {
    pair(module, 3 * rank, dim_a, dim_b)
}

fn on_moe(fields: &'static str, tensors: impl IntoIterator<Item = MemoryTensor>) -> Try {
    Try::new(fields, tensors).on(specs::qwen3_moe())
}

#[test]

fn stacked_tensors_nest_in_the_order_of_the_model() {
    let inner = format!("{EXPERTS1}.base_layer");
    let tensors = || {
        stacked(&inner, 2, 32, 24)
            .into_iter()
            .chain(stacked(EXPERTS1, 2, 12, 32))
    };
    for fields in [
        r#""target_modules": [], "peft_version": "0.21.2", "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]"#,
        r#""target_modules": [], "peft_version": "0.21.2", "target_parameters": ["experts.down_proj", "experts.gate_up_proj"]"#,
    ] {
        let report = on_moe(fields, tensors()).loads();
        assert_eq!(report.pairs.len(), 9);
        assert_eq!(report.applied, 4);
        let path = "model.layers.1.mlp.experts.gate_up_proj";
        assert_eq!(
            report.pairs.iter().filter(|pair| pair.path == path).count(),
            6
        );
    }
}

#[test]

fn stacked_tensors_that_no_parameter_is_declared_for_are_refused() {
    let one = r#""target_modules": [], "peft_version": "0.21.2", "target_parameters": ["experts.down_proj"]"#;
    let inner = format!("{EXPERTS1}.base_layer");
    let tensors = stacked(&inner, 2, 32, 24)
        .into_iter()
        .chain(stacked(EXPERTS1, 2, 12, 32));
    on_moe(one, tensors).refused_as("fused-expert-lora");
    let report = on_moe("", stacked(EXPERTS1, 2, 12, 32)).report();
    let fused = report.errors().filter(|f| f.reason == "fused-expert-lora");
    assert_eq!(fused.count(), 2);
    let biases = r#""target_modules": [], "peft_version": "0.21.2", "target_parameters": ["experts.down_proj_bias"]"#;
    let report = on_moe(biases, stacked(EXPERTS1, 2, 12, 32)).report();
    assert!(report.errors().any(|f| f.reason == "fused-expert-lora"));
}

#[test]

fn stacked_tensors_under_a_name_of_another_writer_are_refused_for_the_name() {
    let fields = r#""target_modules": [], "peft_version": "0.21.2", "target_parameters": ["experts.down_proj"]"#;
    let tensors = stacked(&format!("{EXPERTS1}.down_proj"), 2, 12, 32);
    let report = on_moe(fields, tensors).report();
    let fused = report.errors().filter(|f| f.reason == "fused-expert-lora");
    let messages: Vec<&str> = fused.map(|f| f.message.as_str()).collect();
    assert_eq!(messages.len(), 2);
    assert!(
        messages.iter().all(|m| m.contains("not named as PEFT")),
        "{messages:?}"
    );
}

#[test]

fn a_declared_parameter_without_tensors_is_an_unmatched_target() {
    let fields = r#""target_modules": [], "peft_version": "0.21.2", "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]"#;
    let finding =
        on_moe(fields, stacked(EXPERTS1, 2, 12, 32)).refused(AuditReason::UnmatchedTarget);
    assert!(finding.message.contains("gate_up_proj"), "{finding}");
}

#[test]

fn stacked_shapes_are_checked_like_any_other() {
    on_moe(DOWN, stacked(EXPERTS1, 2, 12, 32)).loads();
    on_moe(DOWN, stacked(EXPERTS1, 2, 13, 32)).refused(AuditReason::ShapeMismatch);
    let report = on_moe(DOWN, stacked(EXPERTS1, 3, 12, 32)).report();
    assert_eq!(report.errors().count(), 2, "A and B each hold another rank");
    assert!(report.errors().all(|f| f.reason == "stacked-rank-mismatch"));
    on_moe(DOWN, without(stacked(EXPERTS1, 2, 12, 32).into(), 1))
        .refused(AuditReason::UnpairedTensor);
    let both = stacked(EXPERTS1, 2, 12, 32).into_iter().chain(expert(0));
    let report = on_moe(DOWN, both).report();
    assert!(report.errors().any(|f| f.reason == "duplicate-tensor"));
}

/// What A covers, for square stacked tensors of this version, on a model with these marks.
fn layout(version: &str, in_out: bool, transposed: bool) -> Option<StackedLayout> {
    let mut spec = specs::qwen3_moe();
    if in_out {
        spec = specs::gpt_oss();
        spec.family = if transposed {
            ModelFamily::GptOss
        } else {
            ModelFamily::Llama4
        };
    }
    let moe = spec.moe.as_mut().unwrap();
    moe.is_transposed = transposed;
    moe.expert_width = 32;
    let fields = format!(
        r#""target_modules": [], "peft_version": "{version}", "layers_to_transform": [1], "target_parameters": ["layers.1.mlp.experts.down_proj"]"#
    );
    let report = Try {
        spec,
        pool: pool(),
        fields: fields.leak(),
        tensors: stacked(EXPERTS1, 2, 32, 32).into(),
    }
    .report();
    match report.pairs.first()?.source {
        PairSource::Stacked(pair) => Some(pair.layout),
        PairSource::Whole { .. } => None,
    }
}

#[test]

fn square_stacks_lie_as_their_version_and_family_wrote_them() {
    use StackedLayout::{AIn, AOut};
    for (version, qwen, gpt_oss, llama4) in [
        ("0.16.0", None, None, None),
        ("0.17.0", Some(AOut), Some(AIn), Some(AIn)),
        ("0.18.1", Some(AOut), Some(AIn), Some(AIn)),
        ("0.19.0.dev0", Some(AOut), None, Some(AIn)),
        ("0.19.0", Some(AOut), Some(AOut), Some(AIn)),
        ("0.19.1.dev0", None, None, None),
        ("0.19.1", Some(AIn), Some(AIn), Some(AOut)),
        ("0.21.2", Some(AIn), Some(AIn), Some(AOut)),
        ("0.22.0.dev0", Some(AIn), Some(AIn), Some(AOut)),
    ] {
        assert_eq!(layout(version, false, false), qwen, "{version}");
        assert_eq!(layout(version, true, true), gpt_oss, "{version}");
        assert_eq!(layout(version, true, false), llama4, "{version}");
    }
}

#[test]

fn stacks_without_a_version_need_the_callers_word() {
    let square = || {
        let mut spec = specs::qwen3_moe();
        spec.moe.as_mut().unwrap().expert_width = 32;
        let fields = r#""target_modules": [], "target_parameters": ["experts.down_proj"]"#;
        Try::new(fields, stacked(EXPERTS1, 2, 32, 32)).on(spec)
    };
    let report = square().report();
    let named = |word: &str| report.errors().any(|f| f.message.contains(word));
    assert!(named("stacked_layout") && named("stacked_order"));
    let layout = |pool: &mut PoolSpec| pool.policy.stacked_layout = Some(StackedLayout::AOut);
    square()
        .with(layout)
        .refused(AuditReason::StackedLayoutAmbiguous);
    let both = |pool: &mut PoolSpec| {
        pool.policy.stacked_layout = Some(StackedLayout::AOut);
        pool.policy.stacked_order = Some(LoraBLayout::GroupedByExpert);
    };
    square().with(both).loads();
}

#[test]

fn a_config_that_marks_the_order_is_followed() {
    let fields = r#""target_modules": [], "lora_B_layout": "grouped_by_expert", "peft_version": "0.21.2", "target_parameters": ["experts.down_proj"]"#;
    let report = on_moe(fields, stacked(EXPERTS1, 2, 12, 32)).loads();
    let PairSource::Stacked(pair) = report.pairs[0].source else {
        panic!("a stacked pair");
    };
    assert_eq!(pair.order, LoraBLayout::GroupedByExpert);
}

#[test]

fn expert_tensors_of_every_layout_are_the_slices_of_their_product() {
    // A and B of consecutive numbers, so that each element says where it came from.
    let (experts, rank, dims) = (3usize, 2usize, (12usize, 32usize));
    let numbers = |count: usize| (0..count).map(|v| v as f32).collect::<Vec<_>>();
    for (layout, (dim_a, dim_b)) in [
        (StackedLayout::AIn, dims),
        (StackedLayout::AOut, (dims.1, dims.0)),
    ] {
        for order in [LoraBLayout::RankMajor, LoraBLayout::GroupedByExpert] {
            let columns = experts * rank;
            let a = MemoryTensor::from_f32("a", [columns, dim_a], &numbers(columns * dim_a));
            let b = MemoryTensor::from_f32("b", [dim_b, columns], &numbers(dim_b * columns));
            let store = AdapterStore::from_tensors("{}", [a, b]).unwrap();
            let (k_in, n_out) = dims;
            for expert in 0..experts {
                let rows = OutputRows {
                    start: 1,
                    step: 3,
                    count: n_out / 3,
                };
                let source = PairSource::Stacked(StackedPair {
                    a: TensorId(0),
                    b: TensorId(1),
                    experts,
                    expert,
                    rank,
                    layout,
                    order,
                    rows,
                });
                let (mut got_a, mut got_b) = (
                    vec![bf16::NAN; rank * k_in],
                    vec![bf16::NAN; rows.count * rank],
                );
                source.read_a(&store, &mut got_a);
                source.read_b(&store, &mut got_b, rank);
                let column = |k: usize| match order {
                    LoraBLayout::RankMajor => k * experts + expert,
                    LoraBLayout::GroupedByExpert => expert * rank + k,
                };
                let stored_a = |k: usize, i: usize| ((expert * rank + k) * dim_a + i) as f32;
                let stored_b = |o: usize, k: usize| (o * columns + column(k)) as f32;
                for k in 0..rank {
                    for i in 0..k_in {
                        let want = match layout {
                            StackedLayout::AIn => stored_a(k, i),
                            StackedLayout::AOut => stored_b(i, k),
                        };
                        assert_eq!(got_a[k * k_in + i], bf16::from_f32(want));
                    }
                    for row in 0..rows.count {
                        let o = rows.start + row * rows.step;
                        let want = match layout {
                            StackedLayout::AIn => stored_b(o, k),
                            StackedLayout::AOut => stored_a(k, o),
                        };
                        assert_eq!(got_b[row * rank + k], bf16::from_f32(want));
                    }
                }
            }
        }
    }
}

#[test]

fn a_router_adapted_as_a_parameter_takes_the_parameters_scale() {
    let gate = "base_model.model.model.layers.1.mlp.gate";
    let fields = r#""target_modules": [], "target_parameters": ["mlp.gate.weight"], "alpha_pattern": {"gate.weight": 6}"#;
    let report = on_moe(fields, pair(gate, 2, 32, 3)).loads();
    assert_eq!(report.pairs[0].scale, 3.0);
    assert_eq!(report.pairs[0].path, "model.layers.1.mlp.gate.weight");
}

#[test]

fn a_weight_that_target_parameters_names_must_be_in_the_file() {
    let other_q = || pair(Q0, 2, 32, 32);
    for (fields, path) in [
        (
            r#""target_modules": ["layers.0.self_attn.q_proj"], "target_parameters": ["mlp.gate.weight"]"#,
            "model.layers.1.mlp.gate",
        ),
        (
            r#""target_modules": [], "target_parameters": ["q_proj.weight"]"#,
            "model.layers.1.self_attn.q_proj",
        ),
    ] {
        let finding = on_moe(fields, other_q()).refused(AuditReason::UnmatchedTarget);
        assert!(finding.message.contains(path), "{finding}");
    }
    let fields = r#""target_modules": ["layers.0.self_attn.q_proj"], "target_parameters": ["mlp.router.weight"]"#;
    on_moe(fields, other_q()).warns(AuditReason::UnmatchedTarget);
}
