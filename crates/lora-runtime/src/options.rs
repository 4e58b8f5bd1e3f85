//! How a runtime is set up, as plain values.

use crate::RuntimeError;
use lora_config::{ConfigError, Levers, ModelSpec, ParseOptions, RuntimeConfig};
use lora_kernels::LaunchOptions;
use lora_overlay::ROWDIFF_THRESH;
use lora_weights::{ExpertLayout, ExpertPoolSpec, LoadPolicy, LoraModule, ModuleSet, PoolSpec};

/// How a runtime is set up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RuntimeOptions {
    /// What the pool holds.
    pub pool: PoolSpec,
    /// Adapters with experts that can be resident at once; as many as there are slots where `None`. The expert tables take 24 bytes for each, times
    /// MoE layers, experts and three projections.
    pub expert_residents: Option<u32>,
    /// Levers that touch launches.
    pub launch: LaunchOptions,
    /// What the caller asserts beside adapter configs.
    pub parse: ParseOptions,
    /// A row of an adapter's own vocabulary table is taken where an element differs from the served one by strictly more than
    /// this; rows that differ by less are served as the base model has them. [`ROWDIFF_THRESH`] tells training from rounding; 0
    /// takes every row that differs at all.
    pub row_diff_threshold: f32,
}

impl RuntimeOptions {
    /// `max_loras` slots of `max_rank`, everything else by default.
    pub fn new(max_loras: u32, max_rank: u32) -> Self {
        Self {
            pool: PoolSpec::new(max_loras, max_rank),
            expert_residents: None,
            launch: LaunchOptions::default(),
            parse: ParseOptions::default(),
            row_diff_threshold: ROWDIFF_THRESH,
        }
    }

    /// With room for everything that an adapter can adapt of `model`: extended modules, and in MoE layers router and experts of whole adapters in
    /// every slot. For an engine that has a place to apply each of them.
    #[must_use]
    pub fn with_everything(mut self, model: &ModelSpec) -> Self {
        self.pool.modules = ModuleSet::everything();
        self.pool.experts = model.moe.as_ref().map(|_| ExpertPoolSpec {
            max_rank: self.pool.max_rank,
            units: whole_adapter_units(model).saturating_mul(self.pool.max_loras.into()),
        });
        self
    }

    /// What a `lora.toml`, the environment and code together say, for `model`.
    ///
    /// # Errors
    /// An extended module that does not exist, and an expert rank that no pool can have.
    pub fn from_config(config: &RuntimeConfig, model: &ModelSpec) -> Result<Self, RuntimeError> {
        let levers = &config.levers;
        let experts = match levers.lora_experts_env() {
            true => Some(expert_pool(config, model)?),
            false => None,
        };
        Ok(Self {
            pool: PoolSpec {
                modules: module_set(&config.modules)?,
                experts,
                policy: load_policy(levers),
                ..PoolSpec::new(config.max_loras, config.max_rank)
            },
            expert_residents: None,
            launch: launch_options(levers),
            parse: ParseOptions::default(),
            row_diff_threshold: ROWDIFF_THRESH,
        })
    }
}

/// Levers that touch launches.
pub fn launch_options(levers: &Levers) -> LaunchOptions {
    LaunchOptions {
        gemv_max_m: levers.lora_gemv_max_m(),
        no_apply: levers.lora_no_apply(),
        no_ffn: levers.lora_no_ffn(),
    }
}

/// Levers that touch what may load and what may move.
pub fn load_policy(levers: &Levers) -> LoadPolicy {
    LoadPolicy {
        allow_partial_targets: levers.allow_partial_targets(),
        allow_rotation: levers.lora_rotate_env() || levers.lora_peer_env().is_some(),
        ..LoadPolicy::default()
    }
}

/// The default modules and the extended ones named, each by its path inside a layer with or without its block
/// (`mlp.shared_expert.up_proj`, `shared_expert.up_proj`, `in_proj_qkv`); `all` is every one.
///
/// # Errors
/// [`ConfigError::Setting`] with the names that there are.
pub fn module_set<S: AsRef<str>>(
    names: impl IntoIterator<Item = S>,
) -> Result<ModuleSet, ConfigError> {
    let mut set = ModuleSet::default();
    for name in names {
        let name = name.as_ref();
        if name == "all" {
            return Ok(ModuleSet::everything());
        }
        let named = |module: &LoraModule| module.peft_name() == name || short_name(*module) == name;
        let Some(module) = LoraModule::EXTENDED.into_iter().find(named) else {
            let known: Vec<&str> = LoraModule::EXTENDED.into_iter().map(short_name).collect();
            return Err(ConfigError::Setting {
                field: "modules".to_owned(),
                problem: format!(
                    "names {name:?}, which is no extended module: there are all, {}",
                    known.join(", ")
                ),
            });
        };
        set = set.with(module);
    }
    Ok(set)
}

/// A module's path without the block that it stands in.
fn short_name(module: LoraModule) -> &'static str {
    module
        .peft_name()
        .split_once('.')
        .map_or(module.peft_name(), |(_, rest)| rest)
}

/// As many units as the budget has room for; room for one whole adapter where no budget is set.
fn expert_pool(config: &RuntimeConfig, model: &ModelSpec) -> Result<ExpertPoolSpec, RuntimeError> {
    let max_rank = config.levers.max_lora_expert_rank();
    let unit = ExpertLayout::new(model, &ExpertPoolSpec { max_rank, units: 1 })?
        .map(|layout| layout.unit_bytes());
    let units = match (config.expert_budget, unit) {
        (Some(budget), Some(unit)) => budget / unit.max(1),
        _ => whole_adapter_units(model),
    };
    Ok(ExpertPoolSpec { max_rank, units })
}

/// Expert units of one adapter that adapts every router and every projection of every expert.
pub fn whole_adapter_units(model: &ModelSpec) -> u64 {
    let layers = model
        .layers
        .iter()
        .filter(|layer| layer.ffn == lora_config::FfnKind::Moe)
        .count() as u64;
    let experts = model.moe.as_ref().map_or(0, |moe| moe.num_experts) as u64;
    layers.saturating_mul(experts.saturating_mul(3).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extended_modules_are_named_with_or_without_their_block() {
        let wanted = ModuleSet::default().with(LoraModule::SharedUpProj);
        assert_eq!(module_set(["shared_expert.up_proj"]), Ok(wanted));
        assert_eq!(module_set(["mlp.shared_expert.up_proj"]), Ok(wanted));
        assert_eq!(module_set(["all"]), Ok(ModuleSet::everything()));
        let error = module_set(["q_proj"])
            .expect_err("is on anyway")
            .to_string();
        assert!(error.contains("qkv_proj"), "{error}");
    }

    #[test]
    fn levers_that_nobody_sets_are_the_defaults_of_what_they_switch() {
        let levers = Levers::default();
        assert_eq!(launch_options(&levers), LaunchOptions::default());
        assert_eq!(load_policy(&levers), LoadPolicy::default());
    }

    #[test]
    fn settings_reach_pool_policy_and_launches() {
        let text = "max_loras = 3\nmax_rank = 24\nmodules = [\"qkv_proj\"]\n[levers]\nrotate = true\nno_ffn = true\n";
        let config = RuntimeConfig::from_toml(text).expect("valid");
        let model = ModelSpec::from_hf_config(
            r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100}"#,
        )
        .expect("valid");
        let options = RuntimeOptions::from_config(&config, &model).expect("valid");
        assert_eq!(
            (
                options.pool.max_loras,
                options.pool.max_rank,
                options.pool.experts
            ),
            (3, 24, None)
        );
        assert!(options.pool.modules.contains(LoraModule::QkvProj));
        assert!(options.pool.policy.allow_rotation && options.launch.no_ffn);
    }
}
