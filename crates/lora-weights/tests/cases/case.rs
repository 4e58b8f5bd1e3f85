//! The folders, and what is expected of each.

use lora_config::{ConfigError, ModelSpec, ParseOptions};
use lora_weights::{
    AdapterManifest, AuditReport, ExpertPoolSpec, ModuleSet, PoolSpec, WeightManifest, audit_dir,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What this workspace does not apply: `expect` says `ok` or names another way of taking it, and the audit refuses with this
/// reason (the first error).
pub(crate) const NOT_APPLIED: [(&str, &str); 21] = [
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
pub(crate) const REFUSED: [(&str, &str); 53] = [
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
    ("llama_tokens_unsorted", "overlay-unapplied"),
];

pub(crate) struct Case {
    pub(crate) name: String,
    dir: PathBuf,
    pub(crate) json: Value,
}

impl Case {
    pub(crate) fn all() -> Vec<Self> {
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

    pub(crate) fn expect(&self) -> &str {
        self.json["expect"].as_str().unwrap()
    }

    pub(crate) fn adapter(&self) -> PathBuf {
        self.dir.join("adapter")
    }

    pub(crate) fn spec(&self) -> Result<ModelSpec, ConfigError> {
        ModelSpec::from_hf_config(&std::fs::read_to_string(self.dir.join("config.json")).unwrap())
    }

    pub(crate) fn audit(&self, pool: &PoolSpec) -> AuditReport {
        match self.spec() {
            Ok(spec) => audit_dir(&self.adapter(), &ParseOptions::default(), &spec, pool),
            Err(error) => AuditReport::unknown_model(&*self.name, &error),
        }
    }

    /// Config and header; `None` where the case is about files that give none.
    pub(crate) fn manifest(&self) -> Option<AdapterManifest> {
        let file = std::fs::read(self.adapter().join("adapter_model.safetensors")).ok()?;
        let config = std::fs::read_to_string(self.adapter().join("adapter_config.json")).ok()?;
        Some(AdapterManifest {
            location: self.adapter().display().to_string(),
            config_json: config,
            weights: WeightManifest::parse(&file, file.len() as u64).ok()?,
        })
    }

    /// Tensors recorded beside the case, as F32.
    pub(crate) fn golden(&self) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
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
pub(crate) fn pool() -> PoolSpec {
    let mut pool = PoolSpec::new(1, 64);
    pool.modules = ModuleSet::everything();
    pool.experts = Some(ExpertPoolSpec {
        max_rank: 64,
        units: 1024,
    });
    pool.policy.overlays = true;
    pool
}

pub(crate) fn show(report: &AuditReport) -> String {
    let findings: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    findings.join("\n")
}
