//! The audit on real adapter folders: what loads, what is refused and why, and that the pairs it finds are the delta PEFT computes.

use half::bf16;
use lora_config::{ConfigError, ModelSpec, ParseOptions};
use lora_weights::{
    AdapterStore, AuditReport, AuditedPair, ExpertPoolSpec, ExpertProj, LoraTarget, ModuleSet,
    PoolSpec, audit_dir,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What this workspace does not apply: `expect` says `ok` or names another way of taking it, and the audit refuses with this
/// reason (the first error).
const NOT_APPLIED: [(&str, &str); 21] = [
    ("gemma3_scaled_embedding", "lora-embedding-unimplemented"),
    ("gpt2_conv1d", "model-config"),
    ("gpt2_dora_conv1d", "model-config"),
    ("llama_dora", "config-use_dora"),
    ("llama_dora_embedding", "config-use_dora"),
    ("llama_dora_rslora", "config-use_dora"),
    ("llama_embed_lmhead", "lm-head-lora-unimplemented"),
    ("llama_embed_lmhead_base_saved", "unrecognized-tensor"),
    ("llama_f64_tensors", "unsupported-dtype"),
    ("llama_modules_to_save_norm", "config-modules_to_save"),
    ("llama_seqcls_score", "config-modules_to_save"),
    ("llama_tied_both_lora", "lm-head-lora-unimplemented"),
    ("llama_tied_lmhead_lora", "lm-head-lora-unimplemented"),
    ("moe_3d_tensors", "shape-mismatch"),
    ("name_mlx", "config-peft_type"),
    ("qwen2_bias_all", "config-bias"),
    ("qwen2_bias_lora_only", "config-bias"),
    ("qwen2_lora_bias", "config-lora_bias"),
    ("qwen3_vl_names", "non-layer-module"),
    ("variant_alora", "config-alora_invocation_tokens"),
    ("variant_bdlora", "config-use_bdlora"),
];

/// A reason that each damaged case is refused with.
const REFUSED: [(&str, &str); 53] = [
    ("bad_a_wrong_in", "shape-mismatch"),
    ("bad_alpha_null", "config-lora_alpha"),
    ("bad_alpha_string", "config-lora_alpha"),
    ("bad_b_transposed", "shape-mismatch"),
    ("bad_base_layer_differs", "unrecognized-tensor"),
    ("bad_bias_unknown", "config-bias"),
    ("bad_config_duplicate_key", "config-duplicate-key"),
    ("bad_config_not_json", "config-not-json"),
    ("bad_dora_without_magnitude", "config-use_dora"),
    ("bad_duplicate_json_key", "bad-file"),
    ("bad_embedding_wrong_vocab", "shape-mismatch"),
    ("bad_empty_file", "bad-file"),
    ("bad_expert_negative", "malformed-expert-index"),
    ("bad_expert_out_of_range", "expert-out-of-range"),
    ("bad_extra_unknown", "not-peft-key"),
    ("bad_f8_weights", "unsupported-dtype"),
    ("bad_header_not_json", "bad-file"),
    ("bad_layer_out_of_range", "layer-out-of-range"),
    (
        "bad_layer_replication_with_plain_base",
        "config-layer_replication",
    ),
    ("bad_lora_e_adalora", "unrecognized-tensor"),
    ("bad_missing_a", "unpaired-tensor"),
    ("bad_modules_to_save_missing", "saved-module-missing"),
    ("bad_nan", "non-finite-weights"),
    ("bad_negative_shape", "bad-file"),
    ("bad_no_tensors", "empty-adapter"),
    ("bad_no_weights_file", "missing-weights-file"),
    ("bad_offset_shape_disagree", "bad-file"),
    ("bad_one_dim", "shape-mismatch"),
    ("bad_peft_type_missing", "config-peft_type"),
    ("bad_peft_type_other", "config-peft_type"),
    ("bad_r_mismatch", "rank-mismatch"),
    ("bad_r_negative", "config-r"),
    ("bad_r_zero", "config-r"),
    ("bad_stacked_rank_not_multiple", "stacked-rank-mismatch"),
    ("bad_stacked_without_target_parameters", "fused-expert-lora"),
    ("bad_target_missing_in_file", "unmatched-target"),
    ("bad_tied_lora_inconsistent", "tied-lora-mismatch"),
    ("bad_token_beyond_vocab", "token-beyond-vocab"),
    ("bad_token_count", "token-count-mismatch"),
    ("bad_token_ids_missing", "token-ids-missing"),
    ("bad_token_negative", "config-trainable_token_indices"),
    ("bad_token_rows_missing", "token-rows-missing"),
    ("bad_truncated_data", "bad-file"),
    ("bad_unknown_dtype", "unsupported-dtype"),
    ("bad_zero_size", "zero-rank"),
    ("llama_layer_replication", "config-layer_replication"),
    ("moe_layout_square_no_version", "stacked-layout-ambiguous"),
    ("variant_kasa", "config-kasa_config"),
    ("variant_olora_raw", "config-init_lora_weights"),
    ("variant_pissa_raw", "config-init_lora_weights"),
    ("variant_tokens_only", "config-peft_type"),
    ("name_no_prefix", "not-peft-key"),
    ("llama_tokens_unsorted", "overlay-unimplemented"),
];

struct Case {
    name: String,
    dir: PathBuf,
    json: Value,
}

impl Case {
    fn all() -> Vec<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/cases");
        let mut cases: Vec<Self> = std::fs::read_dir(&root)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|dir| dir.join("case.json").exists())
            .map(|dir| {
                let text = std::fs::read_to_string(dir.join("case.json")).unwrap();
                Self {
                    name: dir.file_name().unwrap().to_str().unwrap().to_owned(),
                    json: serde_json::from_str(&text).unwrap(),
                    dir,
                }
            })
            .collect();
        cases.sort_by(|a, b| a.name.cmp(&b.name));
        cases
    }

    fn expect(&self) -> &str {
        self.json["expect"].as_str().unwrap()
    }

    fn adapter(&self) -> PathBuf {
        self.dir.join("adapter")
    }

    fn spec(&self) -> Result<ModelSpec, ConfigError> {
        ModelSpec::from_hf_config(&std::fs::read_to_string(self.dir.join("config.json")).unwrap())
    }

    fn audit(&self, pool: &PoolSpec) -> AuditReport {
        match self.spec() {
            Ok(spec) => audit_dir(&self.adapter(), &ParseOptions::default(), &spec, pool),
            Err(error) => AuditReport::unknown_model(&*self.name, &error),
        }
    }

    /// Tensors recorded beside the case, as F32.
    fn golden(&self) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
        let Ok(bytes) = std::fs::read(self.dir.join("golden.safetensors")) else {
            return BTreeMap::new();
        };
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        file.iter()
            .filter(|(_, view)| view.dtype() == safetensors::Dtype::F32)
            .map(|(name, view)| {
                let values = view
                    .data()
                    .as_chunks()
                    .0
                    .iter()
                    .map(|v| f32::from_le_bytes(*v));
                (name.to_owned(), (view.shape().to_vec(), values.collect()))
            })
            .collect()
    }
}

/// Everything that is applied, enabled.
fn pool() -> PoolSpec {
    let mut pool = PoolSpec::new(1, 64);
    pool.modules = ModuleSet::everything();
    pool.experts = Some(ExpertPoolSpec {
        max_rank: 64,
        units: 1024,
    });
    pool.policy.overlays = true;
    pool
}

fn show(report: &AuditReport) -> String {
    let findings: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    findings.join("\n")
}

#[test]
fn every_case_that_this_workspace_applies_loads_and_loses_no_tensor() {
    let mut loaded = 0;
    for case in Case::all() {
        let listed = |table: &[(&str, &str)]| table.iter().any(|(name, _)| *name == case.name);
        let mut pool = pool();
        pool.policy.accept_bare_names = case.name == "name_no_prefix";
        let report = case.audit(&pool);
        let wanted = match case.expect() {
            "ok" | "ok_ignore_extra" | "ok_warn_no_effect" | "ok_warn_renamed" | "token_rows"
            | "full_weights" => !listed(&NOT_APPLIED),
            _ => false,
        };
        assert_eq!(report.ok(), wanted, "{}: {}", case.name, show(&report));
        if wanted {
            assert_eq!(
                report.applied + report.ignored.len(),
                report.tensors,
                "{}",
                case.name
            );
            loaded += 1;
        }
    }
    assert!(loaded >= 35, "{loaded} cases load");
}

#[test]
fn every_case_that_is_not_applied_is_refused_by_name() {
    let cases: BTreeMap<String, Case> = Case::all()
        .into_iter()
        .map(|case| (case.name.clone(), case))
        .collect();
    for (name, reason) in NOT_APPLIED {
        let report = cases[name].audit(&pool());
        let first = report
            .errors()
            .next()
            .map(|finding| finding.reason.as_str());
        assert_eq!(first, Some(reason), "{name}: {}", show(&report));
    }
}

#[test]
fn every_damaged_case_is_refused_for_what_is_wrong_with_it() {
    let mut refusals: Vec<Case> = Case::all();
    refusals.retain(|case| REFUSED.iter().any(|(name, _)| *name == case.name));
    assert_eq!(refusals.len(), REFUSED.len());
    for case in refusals {
        let (_, reason) = REFUSED.iter().find(|(name, _)| *name == case.name).unwrap();
        let mut pool = pool();
        pool.policy.overlays = *reason != "overlay-unimplemented";
        let report = case.audit(&pool);
        let found = report.errors().any(|finding| finding.reason == *reason);
        assert!(found, "{}: {}", case.name, show(&report));
    }
    let unlisted = Case::all().into_iter().filter(|case| {
        case.expect() == "refuse" && !REFUSED.iter().any(|(name, _)| *name == case.name)
    });
    let unlisted: Vec<String> = unlisted.map(|case| case.name).collect();
    assert_eq!(unlisted, Vec::<String>::new());
}

#[test]
fn warnings_say_what_a_person_should_know() {
    for case in Case::all() {
        let report = case.audit(&pool());
        let warned = |reason: &str| report.warnings().any(|finding| finding.reason == reason);
        match case.expect() {
            "ok_warn_no_effect" => assert!(warned("no-effect"), "{}", case.name),
            "ok_warn_renamed" => assert!(warned("renamed"), "{}", case.name),
            "ok_ignore_extra" => {
                assert!(warned("ignored-extra"), "{}", case.name);
                assert!(!report.ignored.is_empty());
            }
            _ => {}
        }
        if case.name == "llama_pattern_order" {
            assert!(warned("pattern-overlap"));
        }
    }
}

#[test]
fn ambiguous_stacked_experts_load_once_the_caller_says_how_they_lie() {
    use lora_config::LoraBLayout;
    use lora_weights::StackedLayout;
    let case = Case::all()
        .into_iter()
        .find(|c| c.name == "moe_layout_square_no_version")
        .unwrap();
    let mut pool = pool();
    pool.policy.stacked_layout = Some(StackedLayout::AIn);
    assert_eq!(
        case.audit(&pool).errors().count(),
        2,
        "the order is still open on both layers"
    );
    pool.policy.stacked_order = Some(LoraBLayout::RankMajor);
    assert!(case.audit(&pool).ok());
}

#[test]
fn ranks_and_scales_are_those_that_peft_used() {
    let mut compared = 0;
    for case in Case::all() {
        let report = case.audit(&pool());
        if !report.ok() {
            continue;
        }
        for module in case.json["modules"].as_array().unwrap() {
            let path = match module["parameter"].as_str() {
                Some(parameter) => format!("{}.{parameter}", module["module"].as_str().unwrap()),
                None => module["module"].as_str().unwrap().to_owned(),
            };
            let of_module = |pair: &&AuditedPair| pair.path == path;
            let pairs: Vec<&AuditedPair> = report.pairs.iter().filter(of_module).collect();
            let table = path.ends_with("embed_tokens") || path.ends_with("lm_head");
            assert!(!pairs.is_empty() || table, "{}: {path}", case.name);
            for pair in pairs {
                assert_eq!(
                    u64::from(pair.rank),
                    module["r"].as_u64().unwrap(),
                    "{path}"
                );
                let scale = module["scaling"].as_f64().unwrap() as f32;
                assert_eq!(pair.scale, scale, "{}: {path}", case.name);
                compared += 1;
            }
        }
    }
    assert!(compared > 300, "{compared} pairs compared");
}

/// A pair's values.
struct Matrices {
    a: Vec<f32>,
    b: Vec<f32>,
    rank: usize,
}

impl Matrices {
    fn read(store: &AdapterStore, pair: &AuditedPair) -> Self {
        let rank = pair.rank as usize;
        let mut a = vec![bf16::NAN; rank * pair.k_in];
        // B at a stride wider than the rank, as packing reads it.
        let stride = rank + 3;
        let mut b = vec![bf16::NAN; pair.n_out * stride];
        pair.source.read_a(store, &mut a);
        pair.source.read_b(store, &mut b, stride);
        let rows = b.chunks(stride).flat_map(|row| &row[..rank]);
        Self {
            b: rows.map(|v| v.to_f32()).collect(),
            a: a.iter().map(|v| v.to_f32()).collect(),
            rank,
        }
    }

    /// Element `(o, i)` of B A, and the sum of its terms' magnitudes.
    fn product(&self, o: usize, i: usize, k_in: usize) -> (f32, f32) {
        let terms = (0..self.rank).map(|k| self.b[o * self.rank + k] * self.a[k * k_in + i]);
        terms.fold((0.0, 0.0), |(sum, size), term| {
            (sum + term, size + term.abs())
        })
    }
}

/// A and B are each rounded to BF16, by half of 2^-8 at most.
fn close(got: f32, wanted: f32, size: f32) -> bool {
    (got - wanted).abs() <= size / 128.0 + 1e-5 * (1.0 + wanted.abs())
}

#[test]
fn pairs_give_the_outputs_that_peft_recorded() {
    let mut compared = 0;
    for case in Case::all() {
        let report = case.audit(&pool());
        if !report.ok() {
            continue;
        }
        let (golden, store) = (case.golden(), AdapterStore::open(&case.adapter()).unwrap());
        for pair in &report.pairs {
            let path = pair.path.strip_suffix(".weight").unwrap_or(&pair.path);
            let recorded = |what: &str| golden.get(&format!("{path}|{what}"));
            let (Some((shape, x)), Some((_, base)), Some((_, out))) =
                (recorded("x"), recorded("base"), recorded("out"))
            else {
                continue;
            };
            let matrices = Matrices::read(&store, pair);
            let (k, n) = (pair.k_in, pair.n_out);
            for row in 0..shape[0] {
                for o in 0..n {
                    let terms = (0..k).map(|i| {
                        let (product, size) = matrices.product(o, i, k);
                        let x = x[row * k + i];
                        (product * x, size * x.abs())
                    });
                    let (delta, size) = terms.fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
                    let wanted = out[row * n + o] - base[row * n + o];
                    let (delta, size) = (pair.scale * delta, pair.scale.abs() * size);
                    assert!(
                        close(delta, wanted, size),
                        "{} {path} [{row}, {o}]: {delta} for {wanted}",
                        case.name
                    );
                }
            }
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared} modules compared");
}

#[test]
fn stacked_experts_give_the_weights_that_peft_adapted() {
    use lora_config::{GateUpOrder, StackedAxes};
    let mut compared = BTreeMap::new();
    for case in Case::all() {
        let report = case.audit(&pool());
        let (true, Ok(spec)) = (report.ok(), case.spec()) else {
            continue;
        };
        let (golden, store) = (case.golden(), AdapterStore::open(&case.adapter()).unwrap());
        for pair in &report.pairs {
            let (LoraTarget::Expert { n, proj }, Some(moe)) = (pair.target, &spec.moe) else {
                continue;
            };
            let recorded = |what: &str| golden.get(&format!("{}|{what}", pair.path));
            let (Some((shape, w)), Some((_, adapted))) = (recorded("w"), recorded("w_adapted"))
            else {
                continue;
            };
            let matrices = Matrices::read(&store, pair);
            for o in 0..pair.n_out {
                let row = match (proj, moe.gate_up) {
                    (ExpertProj::Down, _) | (ExpertProj::Gate, GateUpOrder::Concatenated) => o,
                    (ExpertProj::Up, GateUpOrder::Concatenated) => moe.expert_width + o,
                    (ExpertProj::Gate, GateUpOrder::Interleaved) => 2 * o,
                    (ExpertProj::Up, GateUpOrder::Interleaved) => 2 * o + 1,
                };
                for i in 0..pair.k_in {
                    let at = n * shape[1] * shape[2]
                        + match moe.stacked_axes {
                            StackedAxes::OutIn => row * shape[2] + i,
                            StackedAxes::InOut => i * shape[2] + row,
                        };
                    let (product, size) = matrices.product(o, i, pair.k_in);
                    let (delta, size) = (pair.scale * product, pair.scale.abs() * size);
                    let wanted = adapted[at] - w[at];
                    assert!(
                        close(delta, wanted, size),
                        "{} {} expert {n} {proj:?} [{o}, {i}]: {delta} for {wanted}",
                        case.name,
                        pair.path
                    );
                }
            }
            *compared.entry(case.name.clone()).or_insert(0) += 1;
        }
    }
    for name in [
        "llama4_params",
        "mixtral_params",
        "moe_layout_gpt_oss_019_0",
        "moe_layout_peft018",
        "moe_layout_peft018_square",
        "moe_layout_unsloth_marked",
        "qwen3_5_moe_mixed",
        "qwen3_moe_params",
        "qwen3_moe_params_down_only",
        "qwen3_moe_params_gate_up_only",
        "qwen3_moe_params_square",
        "qwen3_moe_v4_targets",
    ] {
        assert!(compared.contains_key(name), "{name} was not compared");
    }
}

#[test]
fn a_report_is_json_of_a_fixed_shape() {
    let case = Case::all()
        .into_iter()
        .find(|c| c.name == "qwen3_moe_params")
        .unwrap();
    let json: Value = serde_json::from_str(&case.audit(&pool()).to_json()).unwrap();
    assert_eq!(json["ok"], true);
    assert_eq!(json["applied"], 16);
    assert_eq!(json["tensors"], 16);
    assert_eq!(json["ignored"], serde_json::json!([]));
    let modules = json["modules"].as_array().unwrap();
    assert_eq!(
        modules[0],
        serde_json::json!({"layer": 0, "module": "self_attn.q_proj", "expert": null, "rank": 2, "scale": 2.0})
    );
    let expert = modules
        .iter()
        .find(|m| m["module"] == "mlp.experts.up_proj")
        .unwrap();
    assert_eq!(expert["expert"], 0);
    for bytes in ["slot", "expert"] {
        assert!(json["bytes"][bytes].as_u64().unwrap() > 0);
    }
    assert_eq!(json["bytes"]["overlay"], 0);

    let case = Case::all()
        .into_iter()
        .find(|c| c.name == "bad_nan")
        .unwrap();
    let json: Value = serde_json::from_str(&case.audit(&pool()).to_json()).unwrap();
    assert_eq!(json["ok"], false);
    let finding = &json["findings"][0];
    assert_eq!(finding["level"], "error");
    assert_eq!(finding["reason"], "non-finite-weights");
    assert!(
        finding["tensor"]
            .as_str()
            .unwrap()
            .ends_with("lora_A.weight")
    );
    assert!(finding["message"].is_string());
}
