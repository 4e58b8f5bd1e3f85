use crate::ConfigError;

/// What the caller asserts beside the file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParseOptions {
    /// Take PEFT's own defaults (r 8, alpha 8, rsLoRA off) where a key is absent.
    pub assume_peft_defaults: bool,
    /// The served base is the changed base an unconverted PiSSA/OLoRA/... adapter is relative to.
    pub assume_base: bool,
}

/// Rank, alpha and scaling of one module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModuleScaling {
    /// True rank, over 0.
    pub rank: u32,
    /// Alpha, finite.
    pub alpha: f64,
    /// `alpha / rank` or `alpha / sqrt(rank)`, computed in f64.
    pub scaling: f32,
}

/// `target_modules` or `exclude_modules`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TargetModules {
    /// Names, each equal to a module path or a dotted suffix of one.
    List(Vec<String>),
    /// A Python regular expression that the whole path must match.
    Regex(String),
    /// `all-linear`.
    AllLinear,
}

/// Which vocabulary table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TokenTable {
    /// Input embedding.
    Embed,
    /// LM head.
    LmHead,
}

/// One `modules_to_save` entry that is a vocabulary table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedTable {
    /// As written in the config.
    pub name: String,
    /// The table it names.
    pub table: TokenTable,
}

/// `trainable_token_indices`, file order kept.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TrainableTokens {
    /// Ids of the input embedding.
    pub embed: Option<Vec<u32>>,
    /// Ids of the LM head, where the config names it.
    pub lm_head: Option<Vec<u32>>,
    /// True for a bare list: where embeddings are tied, the head follows the embedding.
    pub bare_list: bool,
}

/// `peft_version`, release numbers only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeftVersion {
    /// `x` of `x.y.z`.
    pub major: u32,
    /// `y`.
    pub minor: u32,
    /// `z`.
    pub patch: u32,
}

/// Order of the columns of a stacked-expert B.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LoraBLayout {
    /// Column `k * E + e` (PEFT).
    RankMajor,
    /// Column `e * r + k` (Unsloth, Megatron-Bridge).
    GroupedByExpert,
}

/// A parsed `adapter_config.json`: cannot hold a zero rank, a non-finite alpha, or a setting that changes
/// inference and is not applied.
#[derive(Debug, Clone)]
pub struct AdapterConfig {}

impl AdapterConfig {
    /// Rank, alpha and scaling of the module at `path` (no `base_model.model.` prefix; the parameter's path for
    /// stacked experts).
    pub fn module(&self, _path: &str) -> ModuleScaling {
        unimplemented!()
    }
    /// [`Self::module`]'s scaling.
    pub fn scaling(&self, path: &str) -> f32 {
        self.module(path).scaling
    }
}

/// Parses an `adapter_config.json`.
pub fn parse_peft_adapter_config(
    _json: &str,
    _options: &ParseOptions,
) -> Result<AdapterConfig, ConfigError> {
    unimplemented!()
}
