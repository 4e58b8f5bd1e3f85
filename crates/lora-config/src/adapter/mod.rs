//! `adapter_config.json`: every field of every PEFT version is applied, checked, ignored or refused.

mod fields;
mod options;
mod pattern;
mod scaling;
mod targets;
mod tokens;
mod version;

pub use options::ParseOptions;
pub use scaling::ModuleScaling;
pub use targets::{TargetMatch, TargetModules};
pub use tokens::{SavedTable, TokenTable, TrainableTokens};
pub use version::PeftVersion;

use crate::json::{self, Json};
use crate::{ConfigError, ConfigFinding};
use fields::Fields;
use scaling::PatternTable;
use targets::TargetRules;

/// Last segments of the module names that an adapter is applied to wherever the model has them, in the pool's order. Any
/// other name is legal in `target_modules`: it is judged by tensors and model, not here.
pub const PEFT_SUPPORTED_TARGET_MODULES: [&str; 8] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "out_proj",
];

/// Order of the columns of a stacked-expert B, `[out, E * r]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LoraBLayout {
    /// Column `k * E + e`: PEFT. Written `rank_major`.
    RankMajor,
    /// Column `e * r + k`: Megatron-Bridge, and Unsloth before it marked its files. Written `grouped_by_expert`.
    GroupedByExpert,
}

/// Tensors that the config declares and inference does not need: an audit ignores them by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DeclaredBuffers {
    /// `velora_config` is set: `lora_velora_embed` buffers.
    pub velora: bool,
    /// `monteclora_config` is set: `lora_monteclora_sampler.*` buffers.
    pub monteclora: bool,
}

/// A parsed `adapter_config.json`. It cannot hold a zero rank, a non-finite alpha or scale, or a setting that changes
/// inference and is not applied: such a file is refused by [`parse_peft_adapter_config`].
///
/// Module paths are PEFT's without `base_model.model.`: `model.layers.0.self_attn.q_proj`, or, for stacked experts, the
/// parameter's path, `model.layers.0.mlp.experts.gate_up_proj`.
#[derive(Debug, Clone)]
pub struct AdapterConfig {
    r: u32,
    alpha: f64,
    use_rslora: bool,
    rank_pattern: PatternTable<u32>,
    alpha_pattern: PatternTable<f64>,
    targets: TargetRules,
    target_parameters: Vec<String>,
    modules_to_save: Vec<SavedTable>,
    trainable_tokens: Option<TrainableTokens>,
    ensure_weight_tying: bool,
    peft_version: Option<PeftVersion>,
    lora_b_layout: Option<LoraBLayout>,
    declared_buffers: DeclaredBuffers,
    warnings: Vec<ConfigFinding>,
}

impl AdapterConfig {
    /// `r`: the rank of modules that no key of `rank_pattern` matches.
    pub fn r(&self) -> u32 {
        self.r
    }

    /// `lora_alpha`: the alpha of modules that no key of `alpha_pattern` matches. Finite; zero or negative only with a
    /// warning.
    pub fn alpha(&self) -> f64 {
        self.alpha
    }

    /// Scales are alpha / sqrt(rank) instead of alpha / rank.
    pub fn use_rslora(&self) -> bool {
        self.use_rslora
    }

    /// Rank, alpha and scale of the module at `path`.
    ///
    /// Rank and alpha each come from the first key of their pattern, in file order, for which Python's
    /// `re.match(r"(.*\.)?(KEY)$", path)` matches, as in PEFT since 0.15; a key whose match did not finish counts as not
    /// matching (see [`Self::undecided_pattern`]).
    pub fn module(&self, path: &str) -> ModuleScaling {
        ModuleScaling::new(
            self.rank_pattern.value(path).unwrap_or(self.r),
            self.alpha_pattern.value(path).unwrap_or(self.alpha),
            self.use_rslora,
        )
    }

    /// The scale of [`Self::module`].
    pub fn scaling(&self, path: &str) -> f32 {
        self.module(path).scaling
    }

    /// `rank_pattern` in file order.
    pub fn rank_pattern(&self) -> &[(String, u32)] {
        &self.rank_pattern.entries
    }

    /// `alpha_pattern` in file order.
    pub fn alpha_pattern(&self) -> &[(String, f64)] {
        &self.alpha_pattern.entries
    }

    /// Indices into [`Self::rank_pattern`] of the keys that match `path`, ascending; the first one decides.
    pub fn rank_keys_matching<'a>(&'a self, path: &'a str) -> impl Iterator<Item = usize> + 'a {
        self.rank_pattern.matching(path)
    }

    /// Indices into [`Self::alpha_pattern`] of the keys that match `path`, ascending; the first one decides.
    pub fn alpha_keys_matching<'a>(&'a self, path: &'a str) -> impl Iterator<Item = usize> + 'a {
        self.alpha_pattern.matching(path)
    }

    /// The field and key that might decide rank or alpha of `path` and whose match was given up after too many backtracking
    /// steps: only keys with lookaround or back references can come to that. A loader refuses such a module.
    pub fn undecided_pattern(&self, path: &str) -> Option<(&'static str, &str)> {
        let rank = self.rank_pattern.undecided(path);
        let alpha = || self.alpha_pattern.undecided(path);
        rank.map(|key| ("rank_pattern", key))
            .or_else(|| alpha().map(|key| ("alpha_pattern", key)))
    }

    /// `target_modules`; `None` where absent or null.
    pub fn target_modules(&self) -> Option<&TargetModules> {
        self.targets.targets.as_ref()
    }

    /// Whether the config targets the module at `path`: `target_modules`, `exclude_modules`, `layers_to_transform` and
    /// `layers_pattern` together, in PEFT's order. For an audit: the tensors decide what is applied.
    pub fn targets(&self, path: &str) -> TargetMatch {
        self.targets.targets(path)
    }

    /// `target_parameters`: the parameters (stacked experts, a router's weight) that are adapted directly, in file order.
    pub fn target_parameters(&self) -> &[String] {
        &self.target_parameters
    }

    /// `modules_to_save`: vocabulary tables that the adapter replaces whole.
    pub fn modules_to_save(&self) -> &[SavedTable] {
        &self.modules_to_save
    }

    /// `trainable_token_indices`; `None` where it names no id.
    pub fn trainable_tokens(&self) -> Option<&TrainableTokens> {
        self.trainable_tokens.as_ref()
    }

    /// A tied LM head's pair must be the transpose of the embedding's: an audit compares them.
    pub fn ensure_weight_tying(&self) -> bool {
        self.ensure_weight_tying
    }

    /// `peft_version`; absent before 0.18, and `None` (with a warning) where it is no version number.
    pub fn peft_version(&self) -> Option<PeftVersion> {
        self.peft_version
    }

    /// `lora_B_layout`, which Unsloth writes: the column order of stacked experts' B.
    pub fn lora_b_layout(&self) -> Option<LoraBLayout> {
        self.lora_b_layout
    }

    /// Buffers of training-time methods that the file may hold and inference does not need.
    pub fn declares_buffers(&self) -> DeclaredBuffers {
        self.declared_buffers
    }

    /// What loads and a person should know: `alpha-not-positive` (of the config's own numbers), `unchecked-regex`,
    /// `peft-version-unknown`.
    pub fn warnings(&self) -> &[ConfigFinding] {
        &self.warnings
    }
}

/// Parses the text of an `adapter_config.json`.
///
/// # Errors
/// [`ConfigError::Rejected`] with **every** refused field at once: reason `config-<field>`, the value, and the way out.
/// `config-not-json` and `config-duplicate-key` are about the text itself.
pub fn parse_peft_adapter_config(
    json: &str,
    options: &ParseOptions,
) -> Result<AdapterConfig, ConfigError> {
    let object = json::parse_object(json).map_err(|fault| {
        let message = format!("adapter_config.json: {fault}");
        ConfigError::Rejected(vec![ConfigFinding::reject("not-json", message)])
    })?;
    let mut fields = Fields::new(&object, *options);
    reject_repeated_keys(&mut fields, &object.repeated_keys());
    if !check_peft_type(&mut fields) {
        // The fields of another method mean other things: refusing them one by one would mislead.
        return Err(ConfigError::Rejected(fields.findings));
    }
    let modules_to_save = tokens::read_saved_tables(&mut fields);
    let config = AdapterConfig {
        r: scaling::read_r(&mut fields),
        alpha: scaling::read_alpha(&mut fields),
        use_rslora: scaling::read_use_rslora(&mut fields),
        rank_pattern: scaling::read_rank_pattern(&mut fields),
        alpha_pattern: scaling::read_alpha_pattern(&mut fields),
        targets: TargetRules::read(&mut fields, &modules_to_save),
        target_parameters: fields.names("target_parameters").unwrap_or_default(),
        modules_to_save,
        trainable_tokens: tokens::read_trainable_tokens(&mut fields),
        ensure_weight_tying: fields.flag("ensure_weight_tying"),
        peft_version: version::read(&mut fields),
        lora_b_layout: read_lora_b_layout(&mut fields),
        declared_buffers: DeclaredBuffers {
            velora: is_set(&fields, "velora_config"),
            monteclora: is_set(&fields, "monteclora_config"),
        },
        warnings: Vec::new(),
    };
    check_bias(&mut fields);
    check_initialisation(&mut fields);
    fields::check_the_rest(&mut fields);
    if fields.findings.is_empty() {
        Ok(AdapterConfig {
            warnings: fields.warnings,
            ..config
        })
    } else {
        Err(ConfigError::Rejected(fields.findings))
    }
}

/// Checks that every rank the config states fits a pool whose slots hold ranks up to `max_rank` (as asked for, before
/// rounding to the granule). Target names are not judged here: an audit holds them against tensors and model.
///
/// # Errors
/// [`ConfigError::Rejected`] with one `rank-exceeds-pool` for each rank over `max_rank`.
pub fn validate_peft_config(config: &AdapterConfig, max_rank: u32) -> Result<(), ConfigError> {
    let finding = |field: String, rank: u32| ConfigFinding {
        level: crate::FindingLevel::Error,
        reason: "rank-exceeds-pool".to_owned(),
        message: format!(
            "{field} is {rank}, and the pool holds ranks up to {max_rank}; raise max_rank"
        ),
    };
    let whole = (config.r > max_rank).then(|| finding("r".to_owned(), config.r));
    let keys = config
        .rank_pattern()
        .iter()
        .filter(|(_, rank)| *rank > max_rank)
        .map(|(key, rank)| finding(format!("rank_pattern[{}]", fields::quoted(key)), *rank));
    let findings: Vec<ConfigFinding> = whole.into_iter().chain(keys).collect();
    if findings.is_empty() {
        Ok(())
    } else {
        Err(ConfigError::Rejected(findings))
    }
}

fn reject_repeated_keys(fields: &mut Fields<'_>, keys: &[String]) {
    let mut problems = fields::Problems::default();
    for key in keys {
        problems.push(|| {
            format!(
                "{} stands more than once, and readers differ in which value they take; keep one",
                fields::quoted(key)
            )
        });
    }
    if !keys.is_empty() {
        fields
            .findings
            .push(ConfigFinding::reject("duplicate-key", problems.to_string()));
    }
}

/// False where the file belongs to another method than LoRA.
fn check_peft_type(fields: &mut Fields<'_>) -> bool {
    const FIELD: &str = "peft_type";
    match fields.given(FIELD) {
        Some(Json::Text(text)) if text == "LORA" => true,
        Some(value) => {
            let message = format!("is {value}; only \"LORA\" (upper case) is loaded");
            fields.reject(FIELD, message);
            false
        }
        None => {
            fields.reject(
                FIELD,
                "is missing; a file that PEFT wrote has \"LORA\" there, and other tools' formats (MLX, Kohya, ...) are not \
                 read: save the adapter with PEFT",
            );
            true
        }
    }
}

fn check_bias(fields: &mut Fields<'_>) {
    match fields.given("bias") {
        None => {}
        Some(Json::Text(text)) if text == "none" => {}
        Some(Json::Text(text)) if matches!(text.as_str(), "all" | "lora_only") => {
            let message = format!(
                "is {text:?}: trained biases replace the base model's, which is not applied; train with bias=\"none\""
            );
            fields.reject("bias", message);
        }
        Some(value) => {
            let message = format!("is {value}; PEFT knows \"none\", \"all\" and \"lora_only\"");
            fields.reject("bias", message);
        }
    }
}

/// An initialisation that changes the base leaves an adapter relative to that changed base, with tensors that look like
/// any others.
fn check_initialisation(fields: &mut Fields<'_>) {
    const FIELD: &str = "init_lora_weights";
    let name = match fields.given(FIELD) {
        None | Some(Json::Bool(_)) => return,
        Some(Json::Text(text)) => text.to_ascii_lowercase(),
        Some(value) => {
            let message = format!("is {value}; it is true, false or the name of a method");
            return fields.reject(FIELD, message);
        }
    };
    if matches!(
        name.as_str(),
        "" | "gaussian" | "orthogonal" | "mica" | "eva"
    ) || fields.options.assume_base
    {
        return;
    }
    let changes_base = name.starts_with("pissa")
        || name.starts_with("corda")
        || matches!(name.as_str(), "olora" | "lora_ga" | "loftq");
    let why = if changes_base {
        "the adapter is relative to a base model that this initialisation changed"
    } else {
        "no PEFT version up to 0.21 knows it, and the adapter may be relative to a changed base model"
    };
    let message = format!(
        "is {}: {why}; convert it when saving (path_initial_model_for_weight_conversion), or pass assume_base \
         (--assume-base) if the served base is that changed one",
        fields::quoted(&name)
    );
    fields.reject(FIELD, message);
}

fn read_lora_b_layout(fields: &mut Fields<'_>) -> Option<LoraBLayout> {
    let value = fields.given("lora_B_layout")?;
    match value {
        Json::Text(text) if text == "rank_major" => Some(LoraBLayout::RankMajor),
        Json::Text(text) if text == "grouped_by_expert" => Some(LoraBLayout::GroupedByExpert),
        _ => {
            let message = format!("is {value}; \"rank_major\" and \"grouped_by_expert\" are known");
            fields.reject("lora_B_layout", message);
            None
        }
    }
}

fn is_set(fields: &Fields<'_>, field: &str) -> bool {
    !matches!(
        fields.raw(field),
        None | Some(Json::Null | Json::Bool(false))
    )
}
