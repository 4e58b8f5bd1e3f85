//! Levers: switches for operators and measurements. The only file of the workspace that reads the environment; everything
//! below is handed plain values.

use crate::{ConfigError, ConfigFinding};
use serde::Deserialize;
use std::ffi::OsString;
use std::num::NonZeroU32;

/// Prefix of the environment variables, unless a caller names its own.
pub const LEVER_PREFIX: &str = "METRALE_LORA_";

const DEFAULT_GEMV_MAX_M: u32 = 48;
const DEFAULT_EXPERT_RANK: u32 = 16;

/// One layer of lever values: what it does not set is `None`, and left to the layers below.
///
/// ```
/// use lora_config::{LeverSettings, Levers};
///
/// let code = LeverSettings { rotate: Some(true), ..Default::default() };
/// let environment = LeverSettings { gemv_max_m: Some(32), rotate: Some(false), ..Default::default() };
/// let levers = Levers::from_layers([code, environment]);
/// assert!(levers.lora_rotate_env());
/// assert_eq!(levers.lora_gemv_max_m(), 32);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeverSettings {
    /// `NO_APPLY`
    pub no_apply: Option<bool>,
    /// `NO_FFN`
    pub no_ffn: Option<bool>,
    /// `GEMV_MAX_M`, rows.
    pub gemv_max_m: Option<u32>,
    /// `ALLOW_PARTIAL`
    pub allow_partial: Option<bool>,
    /// `EXPERTS`
    pub experts: Option<bool>,
    /// `EXPERT_RANK`; `experts.rank` in `lora.toml`.
    #[serde(skip)]
    pub expert_rank: Option<NonZeroU32>,
    /// `EAGER`
    pub eager: Option<bool>,
    /// `ROTATE`
    pub rotate: Option<bool>,
    /// `PEER`; `peer` in `lora.toml`. Empty is no peer.
    #[serde(skip)]
    pub peer: Option<String>,
    /// `NO_BATCH_VERIFY`
    pub no_batch_verify: Option<bool>,
    /// `PREFILL_BGMV`
    pub prefill_bgmv: Option<bool>,
}

impl LeverSettings {
    /// Reads the variables `<prefix><NAME>` of the process, and logs what was not understood and fell back.
    ///
    /// # Errors
    /// As [`Self::from_lookup`].
    pub fn from_env(prefix: &str) -> Result<Self, ConfigError> {
        let (settings, warnings) =
            Self::from_lookup(prefix, |variable| std::env::var_os(variable))?;
        for warning in warnings {
            tracing::warn!(reason = %warning.reason, "{}", warning.message);
        }
        Ok(settings)
    }

    /// [`Self::from_env`] with any source of variables, and with the warnings: `lever-ignored` for a number that
    /// cannot be read, which counts as not set.
    ///
    /// # Errors
    /// [`ConfigError::Environment`], naming the variable, for a boolean that is neither `1`, `true`, `0`, `false` (in any
    /// case) nor empty, and for a `PEER` that is not UTF-8.
    pub fn from_lookup(
        prefix: &str,
        lookup: impl FnMut(&str) -> Option<OsString>,
    ) -> Result<(Self, Vec<ConfigFinding>), ConfigError> {
        let mut variables = Variables {
            prefix,
            lookup,
            warnings: Vec::new(),
        };
        let settings = Self {
            no_apply: variables.flag("NO_APPLY")?,
            no_ffn: variables.flag("NO_FFN")?,
            gemv_max_m: variables.number("GEMV_MAX_M", "a number of rows"),
            allow_partial: variables.flag("ALLOW_PARTIAL")?,
            experts: variables.flag("EXPERTS")?,
            expert_rank: variables.number("EXPERT_RANK", "a positive rank"),
            eager: variables.flag("EAGER")?,
            rotate: variables.flag("ROTATE")?,
            peer: variables.text("PEER")?,
            no_batch_verify: variables.flag("NO_BATCH_VERIFY")?,
            prefill_bgmv: variables.flag("PREFILL_BGMV")?,
        };
        Ok((settings, variables.warnings))
    }

    /// These values, and those of `lower` where there are none.
    #[must_use]
    pub fn over(self, lower: Self) -> Self {
        Self {
            no_apply: self.no_apply.or(lower.no_apply),
            no_ffn: self.no_ffn.or(lower.no_ffn),
            gemv_max_m: self.gemv_max_m.or(lower.gemv_max_m),
            allow_partial: self.allow_partial.or(lower.allow_partial),
            experts: self.experts.or(lower.experts),
            expert_rank: self.expert_rank.or(lower.expert_rank),
            eager: self.eager.or(lower.eager),
            rotate: self.rotate.or(lower.rotate),
            peer: self.peer.or(lower.peer),
            no_batch_verify: self.no_batch_verify.or(lower.no_batch_verify),
            prefill_bgmv: self.prefill_bgmv.or(lower.prefill_bgmv),
        }
    }
}

/// Variables of the process that configure stores of cloud providers (`AWS_...`, `GOOGLE_...`, `AZURE_...`), as their own tools
/// read them. A value that is not UTF-8 is left out.
pub fn store_settings_from_env() -> Vec<(String, String)> {
    const PREFIXES: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];
    let variables = std::env::vars_os().filter_map(|(name, value)| {
        let (name, value) = (name.into_string().ok()?, value.into_string().ok()?);
        let of_store = PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        of_store.then_some((name, value))
    });
    variables.collect()
}

/// A prefix and where its variables come from.
struct Variables<'a, L> {
    prefix: &'a str,
    lookup: L,
    warnings: Vec<ConfigFinding>,
}

impl<L: FnMut(&str) -> Option<OsString>> Variables<'_, L> {
    fn get(&mut self, name: &str) -> Option<(String, OsString)> {
        let variable = format!("{}{name}", self.prefix);
        let value = (self.lookup)(&variable)?;
        Some((variable, value))
    }

    fn flag(&mut self, name: &str) -> Result<Option<bool>, ConfigError> {
        let Some((variable, value)) = self.get(name) else {
            return Ok(None);
        };
        let value = value.to_string_lossy();
        match value.trim().to_ascii_lowercase().as_str() {
            "1" | "true" => Ok(Some(true)),
            "0" | "false" | "" => Ok(Some(false)),
            _ => Err(ConfigError::Environment {
                variable,
                value: value.into_owned(),
                expected: "it is 1 or true for on, 0, false or empty for off",
            }),
        }
    }

    fn number<N: std::str::FromStr>(&mut self, name: &str, expected: &str) -> Option<N> {
        let (variable, value) = self.get(name)?;
        let value = value.to_string_lossy();
        let number = value.trim().parse().ok();
        if number.is_none() {
            self.warnings.push(ConfigFinding::warn(
                "lever-ignored",
                format!("environment variable {variable} is {value:?}, not {expected}; ignored"),
            ));
        }
        number
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, ConfigError> {
        let Some((variable, value)) = self.get(name) else {
            return Ok(None);
        };
        let text = value
            .into_string()
            .map_err(|value| ConfigError::Environment {
                variable,
                value: value.to_string_lossy().into_owned(),
                expected: "it is UTF-8 text",
            })?;
        Ok(Some(text).filter(|text| !text.is_empty()))
    }
}

/// The levers' values, all layers and defaults considered.
///
/// A lever is set in code, in the environment (`METRALE_LORA_<NAME>`), or in `lora.toml`; the first of these that sets it
/// wins, else its default holds. [`LeverSettings`] is one such layer.
///
/// | variable | `lora.toml` | accessor | default |
/// |---|---|---|---|
/// | `NO_APPLY` | `levers.no_apply` | [`Self::lora_no_apply`] | off |
/// | `NO_FFN` | `levers.no_ffn` | [`Self::lora_no_ffn`] | off |
/// | `GEMV_MAX_M` | `levers.gemv_max_m` | [`Self::lora_gemv_max_m`] | 48 |
/// | `ALLOW_PARTIAL` | `levers.allow_partial` | [`Self::allow_partial_targets`] | off |
/// | `EXPERTS` | `levers.experts` | [`Self::lora_experts_env`] | off |
/// | `EXPERT_RANK` | `experts.rank` | [`Self::max_lora_expert_rank`] | 16 |
/// | `EAGER` | `levers.eager` | [`Self::lora_eager_env`] | off |
/// | `ROTATE` | `levers.rotate` | [`Self::lora_rotate_env`] | off |
/// | `PEER` | `peer` | [`Self::lora_peer_env`] | none |
/// | `NO_BATCH_VERIFY` | `levers.no_batch_verify` | [`Self::no_batch_verify`] | off |
/// | `PREFILL_BGMV` | `levers.prefill_bgmv` | [`Self::prefill_bgmv_forced`] | off |
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Levers {
    settings: LeverSettings,
}

impl Default for Levers {
    /// Every lever at its default.
    fn default() -> Self {
        Self::from_layers([])
    }
}

impl Levers {
    /// The environment over the defaults; [`LEVER_PREFIX`] is the usual prefix.
    ///
    /// # Errors
    /// As [`LeverSettings::from_lookup`].
    pub fn from_env(prefix: &str) -> Result<Self, ConfigError> {
        Ok(Self::from_layers([LeverSettings::from_env(prefix)?]))
    }

    /// Layers over the defaults, the strongest first.
    pub fn from_layers(layers: impl IntoIterator<Item = LeverSettings>) -> Self {
        let mut settings = layers
            .into_iter()
            .fold(LeverSettings::default(), LeverSettings::over);
        settings.peer = settings.peer.filter(|peer| !peer.is_empty());
        Self { settings }
    }

    /// Keep adapters resident and launch no delta: pair, routed and MoE paths alike. For measuring what applying costs.
    pub fn lora_no_apply(&self) -> bool {
        self.settings.no_apply.unwrap_or(false)
    }

    /// Skip the deltas of dense FFNs and of the GDN output projection; attention still applies. For measuring.
    pub fn lora_no_ffn(&self) -> bool {
        self.settings.no_ffn.unwrap_or(false)
    }

    /// Largest row count on the small-row path.
    pub fn lora_gemv_max_m(&self) -> u32 {
        self.settings.gemv_max_m.unwrap_or(DEFAULT_GEMV_MAX_M)
    }

    /// Load an adapter whose other targets cannot be applied, skipping and naming them.
    pub fn allow_partial_targets(&self) -> bool {
        self.settings.allow_partial.unwrap_or(false)
    }

    /// Load router and expert deltas.
    pub fn lora_experts_env(&self) -> bool {
        self.settings.experts.unwrap_or(false)
    }

    /// Padded rank of the expert pool: over 0.
    pub fn max_lora_expert_rank(&self) -> u32 {
        self.settings
            .expert_rank
            .map_or(DEFAULT_EXPERT_RANK, NonZeroU32::get)
    }

    /// Tell the engine to run without CUDA graphs while an adapter is loaded.
    pub fn lora_eager_env(&self) -> bool {
        self.settings.eager.unwrap_or(false)
    }

    /// Permit another adapter to become active, and startup slots to be overwritten, at run time. A peer permits it too.
    pub fn lora_rotate_env(&self) -> bool {
        self.settings.rotate.unwrap_or(false) || self.settings.peer.is_some()
    }

    /// Where staged adapters come from: `host:port` or a URL.
    pub fn lora_peer_env(&self) -> Option<&str> {
        self.settings.peer.as_deref()
    }

    /// No cross-sequence batched verify while an adapter is loaded.
    pub fn no_batch_verify(&self) -> bool {
        self.settings.no_batch_verify.unwrap_or(false)
    }

    /// Attention prefill takes the per-row routed path when it has a slot buffer and a route.
    pub fn prefill_bgmv_forced(&self) -> bool {
        self.settings.prefill_bgmv.unwrap_or(false)
    }
}

#[cfg(test)]
mod tests;
