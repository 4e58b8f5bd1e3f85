//! Options that `audit`, `plan` and `verify` share: what a pool has room for and what the caller asserts.

use crate::files::read_json;
use clap::builder::RangedI64ValueParser;
use clap::{Args, ValueEnum};
use lora_runtime::config::{
    AdapterConfig, BackendKind, ConfigError, Levers, LoraBLayout, ModelSpec, ParseOptions,
    parse_peft_adapter_config,
};
use lora_runtime::kernels::MAX_RANK;
use lora_runtime::weights::{ExpertPoolSpec, LoadPolicy, ModuleSet, PoolSpec, StackedLayout};
use lora_runtime::{load_policy, module_set};
use std::path::Path;

/// Where deltas run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// The processor.
    Host,
    /// The first NVIDIA GPU.
    Cuda,
}

impl From<BackendArg> for BackendKind {
    fn from(arg: BackendArg) -> Self {
        match arg {
            BackendArg::Host => Self::Host,
            BackendArg::Cuda => Self::Cuda,
        }
    }
}

/// What `--max-rank` takes: 1 to the largest rank that kernels take, so that nothing is planned or said to load that no
/// kernel runs.
pub(crate) fn rank_range() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=i64::from(MAX_RANK))
}

/// Layout of stacked experts, where neither version nor family says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StackedLayoutArg {
    /// A is `[experts * r, in]`, B is `[out, experts * r]`.
    AIn,
    /// A is `[experts * r, out]`, B is `[in, experts * r]`.
    AOut,
}

/// Order of the columns of a stacked B, where the file does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StackedOrderArg {
    /// Column `rank * experts + expert`, as PEFT writes.
    RankMajor,
    /// Column `expert * r + rank`.
    GroupedByExpert,
}

/// What may load and under which assertions.
#[derive(Debug, Clone, Default, Args)]
pub struct LoadOptions {
    /// Extended modules to make room for: `all`, or names such as `shared_expert.up_proj`, `in_proj_qkv`, `qkv_proj`.
    #[arg(long, value_name = "MODULE", value_delimiter = ',', value_parser = extended_module)]
    pub enable: Vec<String>,
    /// Load router and expert deltas (lever EXPERTS).
    #[arg(long)]
    pub experts: bool,
    /// Load an adapter of which some targets cannot be applied, naming them (lever ALLOW_PARTIAL).
    #[arg(long)]
    pub allow_partial: bool,
    /// Take PEFT's defaults where r, lora_alpha or use_rslora is absent.
    #[arg(long)]
    pub assume_peft_defaults: bool,
    /// Take tensor names without `base_model.model.`.
    #[arg(long)]
    pub accept_bare_names: bool,
    /// Assert that the served base is the changed one that an unconverted PiSSA, OLoRA, CorDA, LoRA-GA or LoftQ adapter
    /// is relative to.
    #[arg(long)]
    pub assume_base: bool,
    /// Layout of stacked experts, where the file does not settle it.
    #[arg(long, value_name = "L")]
    pub stacked_layout: Option<StackedLayoutArg>,
    /// Column order of a stacked B, where the file does not settle it.
    #[arg(long, value_name = "O")]
    pub stacked_order: Option<StackedOrderArg>,
}

impl LoadOptions {
    /// What the config parser is told.
    pub fn parse_options(&self) -> ParseOptions {
        ParseOptions {
            assume_peft_defaults: self.assume_peft_defaults,
            assume_base: self.assume_base,
        }
    }

    /// A pool of `slots` slots of `max_rank`, with `units` of expert room where experts are on.
    pub fn pool_spec(&self, slots: u32, max_rank: u32, units: u64, levers: &Levers) -> PoolSpec {
        let experts = self.experts || levers.lora_experts_env();
        let expert_rank = levers.max_lora_expert_rank();
        PoolSpec {
            modules: self.modules(),
            experts: experts.then_some(ExpertPoolSpec {
                max_rank: expert_rank,
                units,
            }),
            policy: self.policy(levers),
            ..PoolSpec::new(slots, max_rank)
        }
    }

    /// The default modules and those of `--enable`, whose names were checked when the command line was read.
    fn modules(&self) -> ModuleSet {
        module_set(&self.enable).unwrap_or_default()
    }

    fn policy(&self, levers: &Levers) -> LoadPolicy {
        LoadPolicy {
            allow_partial_targets: self.allow_partial || levers.allow_partial_targets(),
            accept_bare_names: self.accept_bare_names,
            stacked_layout: self.stacked_layout.map(|layout| match layout {
                StackedLayoutArg::AIn => StackedLayout::AIn,
                StackedLayoutArg::AOut => StackedLayout::AOut,
            }),
            stacked_order: self.stacked_order.map(|order| match order {
                StackedOrderArg::RankMajor => LoraBLayout::RankMajor,
                StackedOrderArg::GroupedByExpert => LoraBLayout::GroupedByExpert,
            }),
            // What takes overlays is the engine's to say; an adapter's own file is fit to load or not whatever it says.
            overlays: true,
            ..load_policy(levers)
        }
    }

    /// `asked`, else the largest rank that the adapter's own config names, at most [`MAX_RANK`]. A config that
    /// cannot be parsed gives [`MAX_RANK`]: its audit says what is wrong with it.
    pub fn max_rank_for(&self, adapter: &Path, asked: Option<u32>) -> u32 {
        asked.unwrap_or_else(|| {
            let text = read_json(&adapter.join("adapter_config.json"));
            text.map_or(MAX_RANK, |text| self.own_rank(&text))
        })
    }

    /// The largest rank that the text of a config names, at most [`MAX_RANK`], and [`MAX_RANK`] where it cannot be parsed.
    pub(crate) fn own_rank(&self, config: &str) -> u32 {
        parse_peft_adapter_config(config, &self.parse_options())
            .map_or(MAX_RANK, |config| largest_rank(&config).min(MAX_RANK))
    }
}

/// The largest rank that a config gives to any module.
fn largest_rank(config: &AdapterConfig) -> u32 {
    config
        .rank_pattern()
        .iter()
        .map(|(_, rank)| *rank)
        .fold(config.r(), u32::max)
}

/// A name that `--enable` takes, as it stands.
fn extended_module(name: &str) -> Result<String, String> {
    module_set([name])
        .map(|_| name.to_owned())
        .map_err(|error| error.to_string())
}

/// The geometry in a `config.json`. A file that cannot be read is what an audit says of one that gives no geometry, its
/// name in the message.
///
/// # Errors
/// A file that cannot be read, and one that gives no geometry.
pub fn read_model(path: &Path) -> Result<ModelSpec, ConfigError> {
    match read_json(path) {
        Ok(text) => ModelSpec::from_hf_config(&text),
        Err(error) => Err(ConfigError::ModelJson {
            message: format!("{}: {error}", path.display()),
        }),
    }
}
