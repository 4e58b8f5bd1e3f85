//! The texts that are parsed: two in JSON, one in TOML.

use lora_config::{
    FindingLevel, MAX_LAYERS, MAX_WIDTH, ModelSpec, ParseOptions, RuntimeConfig,
    parse_peft_adapter_config, validate_peft_config,
};
use lora_weights::{ExpertPoolSpec, ModuleSet, PoolLayout, PoolSpec};

/// Module paths whose scale, rank and membership are asked for: dense, expert, stacked, none.
const PATHS: [&str; 5] = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.experts.3.down_proj",
    "model.layers.1.mlp.experts",
    "lm_head",
    "",
];

/// `adapter_config.json`.
pub(super) fn adapter_config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for assume in [false, true] {
        let options = ParseOptions {
            assume_peft_defaults: assume,
            assume_base: assume,
        };
        let Ok(config) = parse_peft_adapter_config(&text, &options) else {
            continue;
        };
        for path in PATHS {
            let module = config.module(path);
            assert!(module.rank > 0, "{path}: rank 0");
            assert!(module.alpha.is_finite() && module.scaling.is_finite());
            config.targets(path);
            config.undecided_pattern(path);
        }
        let _ = validate_peft_config(&config, 16);
        let warnings = config.warnings();
        assert!(warnings.iter().all(|w| w.level == FindingLevel::Warning));
    }
}

/// `config.json`, and the layout of a pool for the model it describes.
pub(super) fn model_config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Ok(spec) = ModelSpec::from_hf_config(&text) else {
        return;
    };
    assert!(spec.validate().is_ok());
    assert!(spec.layers.len() <= MAX_LAYERS && spec.q_width() <= MAX_WIDTH);
    let pool = PoolSpec {
        modules: ModuleSet::everything(),
        experts: Some(ExpertPoolSpec {
            max_rank: 8,
            units: 100,
        }),
        ..PoolSpec::new(3, 20)
    };
    let Ok(layout) = PoolLayout::new(&spec, &pool) else {
        return;
    };
    let mut end = 0;
    for region in layout.regions() {
        let bytes = |side: u32| 2 * u64::from(side) * u64::from(region.max_rank);
        assert!(region.a_offset >= end);
        assert!(region.b_offset >= region.a_offset + bytes(region.k_in));
        end = region.b_offset + bytes(region.n_out);
    }
    assert!(end <= layout.bytes().slot);
}

/// `lora.toml`.
pub(super) fn lora_toml(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Ok(config) = RuntimeConfig::from_toml(&text) else {
        return;
    };
    assert!(config.max_loras > 0 && config.max_rank > 0);
    assert!(config.adapters.len() <= config.max_loras as usize);
    let names = config.adapters.iter().map(|adapter| &adapter.name);
    let distinct: std::collections::BTreeSet<_> = names.collect();
    assert_eq!(distinct.len(), config.adapters.len());
}
