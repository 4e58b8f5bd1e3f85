use half::bf16;
use lora_config::{AdapterConfig, ModelSpec, ParseOptions, parse_peft_adapter_config};
use lora_weights::{
    AdapterStore, ExpertProj, LoraAdapterInput, LoraModule, LoraTarget, MemoryTensor,
};

/// Two dense layers: hidden 32, 4 heads of 8, 2 KV heads, FFN 40.
pub fn tiny_model() -> ModelSpec {
    let text = r#"{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 48}"#;
    ModelSpec::from_hf_config(text).unwrap()
}

/// Two MoE layers: hidden 32, 3 experts of width 12.
pub fn moe_model() -> ModelSpec {
    let text = r#"{"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 48, "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12, "decoder_sparse_step": 1, "head_dim": 8}"#;
    ModelSpec::from_hf_config(text).unwrap()
}

/// What an adapter adapts: targets with their rank, on every layer that has them.
#[derive(Clone)]
pub struct Geometry<'a> {
    pub model: &'a ModelSpec,
    pub targets: Vec<LoraTarget>,
    pub rank: usize,
}

impl<'a> Geometry<'a> {
    /// Every dense module of the model.
    pub fn dense(model: &'a ModelSpec, rank: usize) -> Self {
        let targets = LoraModule::ALL.into_iter().map(LoraTarget::Attn).collect();
        Self {
            model,
            targets,
            rank,
        }
    }

    pub fn with_experts(mut self, experts: &[usize]) -> Self {
        self.targets.push(LoraTarget::Router);
        for n in experts {
            for proj in ExpertProj::ALL {
                self.targets.push(LoraTarget::Expert { n: *n, proj });
            }
        }
        self
    }
}

/// An adapter in memory, whose every value says which adapter it is.
pub struct Adapter {
    pub name: String,
    pub store: AdapterStore,
    pub config: AdapterConfig,
}

impl Adapter {
    /// Values are `mark` plus a position-dependent part below one half, so that no two marks share a matrix.
    pub fn new(name: &str, geometry: &Geometry<'_>, mark: f32) -> Self {
        let rank = geometry.rank;
        let mut tensors = Vec::new();
        for layer in 0..geometry.model.layers.len() {
            for target in &geometry.targets {
                let Some((out, k_in)) = target.dims(geometry.model, layer) else {
                    continue;
                };
                let path = format!("base_model.model.model.layers.{layer}.{}", path_of(*target));
                let values = |count: usize| -> Vec<bf16> {
                    (0..count)
                        .map(|i| bf16::from_f32(mark + (i % 61) as f32 / 128.0))
                        .collect()
                };
                tensors.push(MemoryTensor::from_bf16(
                    format!("{path}.lora_A.weight"),
                    [rank, k_in],
                    &values(rank * k_in),
                ));
                tensors.push(MemoryTensor::from_bf16(
                    format!("{path}.lora_B.weight"),
                    [out, rank],
                    &values(out * rank),
                ));
            }
        }
        let mut names: Vec<String> = geometry
            .targets
            .iter()
            .filter_map(|target| Some(path_of(*target).rsplit_once('.')?.1.to_owned()))
            .collect();
        names.sort();
        names.dedup();
        let json = format!(
            r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {}, "use_rslora": false, "target_modules": {names:?}}}"#,
            2 * rank
        );
        Self {
            name: name.to_owned(),
            config: parse_peft_adapter_config(&json, &ParseOptions::default()).unwrap(),
            store: AdapterStore::from_tensors(json, tensors).unwrap(),
        }
    }

    pub fn input(&self) -> LoraAdapterInput<'_> {
        LoraAdapterInput::new(&self.name, &self.store, &self.config)
    }

    /// The same tensors under another name.
    pub fn named<'a>(&'a self, name: &'a str) -> LoraAdapterInput<'a> {
        LoraAdapterInput::new(name, &self.store, &self.config)
    }
}

fn path_of(target: LoraTarget) -> String {
    match target {
        LoraTarget::Attn(module) => module.peft_name().to_owned(),
        LoraTarget::Router => "mlp.gate".to_owned(),
        LoraTarget::Expert { n, proj } => format!("mlp.experts.{n}.{}", proj.peft_name()),
    }
}
