//! The config against the tensors: the tensors decide what is applied, the config says what ought to be there.

use super::AuditReason;
use super::context::{Context, Findings};
use super::inventory::Inventory;
use super::pair::AuditedPair;
use super::stacked::{self, Parameter};
use crate::names::moe_of_layer;
use crate::{ExpertProj, LoraModule, OverlayTensorKind};
use lora_config::{AdapterConfig, FindingLevel, MoeSpec, TargetMatch, TargetModules, TokenTable};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Module and parameter paths, with `parent` before `layers.N`.
struct Paths<'a> {
    context: Context<'a>,
    parent: &'a str,
}

impl Paths<'_> {
    fn module(&self, layer: usize, inside: &str) -> String {
        let dot = if self.parent.is_empty() { "" } else { "." };
        format!("{}{dot}layers.{layer}.{inside}", self.parent)
    }

    fn layers(&self) -> std::ops::Range<usize> {
        0..self.context.spec.layers.len()
    }

    fn block(&self) -> &'static str {
        self.context.spec.ffn_block()
    }
}

/// Compares the config with what is in the file.
pub(super) fn check(
    context: Context<'_>,
    inventory: &Inventory,
    pairs: &[AuditedPair],
    findings: &mut Findings,
) {
    let Some(config) = context.config else {
        return;
    };
    if inventory.seen.is_empty() && inventory.overlays.is_empty() {
        // An empty file, or names that are all refused: every target would be missing, and the reason is another one.
        return;
    }
    let paths = Paths {
        context,
        parent: inventory.parent.as_deref().unwrap_or("model"),
    };
    let here = present_paths(&paths, inventory);
    check_modules(&paths, (config, inventory), findings);
    check_tables(context, (config, inventory), findings);
    check_stacked(&paths, (config, inventory), findings);
    check_target_names(&paths, (config, &here), findings);
    check_parameter_names(&paths, (config, &here), findings);
    check_patterns(config, &here, findings);
    check_undeclared(config, pairs, findings);
}

/// Every path of a set and every dotted suffix of one: what an entry of a list can name.
struct Suffixes<'a>(HashSet<&'a str>);

impl<'a> Suffixes<'a> {
    fn of(paths: impl IntoIterator<Item = &'a String>) -> Self {
        let suffixes = |path: &'a String| {
            let after_dot = path.match_indices('.').map(|(dot, _)| &path[dot + 1..]);
            std::iter::once(path.as_str()).chain(after_dot)
        };
        Self(paths.into_iter().flat_map(suffixes).collect())
    }

    fn has(&self, entry: &str) -> bool {
        self.0.contains(entry)
    }
}

/// What the file holds, as paths that a config's entries match: modules, tables, stacked parameters.
fn present_paths(paths: &Paths<'_>, inventory: &Inventory) -> BTreeSet<String> {
    let mut present: BTreeSet<String> = inventory
        .seen
        .iter()
        .map(|(layer, inside)| paths.module(*layer, inside))
        .collect();
    present.extend(inventory.pairs.values().map(|halves| halves.path.clone()));
    if let Some(head) = &inventory.head {
        present.insert(head.path.clone());
    }
    for overlay in inventory.overlays.iter() {
        present.insert(match overlay.module {
            TokenTable::Embed => "model.embed_tokens".to_owned(),
            TokenTable::LmHead => "lm_head".to_owned(),
        });
    }
    if let Some(config) = paths.context.config {
        for halves in inventory.stacked.values() {
            let module = stacked::module_of(&halves.path);
            let declared = stacked::declared(config, module);
            present.extend(declared.iter().map(|p| format!("{module}.{}", p.name())));
        }
    }
    present
}

/// A module that the model has on a layer and the config targets, by its name or by its weight's, has tensors there. Of a
/// router only the weight's name counts: it is a linear module in some releases of transformers and none in others.
fn check_modules(
    paths: &Paths<'_>,
    (config, inventory): (&AdapterConfig, &Inventory),
    findings: &mut Findings,
) {
    let spec = paths.context.spec;
    let is_declared = |path: &str| stacked::names_path(config, &format!("{path}.weight"));
    let mut missing: BTreeMap<Option<LoraModule>, Vec<String>> = BTreeMap::new();
    for layer in paths.layers() {
        for module in LoraModule::every().filter(|m| m.applies_to_layer(spec, layer)) {
            let inside = module.name_in(spec);
            let path = paths.module(layer, &inside);
            let is_target = config.targets(&path) == TargetMatch::Yes || is_declared(&path);
            if is_target && !inventory.seen.contains(&(layer, inside)) {
                missing.entry(Some(module)).or_default().push(path);
            }
        }
        if let Some(moe) = moe_of_layer(spec, layer) {
            let path = paths.module(layer, &format!("{}.{}", paths.block(), moe.router_name));
            let seen = |inside| inventory.seen.contains(&(layer, inside));
            if is_declared(&path) && !router_names(paths, moe).into_iter().any(seen) {
                missing.entry(None).or_default().push(path);
            }
        }
    }
    for paths_missing in missing.values() {
        let message = format!(
            "the config targets `{}`, which the model has, and the file holds nothing for it ({} layers)",
            paths_missing[0],
            paths_missing.len()
        );
        unmatched(paths.context, message, findings);
    }
}

/// A vocabulary table that the config targets has a low-rank pair.
fn check_tables(
    context: Context<'_>,
    (config, inventory): (&AdapterConfig, &Inventory),
    findings: &mut Findings,
) {
    let low_rank = |kind| inventory.overlays.get(TokenTable::Embed, kind).is_some();
    let embed = low_rank(OverlayTensorKind::EmbeddingA) || low_rank(OverlayTensorKind::EmbeddingB);
    let tables = [
        ("model.embed_tokens", embed),
        ("lm_head", inventory.head.is_some()),
    ];
    for (path, is_there) in tables {
        if !is_there && config.targets(path) == TargetMatch::Yes {
            let message = format!(
                "the config targets `{path}`, which the model has, and the file holds no pair for it"
            );
            unmatched(context, message, findings);
        }
    }
}

/// A stacked parameter that the config declares has tensors on every MoE layer, unless that layer's experts have tensors of
/// their own.
fn check_stacked(
    paths: &Paths<'_>,
    (config, inventory): (&AdapterConfig, &Inventory),
    findings: &mut Findings,
) {
    let mut missing: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for layer in paths.layers() {
        if moe_of_layer(paths.context.spec, layer).is_none() {
            continue;
        }
        let inside = format!("{}.experts", paths.block());
        let module = paths.module(layer, &inside);
        let declared = stacked::declared(config, &module);
        let singly = || {
            let own = |(l, path): &(usize, String)| {
                let number = path
                    .strip_prefix(&inside)
                    .and_then(|rest| rest.strip_prefix('.'));
                *l == layer
                    && number.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
            };
            inventory.seen.iter().any(own)
        };
        for (depth, parameter) in declared.iter().rev().enumerate() {
            let level = stacked::Level { layer, depth };
            if !inventory.stacked.contains_key(&level) && !singly() {
                let path = format!("{module}.{}", parameter.name());
                missing.entry(parameter.name()).or_default().push(path);
            }
        }
    }
    for paths_missing in missing.values() {
        let message = format!(
            "target_parameters names `{}`, which the model has, and the file holds nothing for it ({} layers)",
            paths_missing[0],
            paths_missing.len()
        );
        unmatched(paths.context, message, findings);
    }
}

fn unmatched(context: Context<'_>, message: String, findings: &mut Findings) {
    let level = if context.pool.policy.allow_partial_targets {
        FindingLevel::Warning
    } else {
        FindingLevel::Error
    };
    findings.push(level, AuditReason::UnmatchedTarget, None, message);
}

/// Names of `target_modules` that nothing in the file and no module checked above has.
fn check_target_names(
    paths: &Paths<'_>,
    (config, here): (&AdapterConfig, &BTreeSet<String>),
    findings: &mut Findings,
) {
    let Some(TargetModules::List(names)) = config.target_modules() else {
        return;
    };
    let (model, routed) = (model_modules(paths), routed_modules(paths));
    let known = Suffixes::of(here.iter().chain(&model));
    let routed = Suffixes::of(&routed);
    for name in names.iter().filter(|name| !known.has(name)) {
        let message = if routed.has(name) {
            format!(
                "target_modules names `{name}`, a name of routed experts or of the router, and the file holds nothing for it"
            )
        } else {
            format!("target_modules names `{name}`, which neither the file nor the model has")
        };
        findings.warn(AuditReason::UnmatchedTarget, None, message);
    }
}

/// Entries of `target_parameters` that name nothing.
fn check_parameter_names(
    paths: &Paths<'_>,
    (config, here): (&AdapterConfig, &BTreeSet<String>),
    findings: &mut Findings,
) {
    let weights = |path: &String| format!("{path}.weight");
    let (model, routed) = (model_modules(paths), routed_modules(paths));
    let modules = here.iter().chain(&model).chain(&routed);
    let mut known: Vec<String> = modules.map(weights).collect();
    for layer in paths.layers() {
        let parameters = [Parameter::GateUp, Parameter::Down];
        let path =
            |p: Parameter| paths.module(layer, &format!("{}.experts.{}", paths.block(), p.name()));
        if moe_of_layer(paths.context.spec, layer).is_some() {
            known.extend(parameters.map(path));
        }
    }
    let known = Suffixes::of(here.iter().chain(&known));
    let entries = config.target_parameters().iter();
    for entry in entries.filter(|entry| !known.has(entry)) {
        let message =
            format!("target_parameters names `{entry}`, which neither the file nor the model has");
        findings.warn(AuditReason::UnmatchedTarget, None, message);
    }
}

/// Paths of the model's modules and tables.
fn model_modules(paths: &Paths<'_>) -> Vec<String> {
    let spec = paths.context.spec;
    let mut modules: Vec<String> = paths
        .layers()
        .flat_map(|layer| LoraModule::every().map(move |module| (layer, module)))
        .filter(|(layer, module)| module.applies_to_layer(spec, *layer))
        .map(|(layer, module)| paths.module(layer, &module.name_in(spec)))
        .collect();
    modules.extend(["model.embed_tokens".to_owned(), "lm_head".to_owned()]);
    modules
}

/// The names that a router may have inside a layer, those of other releases of transformers included.
fn router_names(paths: &Paths<'_>, moe: &MoeSpec) -> [String; 2] {
    ["gate", moe.router_name].map(|name| format!("{}.{name}", paths.block()))
}

/// Paths of one expert's modules and of the router on every MoE layer, in both spellings.
fn routed_modules(paths: &Paths<'_>) -> Vec<String> {
    let mut modules = Vec::new();
    for layer in paths.layers() {
        let Some(moe) = moe_of_layer(paths.context.spec, layer) else {
            continue;
        };
        let block = paths.block();
        modules.extend(router_names(paths, moe).map(|inside| paths.module(layer, &inside)));
        for proj in ExpertProj::ALL {
            let names = [
                (block, proj.peft_name()),
                ("block_sparse_moe", proj.mixtral_name()),
            ];
            modules
                .extend(names.map(|(block, name)| {
                    paths.module(layer, &format!("{block}.experts.0.{name}"))
                }));
        }
        modules.push(paths.module(layer, &format!("{block}.experts")));
    }
    modules
}

/// Pattern keys that match nothing, and alpha keys that match together.
fn check_patterns(config: &AdapterConfig, here: &BTreeSet<String>, findings: &mut Findings) {
    let mut rank_used = vec![false; config.rank_pattern().len()];
    let mut alpha_used = vec![false; config.alpha_pattern().len()];
    let mut overlaps: BTreeMap<Vec<usize>, &str> = BTreeMap::new();
    let weights: Vec<String> = here.iter().map(|path| format!("{path}.weight")).collect();
    let weights = weights
        .iter()
        .filter(|path| stacked::names_path(config, path));
    for path in here.iter().chain(weights) {
        for key in config.rank_keys_matching(path) {
            rank_used[key] = true;
        }
        let keys: Vec<usize> = config.alpha_keys_matching(path).collect();
        for &key in &keys {
            alpha_used[key] = true;
        }
        if keys.len() > 1 {
            overlaps.entry(keys).or_insert(path);
        }
    }
    let rank_keys = config.rank_pattern().iter().map(|(key, _)| key);
    let alpha_keys = config.alpha_pattern().iter().map(|(key, _)| key);
    let unused_ranks = rank_keys
        .zip(&rank_used)
        .map(|(key, used)| ("rank_pattern", key, used));
    let unused_alphas = alpha_keys
        .zip(&alpha_used)
        .map(|(key, used)| ("alpha_pattern", key, used));
    for (field, key, _) in unused_ranks
        .chain(unused_alphas)
        .filter(|(_, _, used)| !**used)
    {
        let message = format!("the key `{key}` of {field} matches nothing in the file");
        findings.warn(AuditReason::UnmatchedPattern, None, message);
    }
    for (keys, path) in overlaps {
        let shown: Vec<String> = keys
            .iter()
            .map(|&key| &config.alpha_pattern()[key])
            .map(|(key, alpha)| format!("`{key}` ({alpha})"))
            .collect();
        let message = format!(
            "{} of alpha_pattern all match `{path}`; the first in the file decides, and PEFT sorts keys when it saves",
            shown.join(", ")
        );
        findings.warn(AuditReason::PatternOverlap, None, message);
    }
}

/// Pairs that neither `target_modules` nor `target_parameters` names.
fn check_undeclared(config: &AdapterConfig, pairs: &[AuditedPair], findings: &mut Findings) {
    let undeclared: BTreeSet<&str> = pairs
        .iter()
        .map(|pair| pair.path.as_str())
        .filter(|path| {
            config.targets(path) == TargetMatch::No && !stacked::names_path(config, path)
        })
        .collect();
    if let Some(first) = undeclared.first() {
        let message = format!(
            "{} modules are applied that the config does not target, `{first}` first",
            undeclared.len()
        );
        findings.warn(AuditReason::UndeclaredTarget, None, message);
    }
}
