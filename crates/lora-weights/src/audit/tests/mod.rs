//! One refusal for each reason, from tensors in memory.

use super::*;
use crate::names::specs;
use crate::{
    ExpertPoolSpec, LoraModule, MemoryTensor, ModuleSet, RejectReason, StackedLayout, TensorDtype,
};
use half::bf16;
use lora_config::{LoraBLayout, ModelFamily};
use proptest::prelude::*;

mod experts;
mod tables;
mod targets;

const Q0: &str = "base_model.model.model.layers.0.self_attn.q_proj";

const Q1: &str = "base_model.model.model.layers.1.self_attn.q_proj";

const EMBED: &str = "base_model.model.model.embed_tokens";

const HEAD: &str = "base_model.model.lm_head";

const EXPERTS1: &str = "base_model.model.model.layers.1.mlp.experts";

fn tensor(name: impl Into<String>, rows: usize, columns: usize) -> MemoryTensor {
    MemoryTensor::from_f32(name, [rows, columns], &vec![0.5; rows * columns])
}

/// A of `[rank, k_in]` and B of `[n_out, rank]`.
fn pair(module: &str, rank: usize, k_in: usize, n_out: usize) -> [MemoryTensor; 2] {
    [
        tensor(format!("{module}.lora_A.weight"), rank, k_in),
        tensor(format!("{module}.lora_B.weight"), n_out, rank),
    ]
}

/// Rank 2 pairs on q_proj of both layers of a model with hidden size and heads of 32.
fn both_q() -> Vec<MemoryTensor> {
    [pair(Q0, 2, 32, 32), pair(Q1, 2, 32, 32)]
        .into_iter()
        .flatten()
        .collect()
}

/// A config with `r` 2, `lora_alpha` 4 and these further fields.
fn config(fields: &str) -> String {
    let comma = if fields.is_empty() { "" } else { "," };
    let targets = if fields.contains("\"target_modules\"") {
        ""
    } else {
        r#""target_modules": ["q_proj"],"#
    };
    format!(
        r#"{{"peft_type": "LORA", "r": 2, "lora_alpha": 4, {targets} "use_rslora": false{comma}{fields}}}"#
    )
}

fn pool() -> PoolSpec {
    let mut pool = PoolSpec::new(1, 16);
    pool.experts = Some(ExpertPoolSpec {
        max_rank: 8,
        units: 64,
    });
    pool
}

struct Try {
    spec: ModelSpec,
    pool: PoolSpec,
    fields: &'static str,
    tensors: Vec<MemoryTensor>,
}

impl Try {
    fn new(fields: &'static str, tensors: impl IntoIterator<Item = MemoryTensor>) -> Self {
        Self {
            spec: specs::llama(),
            pool: pool(),
            fields,
            tensors: tensors.into_iter().collect(),
        }
    }

    fn on(mut self, spec: ModelSpec) -> Self {
        self.spec = spec;
        self
    }

    fn with(mut self, change: impl FnOnce(&mut PoolSpec)) -> Self {
        change(&mut self.pool);
        self
    }

    fn report(self) -> AuditReport {
        let store = AdapterStore::from_tensors(config(self.fields), self.tensors).unwrap();
        let config =
            parse_peft_adapter_config(store.config_json(), &ParseOptions::default()).unwrap();
        let report = audit_adapter(&store, &config, &self.spec, &self.pool);
        if report.ok() {
            assert_eq!(report.applied + report.ignored.len(), report.tensors);
        }
        for pair in &report.pairs {
            let (mut a, mut b) = (
                vec![bf16::ZERO; pair.rank as usize * pair.k_in],
                vec![bf16::ZERO; pair.n_out * pair.rank as usize],
            );
            pair.source.read_a(&store, &mut a);
            pair.source.read_b(&store, &mut b, pair.rank as usize);
        }
        report
    }

    /// The report loads with no finding at all.
    #[track_caller]
    fn loads(self) -> AuditReport {
        let report = self.report();
        assert_eq!(report.findings, [], "no finding");
        report
    }

    /// The only error is one of this reason.
    #[track_caller]
    fn refused(self, reason: AuditReason) -> Finding {
        self.refused_as(reason.as_str())
    }

    #[track_caller]
    fn refused_as(self, reason: &str) -> Finding {
        let report = self.report();
        let errors: Vec<Finding> = report.errors().cloned().collect();
        let reasons: Vec<&str> = errors
            .iter()
            .map(|finding| finding.reason.as_str())
            .collect();
        assert_eq!(reasons, [reason], "{errors:?}");
        errors[0].clone()
    }

    /// The report loads with one warning, of this reason.
    #[track_caller]
    fn warns(self, reason: AuditReason) -> Finding {
        let report = self.report();
        assert!(report.ok(), "{:?}", report.findings);
        assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
        assert_eq!(report.findings[0].reason, reason.as_str());
        report.findings[0].clone()
    }
}

fn without(mut tensors: Vec<MemoryTensor>, index: usize) -> Vec<MemoryTensor> {
    tensors.remove(index);
    tensors
}

fn plus(more: impl IntoIterator<Item = MemoryTensor>) -> Vec<MemoryTensor> {
    both_q().into_iter().chain(more).collect()
}

#[test]

fn a_whole_adapter_loads_with_its_ranks_scales_and_bytes() {
    let report = Try::new("", both_q()).loads();
    assert_eq!(report.applied, 4);
    assert_eq!(report.pairs.len(), 2);
    assert_eq!((report.pairs[0].rank, report.pairs[0].scale), (2, 2.0));
    assert_eq!(report.max_rank(), 2);
    let slot = pool_slot_bytes(&specs::llama(), &pool()).unwrap();
    assert_eq!(report.bytes.slot, slot);
    assert_eq!((report.bytes.expert, report.bytes.overlay), (0, 0));
}

#[test]

fn errors_stand_before_warnings_and_all_are_reported_at_once() {
    let mut tensors = both_q();
    tensors[0] = tensor(format!("{Q0}.lora_A.weight"), 2, 33);
    tensors.push(tensor("base_model.model.junk.weight", 1, 1));
    let fields = r#""target_modules": ["q_proj", "nothing"], "rank_pattern": {"x": 3}"#;
    let report = Try::new(fields, tensors).report();
    let reasons: Vec<&str> = report.findings.iter().map(|f| f.reason.as_str()).collect();
    let wanted = [
        "unrecognized-tensor",
        "shape-mismatch",
        "unmatched-target",
        "unmatched-pattern",
    ];
    assert_eq!(reasons, wanted);
    assert_eq!(report.pairs.len(), 1, "the other pair is still found");
}

#[test]

fn two_names_for_one_matrix_are_a_duplicate() {
    let other = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight";
    let finding = Try::new("", plus([tensor(other, 2, 32)])).refused(AuditReason::DuplicateTensor);
    assert!(finding.message.contains(Q0), "{finding}");
}

#[test]

fn half_a_pair_is_unpaired() {
    let finding = Try::new("", without(both_q(), 3)).refused(AuditReason::UnpairedTensor);
    assert!(finding.message.contains("lora_B"), "{finding}");
    let finding = Try::new("", without(both_q(), 0)).refused(AuditReason::UnpairedTensor);
    assert!(finding.message.contains("lora_A"), "{finding}");
}

#[test]

fn a_shape_that_does_not_fit_names_both_shapes() {
    let a = |shape: &[usize]| {
        let mut tensors = both_q();
        let count = shape.iter().product();
        tensors[0] =
            MemoryTensor::from_f32(format!("{Q0}.lora_A.weight"), shape, &vec![0.5; count]);
        Try::new("", tensors)
            .refused(AuditReason::ShapeMismatch)
            .message
    };
    let message = a(&[2, 31]);
    assert!(
        message.contains("[2, 31]") && message.contains("[2, 32]"),
        "{message}"
    );
    assert!(a(&[32, 2]).contains("transposed"));
    assert!(a(&[64]).contains("shard"));
    assert!(a(&[1, 2, 32]).contains("3 dimensions"));
    assert!(a(&[]).contains("0 dimensions"));
}

#[test]

fn ranks_agree_between_a_b_and_config() {
    let tensors = [pair(Q0, 3, 32, 32), pair(Q1, 2, 32, 32)]
        .into_iter()
        .flatten();
    let finding = Try::new("", tensors).refused(AuditReason::RankMismatch);
    assert!(finding.message.contains("rank 3") && finding.message.contains("rank 2"));
    let mut tensors = both_q();
    tensors[1] = tensor(format!("{Q0}.lora_B.weight"), 32, 3);
    Try::new("", tensors).refused(AuditReason::RankMismatch);
    let tensors = [pair(Q0, 3, 32, 32), pair(Q1, 2, 32, 32)]
        .into_iter()
        .flatten();
    let report = Try::new(
        r#""rank_pattern": {"layers.0.self_attn.q_proj": 3}"#,
        tensors,
    )
    .loads();
    assert_eq!(report.pairs[0].rank, 3);
    assert_eq!(report.pairs[0].scale, 4.0 / 3.0);
}

#[test]

fn a_rank_over_the_pools_is_compared_before_rounding() {
    let pool = |rank| move |pool: &mut PoolSpec| pool.max_rank = rank;
    Try::new("", both_q()).with(pool(2)).loads();
    let report = Try::new("", both_q()).with(pool(1)).report();
    assert!(report.errors().all(|f| f.reason == "rank-exceeds-pool"));
    assert_eq!(report.errors().count(), 2);
}

#[test]

fn a_matrix_without_values_has_no_rank() {
    let mut tensors = both_q();
    tensors[0] = tensor(format!("{Q0}.lora_A.weight"), 0, 32);
    Try::new("", tensors).refused(AuditReason::ZeroRank);
}

#[test]

fn dtypes_that_do_not_load_are_named() {
    let mut tensors = both_q();
    let header = br#"{"x":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}"#;
    let f64 = crate::parse_safetensors_header(header, 8).unwrap()[0]
        .meta
        .dtype;
    tensors[0] = MemoryTensor::new(format!("{Q0}.lora_A.weight"), f64, [2, 32], vec![0; 512]);
    let finding = Try::new("", tensors).refused(AuditReason::UnsupportedDtype);
    assert!(finding.message.contains("F64"), "{finding}");
}

#[test]

fn halves_load_and_what_overflows_bf16_does_not() {
    let halves = |bits: u16| {
        let bytes: Vec<u8> = bits.to_le_bytes().repeat(64);
        let mut tensors = both_q();
        tensors[0] = MemoryTensor::new(
            format!("{Q0}.lora_A.weight"),
            TensorDtype::F16,
            [2, 32],
            bytes,
        );
        Try::new("", tensors)
    };
    halves(0x7bff).loads();
    halves(0x7c00).refused(AuditReason::NonFiniteWeights);
    let single = |value: f32| {
        let mut values = vec![0.5; 64];
        values[40] = value;
        let mut tensors = both_q();
        tensors[2] = MemoryTensor::from_f32(format!("{Q1}.lora_A.weight"), [2, 32], &values);
        Try::new("", tensors)
    };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        let finding = single(bad).refused(AuditReason::NonFiniteWeights);
        assert!(finding.message.contains("value 40"), "{finding}");
        assert!(finding.tensor.unwrap().starts_with(Q1));
    }
    single(3.38e38).loads();
}

#[test]

fn an_empty_file_is_an_empty_adapter_and_nothing_else() {
    Try::new("", []).refused(AuditReason::EmptyAdapter);
}

const DOWN: &str =
    r#""target_modules": [], "peft_version": "0.21.2", "target_parameters": ["experts.down_proj"]"#;

#[test]

fn parts_of_other_methods_are_refused_by_name() {
    let magnitude = tensor(format!("{Q0}.lora_magnitude_vector"), 1, 32);
    Try::new("", plus([magnitude])).refused(AuditReason::DoraUnimplemented);
    let bias = tensor(format!("{Q0}.lora_B.bias"), 1, 32);
    Try::new("", plus([bias])).refused(AuditReason::BiasUnimplemented);
    let base = tensor(format!("{Q0}.base_layer.weight"), 32, 32);
    Try::new("", plus([base])).refused_as("unrecognized-tensor");
    let velora = tensor(format!("{Q0}.lora_velora_embed"), 1, 8);
    Try::new("", plus([velora])).refused_as("unrecognized-tensor");
}

#[test]

fn one_file_holds_one_adapter() {
    let named = |name: &str| {
        let rename =
            |ab: &str, rows, columns| tensor(format!("{Q1}.{ab}.{name}.weight"), rows, columns);
        let q0 = [
            tensor(format!("{Q0}.lora_A.one.weight"), 2, 32),
            tensor(format!("{Q0}.lora_B.one.weight"), 32, 2),
        ];
        Try::new(
            "",
            q0.into_iter()
                .chain([rename("lora_A", 2, 32), rename("lora_B", 32, 2)]),
        )
    };
    named("one").loads();
    let finding = named("two").refused(AuditReason::TooManyAdapters);
    assert!(finding.message.contains("`one`") && finding.message.contains("`two`"));
}

#[test]

fn wrapped_names_load_and_say_so() {
    let wrapped = pair(&format!("_orig_mod.{Q0}"), 2, 32, 32);
    let tensors = wrapped.into_iter().chain(pair(Q1, 2, 32, 32));
    let finding = Try::new("", tensors).warns(AuditReason::Renamed);
    assert!(finding.message.contains("2 of 4"), "{finding}");
}

#[test]

fn an_untrained_adapter_loads_and_says_so() {
    let zero =
        |name: &str| MemoryTensor::from_f32(format!("{name}.lora_B.weight"), [32, 2], &[0.0; 64]);
    let mut tensors = both_q();
    tensors[1] = zero(Q0);
    tensors[3] = zero(Q1);
    Try::new("", tensors).warns(AuditReason::NoEffect);
    let mut tensors = both_q();
    tensors[1] = zero(Q0);
    Try::new("", tensors).loads();
}

#[test]

fn modules_left_out_of_the_pool_are_refused() {
    let v_only = |pool: &mut PoolSpec| pool.modules = ModuleSet::EMPTY.with(LoraModule::VProj);
    let report = Try::new("", both_q()).with(v_only).report();
    assert_eq!(report.errors().count(), 4);
    assert!(report.errors().all(|f| f.reason == "unsupported-module"));
}

#[test]

fn a_pool_that_cannot_be_laid_out_is_a_finding() {
    let huge = |pool: &mut PoolSpec| pool.max_rank = u32::MAX;
    let mut spec = specs::llama();
    spec.hidden_size = usize::MAX / 4;
    let report = Try::new("", both_q()).on(spec).with(huge).report();
    assert!(
        report
            .errors()
            .any(|f| f.reason == AuditReason::BadPool.as_str())
    );
}

#[test]

fn a_folder_with_both_files_bad_reports_both() {
    let dir = tempfile::tempdir().unwrap();
    let audit = || {
        audit_dir(
            dir.path(),
            &ParseOptions::default(),
            &specs::llama(),
            &pool(),
        )
    };
    let reasons = |report: AuditReport| -> Vec<String> {
        report.findings.into_iter().map(|f| f.reason).collect()
    };
    assert_eq!(
        reasons(audit()),
        ["missing-config-file", "missing-weights-file"]
    );
    std::fs::write(dir.path().join("adapter_config.json"), "{}").unwrap();
    std::fs::write(dir.path().join("adapter_model.safetensors"), "x").unwrap();
    let found = reasons(audit());
    assert!(found.contains(&"config-peft_type".to_owned()), "{found:?}");
    assert!(found.contains(&"bad-file".to_owned()), "{found:?}");
    let gone = dir.path().join("gone");
    let report = audit_dir(&gone, &ParseOptions::default(), &specs::llama(), &pool());
    assert_eq!(reasons(report), ["missing-weights-file"]);
}

#[test]

fn reasons_are_distinct() {
    let words: BTreeSet<&str> = AuditReason::ALL
        .iter()
        .map(|reason| reason.as_str())
        .collect();
    assert_eq!(words.len(), AuditReason::ALL.len());
    let names: BTreeSet<&str> = RejectReason::ALL
        .iter()
        .map(|reason| reason.as_str())
        .collect();
    assert!(words.is_disjoint(&names));
}

proptest! {
    /// Whatever the shapes and names, an audit answers, and a pair that it lets through can be read.
    #[test]
    fn any_tensors_are_audited_without_a_panic(
        shapes in prop::collection::vec(prop::collection::vec(0usize..40, 0..4), 1..6),
        names in prop::collection::vec(0usize..8, 6),
        fields in prop::sample::select(vec![
            "", DOWN, r#""trainable_token_indices": [1, 2]"#, r#""modules_to_save": ["embed_tokens"], "ensure_weight_tying": true"#,
        ]),
        model in 0usize..3,
    ) {
        let stems = [
            format!("{Q0}.lora_A.weight"), format!("{Q0}.lora_B.weight"), format!("{EXPERTS1}.lora_A.weight"),
            format!("{EXPERTS1}.lora_B.weight"), format!("{EMBED}.token_adapter.trainable_tokens_delta"),
            format!("{EMBED}.lora_embedding_B"), format!("{HEAD}.lora_A.weight"), format!("{HEAD}.weight"),
        ];
        let mut used = BTreeSet::new();
        let tensors: Vec<MemoryTensor> = shapes
            .iter()
            .zip(&names)
            .filter(|(_, name)| used.insert(**name))
            .map(|(shape, &name)| {
                let count = shape.iter().product();
                MemoryTensor::from_f32(stems[name].clone(), shape.clone(), &vec![1.0; count])
            })
            .collect();
        let mut spec = [specs::llama(), specs::qwen3_moe(), specs::gpt_oss()][model].clone();
        spec.tied_embeddings = true;
        let report = Try { spec, pool: pool(), fields, tensors }.report();
        prop_assert!(!report.findings.is_empty() || report.ok());
    }
}
