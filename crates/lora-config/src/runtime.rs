//! `lora.toml`, and how it combines with what code and the environment set.

use crate::{ConfigError, LeverSettings, Levers};
use bytesize::ByteSize;
use serde::Deserialize;
use std::collections::HashSet;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

const DEFAULT_MAX_LORAS: u32 = 8;
const DEFAULT_MAX_RANK: u32 = 64;

/// Where deltas run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum BackendKind {
    /// The CPU: no GPU needed.
    #[default]
    Host,
    /// An NVIDIA GPU.
    Cuda,
}

/// An adapter to load at startup.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterEntry {
    /// The name requests ask for.
    pub name: String,
    /// Folder of `adapter_config.json` and `adapter_model.safetensors`.
    pub path: PathBuf,
    /// Whether the adapter keeps its slot (the default), or may be evicted like any promoted one.
    #[serde(default = "pinned_by_default")]
    pub pinned: bool,
}

fn pinned_by_default() -> bool {
    true
}

/// One layer of settings (code, environment or `lora.toml`): what it does not set is `None`, and left to the layers below.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeSettings {
    /// The served model's `config.json`.
    pub model: Option<PathBuf>,
    /// Where deltas run.
    pub backend: Option<BackendKind>,
    /// Slots of the pool.
    pub max_loras: Option<NonZeroU32>,
    /// Largest rank of an adapter.
    pub max_rank: Option<NonZeroU32>,
    /// Extended modules to make room for, by their path inside a layer (`shared_expert.up_proj`, `qkv_proj`), or `all`.
    pub modules: Option<Vec<String>>,
    /// Bytes to set aside for expert and router pairs.
    pub expert_budget: Option<u64>,
    /// Adapters to load at startup; a stronger layer's list takes the place of a weaker one's.
    pub adapters: Option<Vec<AdapterEntry>>,
    /// Levers.
    pub levers: LeverSettings,
}

/// The file's own shape.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    model: Option<PathBuf>,
    backend: Option<BackendKind>,
    max_loras: Option<NonZeroU32>,
    max_rank: Option<NonZeroU32>,
    modules: Option<Vec<String>>,
    peer: Option<String>,
    #[serde(default)]
    experts: Experts,
    adapters: Option<Vec<AdapterEntry>>,
    #[serde(default)]
    levers: LeverSettings,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Experts {
    rank: Option<NonZeroU32>,
    budget: Option<Budget>,
}

/// Bytes as a number, or with a unit.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "a budget is a number of bytes, or a string such as \"512 MiB\""
)]
enum Budget {
    Bytes(u64),
    Text(ByteSize),
}

impl RuntimeSettings {
    /// Reads the text of a `lora.toml`. Paths stay as written: see [`Self::relative_to`].
    ///
    /// # Errors
    /// [`ConfigError::Toml`] for a text that is not TOML, an unknown key, or a value that cannot be.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text).map_err(|error| ConfigError::Toml {
            line: line_of(text, error.span().map_or(0, |span| span.start)),
            message: error.message().lines().collect::<Vec<_>>().join(" "),
        })?;
        Ok(Self {
            model: file.model,
            backend: file.backend,
            max_loras: file.max_loras,
            max_rank: file.max_rank,
            modules: file.modules,
            expert_budget: file.experts.budget.map(|budget| match budget {
                Budget::Bytes(bytes) => bytes,
                Budget::Text(size) => size.as_u64(),
            }),
            adapters: file.adapters,
            levers: LeverSettings {
                expert_rank: file.experts.rank,
                peer: file.peer,
                ..file.levers
            },
        })
    }

    /// The layer of the environment: levers are all that it sets.
    ///
    /// # Errors
    /// As [`LeverSettings::from_lookup`].
    pub fn from_env(prefix: &str) -> Result<Self, ConfigError> {
        Ok(Self {
            levers: LeverSettings::from_env(prefix)?,
            ..Self::default()
        })
    }

    /// With relative paths taken from `folder`: that of the `lora.toml`.
    #[must_use]
    pub fn relative_to(mut self, folder: &Path) -> Self {
        self.model = self.model.map(|path| folder.join(path));
        for adapter in self.adapters.iter_mut().flatten() {
            adapter.path = folder.join(&adapter.path);
        }
        self
    }

    /// These values, and those of `lower` where there are none.
    #[must_use]
    pub fn over(self, lower: Self) -> Self {
        Self {
            model: self.model.or(lower.model),
            backend: self.backend.or(lower.backend),
            max_loras: self.max_loras.or(lower.max_loras),
            max_rank: self.max_rank.or(lower.max_rank),
            modules: self.modules.or(lower.modules),
            expert_budget: self.expert_budget.or(lower.expert_budget),
            adapters: self.adapters.or(lower.adapters),
            levers: self.levers.over(lower.levers),
        }
    }
}

/// Line, from 1, of the byte at `offset`.
fn line_of(text: &str, offset: usize) -> usize {
    let before = &text.as_bytes()[..offset.min(text.len())];
    1 + before.iter().filter(|byte| **byte == b'\n').count()
}

/// Everything a runtime is set up from, all layers and defaults considered.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RuntimeConfig {
    /// The served model's `config.json`; `None` for an engine that hands over its own geometry.
    pub model: Option<PathBuf>,
    /// Where deltas run; the host by default.
    pub backend: BackendKind,
    /// Slots of the pool: over 0, 8 by default.
    pub max_loras: u32,
    /// Largest rank of an adapter, before rounding to the granule: over 0, 64 by default.
    pub max_rank: u32,
    /// Extended modules to make room for, as [`RuntimeSettings::modules`]; none by default. Names are judged where the modules
    /// are known.
    pub modules: Vec<String>,
    /// Bytes to set aside for expert and router pairs of all slots; `None` where no layer says.
    pub expert_budget: Option<u64>,
    /// Adapters to load at startup, in slot order: names are distinct and not empty, and there are slots for all.
    pub adapters: Vec<AdapterEntry>,
    /// Levers.
    pub levers: Levers,
}

impl RuntimeConfig {
    /// The text of a `lora.toml` over the defaults.
    ///
    /// # Errors
    /// As [`RuntimeSettings::from_toml`] and [`Self::from_layers`].
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        Self::from_layers([RuntimeSettings::from_toml(text)?])
    }

    /// Layers over the defaults, the strongest first: code, environment, `lora.toml`.
    ///
    /// ```
    /// use lora_config::{RuntimeConfig, RuntimeSettings, LEVER_PREFIX};
    ///
    /// let file = RuntimeSettings::from_toml("max_rank = 32\n[levers]\nexperts = true")?;
    /// let code = RuntimeSettings { max_loras: 4.try_into().ok(), ..Default::default() };
    /// let config = RuntimeConfig::from_layers([code, RuntimeSettings::from_env(LEVER_PREFIX)?, file])?;
    /// assert_eq!((config.max_loras, config.max_rank), (4, 32));
    /// assert!(config.levers.lora_experts_env());
    /// # Ok::<(), lora_config::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// [`ConfigError::Setting`] for adapters without a name, of the same name, or more of them than slots.
    pub fn from_layers(
        layers: impl IntoIterator<Item = RuntimeSettings>,
    ) -> Result<Self, ConfigError> {
        let settings = layers
            .into_iter()
            .fold(RuntimeSettings::default(), RuntimeSettings::over);
        let config = Self {
            model: settings.model,
            backend: settings.backend.unwrap_or_default(),
            max_loras: settings
                .max_loras
                .map_or(DEFAULT_MAX_LORAS, NonZeroU32::get),
            max_rank: settings.max_rank.map_or(DEFAULT_MAX_RANK, NonZeroU32::get),
            modules: settings.modules.unwrap_or_default(),
            expert_budget: settings.expert_budget,
            adapters: settings.adapters.unwrap_or_default(),
            levers: Levers::from_layers([settings.levers]),
        };
        config.check_adapters()?;
        Ok(config)
    }

    fn check_adapters(&self) -> Result<(), ConfigError> {
        let error = |field: String, problem: String| Err(ConfigError::Setting { field, problem });
        let count = self.adapters.len();
        if count > self.max_loras as usize {
            let problem = format!(
                "has {count} entries, and max_loras is {}: raise it or name fewer",
                self.max_loras
            );
            return error("adapters".to_owned(), problem);
        }
        let mut names = HashSet::new();
        for (index, adapter) in self.adapters.iter().enumerate() {
            let field = format!("adapters[{index}].name");
            if adapter.name.is_empty() {
                return error(
                    field,
                    "is empty; requests ask for an adapter by it".to_owned(),
                );
            }
            if !names.insert(adapter.name.as_str()) {
                let problem = format!("is {:?}, as of an adapter before it", adapter.name);
                return error(field, problem);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
