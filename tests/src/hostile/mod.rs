//! What must hold of any bytes that a stranger may hand over: the bodies of the fuzz targets in `fuzz/`, and of the test that
//! replays their corpus on a stable toolchain. A body panics where a promise is broken, and returns on everything else.

mod adapters;
mod configs;
mod landing;
mod names;
mod seeds;

pub use seeds::{Seed, pack_corpus, seeds_of, unpack_corpus};

use lora_config::ModelSpec;
use std::sync::LazyLock;

/// A body: takes any bytes.
pub type Body = fn(&[u8]);

/// Every fuzz target by name.
pub const TARGETS: [(&str, Body); 8] = [
    ("adapter_config", configs::adapter_config),
    ("adapter_folder", adapters::folder),
    ("adapter_tensors", adapters::tensors),
    ("landing_plan", landing::landing_plan),
    ("lora_toml", configs::lora_toml),
    ("model_config", configs::model_config),
    ("safetensors_header", adapters::header),
    ("tensor_names", names::tensor_names),
];

/// The body called `name`.
///
/// # Panics
/// Where there is none.
pub fn body(name: &str) -> Body {
    let found = TARGETS.iter().find(|(target, _)| *target == name);
    found.expect("a target of that name").1
}

macro_rules! configs {
    ($($case:literal),*) => {
        /// `config.json` of small models of different families.
        const CONFIGS: &[&str] =
            &[$(include_str!(concat!("../../data/cases/", $case, "/config.json"))),*];
    };
}

// The order is part of the corpus: inputs name a model by its place.
configs!(
    "base_llama",
    "base_qwen3_moe",
    "base_mixtral",
    "base_qwen3_5",
    "llama4_params",
    "qwen2_moe_v4_shared",
    "phi3_fused",
    "gemma3_scaled_embedding",
    "qwen3_5_moe_mixed",
    "moe_layout_gpt_oss_019_0"
);

static MODELS: LazyLock<Vec<ModelSpec>> = LazyLock::new(|| {
    let spec = |text: &&str| ModelSpec::from_hf_config(text).expect("a known model");
    CONFIGS.iter().map(spec).collect()
});

/// The model that `byte` names.
fn model(byte: u8) -> &'static ModelSpec {
    &MODELS[usize::from(byte) % MODELS.len()]
}
