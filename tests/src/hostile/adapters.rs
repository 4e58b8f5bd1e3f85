//! Whole adapters: a header, a folder as a stranger may fill it, tensors in memory.

use super::model;
use arbitrary::{Arbitrary, Unstructured};
use lora_config::{LoraBLayout, ModelSpec, ParseOptions, parse_peft_adapter_config};
use lora_weights::{
    AdapterStore, AuditReport, ExpertPoolSpec, LoadPolicy, MemoryTensor, ModuleSet, PackSource,
    PoolLayout, PoolSpec, StackedLayout, TensorDtype, audit_adapter, audit_dir, image_bytes,
    pack_adapter, parse_safetensors_header,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::path::Path;

/// Data that a comparison with the `safetensors` crate makes room for, bytes.
const MOST_DATA: u64 = 1 << 16;

/// Four bytes of data length, then a header.
pub(super) fn header(data: &[u8]) {
    let Some((length, header)) = data.split_first_chunk::<4>() else {
        return;
    };
    let data_bytes = u64::from(u32::from_le_bytes(*length));
    let Ok(entries) = parse_safetensors_header(header, data_bytes) else {
        return;
    };
    let sum: u64 = entries.iter().map(|e| e.bytes.end - e.bytes.start).sum();
    assert_eq!(sum, data_bytes, "bytes that are no tensor's, or two's");
    if data_bytes > MOST_DATA {
        return;
    }
    // What is let in here, the reference reader must let in too, and see the same.
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    let start = file.len();
    file.resize(start + data_bytes as usize, 0);
    let (_, reference) = SafeTensors::read_metadata(&file).expect("the reference refuses it");
    assert_eq!(reference.tensors().len(), entries.len());
    for entry in &entries {
        let info = reference.info(&entry.meta.name).expect("a name it has not");
        assert_eq!(info.shape, entry.meta.shape);
        assert_eq!(TensorDtype::from(info.dtype), entry.meta.dtype);
        let (begin, end) = info.data_offsets;
        assert_eq!(
            (begin as u64, end as u64),
            (entry.bytes.start, entry.bytes.end)
        );
    }
}

/// An adapter folder as one input: a byte that names a model, a byte of rules, two bytes of config length, the config, then the
/// weights file.
pub(super) struct Split<'a> {
    pub(super) which: u8,
    pub(super) flags: u8,
    pub(super) config: &'a [u8],
    pub(super) weights: &'a [u8],
}

impl<'a> Split<'a> {
    pub(super) fn of(data: &'a [u8]) -> Option<Self> {
        let [which, flags, low, high, files @ ..] = data else {
            return None;
        };
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        let (config, weights) = files.split_at(length.min(files.len()));
        Some(Self {
            which: *which,
            flags: *flags,
            config,
            weights,
        })
    }

    /// Writes both files.
    pub(super) fn write(&self, dir: &Path) {
        let files = [
            ("adapter_config.json", self.config),
            ("adapter_model.safetensors", self.weights),
        ];
        for (name, bytes) in files {
            std::fs::write(dir.join(name), bytes).expect("a file is written");
        }
    }
}

/// A folder that a stranger filled.
pub(super) fn folder(data: &[u8]) {
    let Some(split) = Split::of(data) else {
        return;
    };
    let dir = tempfile::tempdir().expect("a temporary folder");
    split.write(dir.path());
    let (spec, pool) = (model(split.which), pool(split.flags));
    let options = ParseOptions::default();
    let report = audit_dir(dir.path(), &options, spec, &pool);
    check_report(&report);
    let opened = AdapterStore::open(dir.path());
    if !report.ok() {
        return;
    }
    let store = opened.expect("what the audit passes opens");
    let config = parse_peft_adapter_config(store.config_json(), &options).expect("parses again");
    let again = audit_adapter(&store, &config, spec, &pool);
    assert!(again.ok() && again.applied == report.applied);
    check_pack(&store, &again, spec, &pool);
}

/// An adapter from a grammar: names, shapes and settings near what PEFT writes, so that the deep checks are reached.
pub(super) fn tensors(data: &[u8]) {
    let mut source = Unstructured::new(data);
    let Ok(adapter) = Made::arbitrary(&mut source) else {
        return;
    };
    let spec = model(adapter.which);
    let pool = pool(adapter.flags);
    let config_json = adapter.config().to_string();
    let Ok(config) = parse_peft_adapter_config(&config_json, &ParseOptions::default()) else {
        return;
    };
    let tensors = adapter.pieces.iter().map(|piece| piece.tensor(spec));
    let Ok(store) = AdapterStore::from_tensors(config_json, tensors) else {
        return;
    };
    let report = audit_adapter(&store, &config, spec, &pool);
    check_report(&report);
    if report.ok() {
        check_pack(&store, &report, spec, &pool);
    }
}

/// A pool by flags: what it has room for and what it permits.
pub(super) fn pool(flags: u8) -> PoolSpec {
    let bit = |at: u8| flags >> at & 1 == 1;
    PoolSpec {
        modules: if bit(0) {
            ModuleSet::everything()
        } else {
            ModuleSet::default()
        },
        experts: bit(1).then_some(ExpertPoolSpec {
            max_rank: 16,
            units: 64,
        }),
        policy: LoadPolicy {
            allow_partial_targets: bit(2),
            accept_bare_names: bit(3),
            overlays: bit(4),
            stacked_layout: bit(5).then_some(if bit(6) {
                StackedLayout::AIn
            } else {
                StackedLayout::AOut
            }),
            stacked_order: bit(7).then_some(LoraBLayout::RankMajor),
            allow_rotation: false,
        },
        ..PoolSpec::new(2, 16)
    }
}

/// Nothing goes in silence.
fn check_report(report: &AuditReport) {
    if report.ok() {
        assert_eq!(report.applied + report.ignored.len(), report.tensors);
    }
    assert!(report.findings.is_sorted_by_key(|finding| finding.level));
    assert!(report.findings.iter().all(|f| !f.reason.is_empty()));
    let json = serde_json::to_value(report).expect("a report is JSON");
    assert_eq!(json["ok"], report.ok());
}

/// What the audit passes, packs.
fn check_pack(store: &AdapterStore, report: &AuditReport, spec: &ModelSpec, pool: &PoolSpec) {
    let layout = PoolLayout::new(spec, pool).expect("a small pool");
    let bytes = image_bytes(&layout, &report.pairs).expect("a small image");
    let mut image = vec![0xffff_u16; bytes / 2];
    let pairs = &report.pairs;
    let packed = pack_adapter(
        PackSource { store, pairs },
        &layout,
        bytemuck::cast_slice_mut(&mut image),
    );
    packed.expect("audited pairs pack");
    assert!(
        !image.iter().any(|value| value & 0x7f80 == 0x7f80),
        "a NaN, an infinity or a byte that was not written"
    );
}

/// What a made adapter says of itself.
#[derive(Arbitrary, Debug)]
struct Made {
    which: u8,
    flags: u8,
    rank: u8,
    alpha: i8,
    rslora: bool,
    version: u8,
    targets: Vec<u8>,
    rank_pattern: Vec<(u8, u8)>,
    alpha_pattern: Vec<(u8, i8)>,
    parameters: Vec<u8>,
    saved: Vec<u8>,
    tokens: Option<Vec<i16>>,
    pieces: Vec<Piece>,
}

/// One tensor.
#[derive(Arbitrary, Debug)]
struct Piece {
    layer: u8,
    module: u8,
    suffix: u8,
    rank: u8,
    /// Added to rows and columns: small, so that most shapes are right or nearly so.
    off: [i8; 2],
    dtype: u8,
    fill: u8,
}

const MODULES: [&str; 24] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "linear_attn.out_proj",
    "linear_attn.in_proj_qkv",
    "self_attn.qkv_proj",
    "mlp.gate_up_proj",
    "mlp.gate",
    "mlp.experts",
    "mlp.experts.base_layer",
    "mlp.experts.0.gate_proj",
    "mlp.experts.0.up_proj",
    "mlp.experts.2.down_proj",
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.1.w1",
    "feed_forward.experts",
    "mlp.shared_expert.up_proj",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    "input_layernorm",
];

const SUFFIXES: [&str; 8] = [
    "lora_A.weight",
    "lora_B.weight",
    "lora_A.default.weight",
    "lora_B.default.weight",
    "lora_magnitude_vector",
    "weight",
    "lora_B.bias",
    "modules_to_save.weight",
];

const TABLES: [&str; 6] = [
    "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
    "base_model.model.model.embed_tokens.token_adapter.base_layer.weight",
    "base_model.model.lm_head.weight",
    "base_model.model.model.embed_tokens.weight",
    "base_model.model.model.embed_tokens.lora_embedding_A",
    "base_model.model.lm_head.modules_to_save.weight",
];

fn of<'a>(list: &[&'a str], at: u8) -> &'a str {
    list[usize::from(at) % list.len()]
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

impl Made {
    fn config(&self) -> Value {
        let names = |list: &[u8]| -> Vec<&str> {
            list.iter()
                .take(8)
                .map(|at| last(of(&MODULES, *at)))
                .collect()
        };
        let mut config = json!({
            "peft_type": "LORA",
            "r": self.rank % 24,
            "lora_alpha": self.alpha,
            "use_rslora": self.rslora,
            "target_modules": names(&self.targets),
            "rank_pattern": self.rank_pattern.iter().take(4)
                .map(|(at, rank)| (of(&MODULES, *at).to_owned(), json!(rank % 24)))
                .collect::<serde_json::Map<_, _>>(),
            "alpha_pattern": self.alpha_pattern.iter().take(4)
                .map(|(at, alpha)| (last(of(&MODULES, *at)).to_owned(), json!(alpha)))
                .collect::<serde_json::Map<_, _>>(),
        });
        if !self.parameters.is_empty() {
            let parameters = [
                "mlp.experts.gate_up_proj",
                "mlp.experts.down_proj",
                "mlp.gate.weight",
            ];
            config["target_parameters"] = self
                .parameters
                .iter()
                .take(4)
                .map(|at| of(&parameters, *at))
                .collect();
        }
        if !self.saved.is_empty() {
            config["modules_to_save"] = self
                .saved
                .iter()
                .take(3)
                .map(|at| of(&["lm_head", "embed_tokens", "norm"], *at))
                .collect();
        }
        if let Some(tokens) = &self.tokens {
            config["trainable_token_indices"] = tokens.iter().take(8).copied().collect();
        }
        if let Some(version) =
            ["0.17.1", "0.18.0", "0.18.1", "0.19.0"].get(usize::from(self.version))
        {
            config["peft_version"] = json!(version);
        }
        config
    }
}

impl Piece {
    fn tensor(&self, spec: &ModelSpec) -> MemoryTensor {
        let (name, [rows, columns]) = if self.module >= 224 {
            let rows = if self.suffix < 128 {
                spec.vocab_size
            } else {
                3
            };
            (
                of(&TABLES, self.module).to_owned(),
                [rows, spec.hidden_size],
            )
        } else {
            self.pair(spec)
        };
        let side = |size: usize, off: i8| match off {
            // Most of the range leaves the shape alone.
            -8..=8 => size.saturating_add_signed(off.into()).min(512),
            _ => size.min(512),
        };
        let shape = [side(rows, self.off[0]), side(columns, self.off[1])];
        let (dtype, width) = match self.dtype % 8 {
            0 => (TensorDtype::F16, 2),
            1 => (TensorDtype::F32, 4),
            _ => (TensorDtype::Bf16, 2),
        };
        let bytes = vec![self.fill; shape[0] * shape[1] * width];
        MemoryTensor::new(name, dtype, shape, bytes)
    }

    fn pair(&self, spec: &ModelSpec) -> (String, [usize; 2]) {
        let (module, suffix) = (of(&MODULES, self.module), of(&SUFFIXES, self.suffix));
        let layer = usize::from(self.layer % 4);
        let name = format!("base_model.model.model.layers.{layer}.{module}.{suffix}");
        let rank = usize::from(self.rank % 24);
        let rules = lora_weights::NameRules {
            modules: ModuleSet::everything(),
            accept_bare_names: false,
        };
        let key = format!("base_model.model.model.layers.{layer}.{module}.lora_A.weight");
        let placed = lora_weights::classify_key(&key, spec, &rules).ok();
        let (out, k_in) = placed
            .and_then(|(layer, target, _)| target.dims(spec, layer))
            .unwrap_or((spec.hidden_size, spec.hidden_size));
        let shape = if suffix.contains("lora_A") {
            [rank, k_in]
        } else {
            [out, rank]
        };
        (name, shape)
    }
}
