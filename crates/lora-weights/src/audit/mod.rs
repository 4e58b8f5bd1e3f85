//! The audit: everything about an adapter that can be told before a byte of it goes to a device.
//!
//! [`audit_adapter`] looks at every tensor and every setting and reports all findings at once; it touches no device and never
//! fails: what is wrong is a [`Finding`]. Steps: sort the tensors by what they stand for; check and split pairs; check
//! vocabulary rows and tables; hold the config against what is there; scan the values.

mod context;
mod finding;
mod inventory;
mod overlays;
mod pair;
mod pairs;
mod reason;
mod report;
mod scan;
mod stacked;
mod targets;
#[cfg(test)]
mod tests;

pub use finding::Finding;
pub use pair::{AuditedPair, OutputRows, PairSource, StackedPair};
pub use reason::AuditReason;
pub use report::{AdapterBytes, AuditReport, OverlayRows, OverlayTableRows};

use crate::store::{open_config, open_weights, several_adapters};
use crate::{
    AdapterManifest, AdapterStore, ExpertProj, LoraTarget, PoolSpec, StoreError, TensorId,
    TensorMeta, WeightManifest, WeightsError, expert_router_bytes, pool_slot_bytes,
};
use context::{Context, Findings};
use inventory::Inventory;
use lora_config::{AdapterConfig, ConfigError, ModelSpec, ParseOptions, parse_peft_adapter_config};
use scan::Values;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Audits an opened adapter against a model and a pool.
///
/// The values are read once, on rayon's current thread pool; nothing of their size is allocated.
pub fn audit_adapter(
    store: &AdapterStore,
    config: &AdapterConfig,
    spec: &ModelSpec,
    pool: &PoolSpec,
) -> AuditReport {
    audit_parsed(Tensors::of_store(store), config, spec, pool)
}

/// Audits what is known of an adapter before its data: the header of its weights, and its config. A config that is refused is
/// a finding too.
///
/// No value is read, and the warning `values-unread` says so: NaN, infinity and an adapter that changes nothing are found once
/// the data is there. Everything else is as [`audit_adapter`] finds it.
pub fn audit_manifest(
    manifest: &AdapterManifest,
    options: &ParseOptions,
    spec: &ModelSpec,
    pool: &PoolSpec,
) -> AuditReport {
    let mut findings = Findings::default();
    let config = parsed_config(Ok(manifest.config_json.clone()), options, &mut findings);
    let tensors = Tensors {
        adapter: manifest.location.clone(),
        ..Tensors::of_manifest(&manifest.weights)
    };
    audit(
        tensors,
        Against {
            config: config.as_ref(),
            spec,
            pool,
        },
        findings,
    )
}

/// [`audit_adapter`] of a header alone.
pub(crate) fn audit_weights_manifest(
    weights: &WeightManifest,
    config: &AdapterConfig,
    spec: &ModelSpec,
    pool: &PoolSpec,
) -> AuditReport {
    audit_parsed(Tensors::of_manifest(weights), config, spec, pool)
}

fn audit_parsed(
    tensors: Tensors<'_>,
    config: &AdapterConfig,
    spec: &ModelSpec,
    pool: &PoolSpec,
) -> AuditReport {
    let mut findings = Findings::default();
    findings
        .0
        .extend(config.warnings().iter().cloned().map(Finding::from));
    let config = Some(config);
    audit(tensors, Against { config, spec, pool }, findings)
}

/// Opens the adapter folder `dir` and audits it; a file that cannot be read and a config that is refused are findings too.
///
/// Where only the config is refused, the tensors are audited for what can be told without it.
pub fn audit_dir(
    dir: &Path,
    options: &ParseOptions,
    spec: &ModelSpec,
    pool: &PoolSpec,
) -> AuditReport {
    let mut findings = Findings::default();
    let refused = |findings: Findings| AuditReport {
        adapter: dir.display().to_string(),
        findings: findings.0,
        ..AuditReport::default()
    };
    if let Some(several) = several_adapters(dir) {
        findings.0.push(Finding::from(&several));
        return refused(findings);
    }
    let config = parsed_config(open_config(dir), options, &mut findings);
    if matches!(findings.0.first(), Some(first) if first.reason == "missing-weights-file") {
        return refused(findings);
    }
    match open_weights(dir) {
        Ok(weights) => {
            let store = AdapterStore::from_parts(String::new(), weights, dir);
            let config = config.as_ref();
            let against = Against { config, spec, pool };
            audit(Tensors::of_store(&store), against, findings)
        }
        Err(error) => {
            findings.0.push(Finding::from(&error));
            let mut report = refused(findings);
            report.sort_findings();
            report
        }
    }
}

/// The tensors that are audited, and whose they are.
struct Tensors<'a> {
    adapter: String,
    metas: &'a [TensorMeta],
    values: Option<&'a AdapterStore>,
}

impl<'a> Tensors<'a> {
    fn of_store(store: &'a AdapterStore) -> Self {
        Self {
            adapter: store
                .path()
                .map_or_else(String::new, |path| path.display().to_string()),
            metas: store.tensors(),
            values: Some(store),
        }
    }

    fn of_manifest(weights: &'a WeightManifest) -> Self {
        Self {
            adapter: String::new(),
            metas: weights.tensors(),
            values: None,
        }
    }
}

/// What tensors are audited against. No config where it was refused.
#[derive(Clone, Copy)]
struct Against<'a> {
    config: Option<&'a AdapterConfig>,
    spec: &'a ModelSpec,
    pool: &'a PoolSpec,
}

fn parsed_config(
    text: Result<String, StoreError>,
    options: &ParseOptions,
    findings: &mut Findings,
) -> Option<AdapterConfig> {
    let text = text
        .map_err(|error| findings.0.push(Finding::from(&error)))
        .ok()?;
    match parse_peft_adapter_config(&text, options) {
        Ok(config) => {
            findings
                .0
                .extend(config.warnings().iter().cloned().map(Finding::from));
            Some(config)
        }
        Err(ConfigError::Rejected(rejected)) => {
            findings.0.extend(rejected.into_iter().map(Finding::from));
            None
        }
        Err(other) => {
            findings.0.push(Finding {
                level: lora_config::FindingLevel::Error,
                reason: "config".to_owned(),
                tensor: None,
                message: other.to_string(),
            });
            None
        }
    }
}

fn audit(tensors: Tensors<'_>, against: Against<'_>, mut findings: Findings) -> AuditReport {
    let Against { config, spec, pool } = against;
    let context = Context {
        tensors: tensors.metas,
        values: tensors.values,
        config,
        spec,
        pool,
    };
    let adapter = tensors.adapter;
    let tensors = context.tensors.len();
    if tensors == 0 {
        let message = "the file holds no tensor, as after a failed ZeRO-3 save; gather the weights and save again";
        findings.error_all(AuditReason::EmptyAdapter, message);
    }
    let inventory = Inventory::take(context, &mut findings);
    let pairs = collect_pairs(context, &inventory, &mut findings);
    overlays::check(context, &inventory, &mut findings);
    targets::check(context, &inventory, &pairs, &mut findings);
    check_experts(context, &inventory, &pairs, &mut findings);
    check_values(context, &inventory, &pairs, &mut findings);
    let applied = applied_tensors(&pairs).len() + overlays::applied(context, &inventory.overlays);
    let refused = findings.0.iter().any(Finding::is_error);
    if applied == 0 && tensors > 0 && !refused {
        let message = format!("none of the {tensors} tensors is applied");
        findings.error_all(AuditReason::NothingApplied, message);
    }
    let bytes = bytes(context, &inventory, &pairs, &mut findings);
    let mut ignored = inventory.ignored;
    ignored.sort();
    let mut report = AuditReport {
        adapter,
        values_read: context.values.is_some(),
        findings: findings.0,
        tensors,
        applied,
        ignored: ignored
            .iter()
            .map(|&id| context.name(id).to_owned())
            .collect(),
        pairs,
        overlay_rows: overlays::rows(context, &inventory.overlays),
        overlays: inventory.overlays,
        bytes,
    };
    report.sort_findings();
    report
}

/// Pairs of both kinds, in (layer, target) order. A target that both a stacked tensor and one of its own stand for is an error.
fn collect_pairs(
    context: Context<'_>,
    inventory: &Inventory,
    findings: &mut Findings,
) -> Vec<AuditedPair> {
    let mut pairs = BTreeMap::new();
    for (&(layer, target), halves) in &inventory.pairs {
        if let Some(pair) = pairs::check(context, (layer, target), halves, findings) {
            pairs.insert((layer, target), pair);
        }
    }
    for (&level, halves) in &inventory.stacked {
        let mut clash = false;
        for pair in stacked::split(context, level, halves, findings) {
            let key = (pair.layer, pair.target);
            clash |= inventory.pairs.contains_key(&key) || pairs.insert(key, pair).is_some();
        }
        if let (true, Some(id)) = (clash, halves.a) {
            let message = "holds experts that have tensors of their own in the file";
            findings.error(AuditReason::DuplicateTensor, context.name(id), message);
        }
    }
    pairs.into_values().collect()
}

/// Tensors that some pair reads.
fn applied_tensors(pairs: &[AuditedPair]) -> BTreeSet<TensorId> {
    pairs
        .iter()
        .flat_map(|pair| pair.source.tensors())
        .collect()
}

/// Router and expert tensors need a region; experts that are left out are named.
fn check_experts(
    context: Context<'_>,
    inventory: &Inventory,
    pairs: &[AuditedPair],
    findings: &mut Findings,
) {
    if context.pool.experts.is_none() {
        let single = inventory
            .pairs
            .iter()
            .filter(|((_, target), _)| !target.is_dense());
        let halves = single
            .map(|(_, halves)| halves)
            .chain(inventory.stacked.values());
        let ids: Vec<TensorId> = halves.flat_map(|h| [h.a, h.b]).flatten().collect();
        if let Some(&first) = ids.iter().min() {
            let message = format!(
                "{} tensors of routers and experts, this one first, and expert LoRA is off; turn on EXPERTS",
                ids.len()
            );
            findings.error(
                AuditReason::ExpertLoraDisabled,
                context.name(first),
                message,
            );
        }
    }
    let mut adapted: BTreeMap<(usize, ExpertProj), usize> = BTreeMap::new();
    for pair in pairs {
        if let LoraTarget::Expert { proj, .. } = pair.target {
            *adapted.entry((pair.layer, proj)).or_default() += 1;
        }
    }
    let experts = context.spec.moe.as_ref().map_or(0, |moe| moe.num_experts);
    let partial = |(_, count): &(&(usize, ExpertProj), &usize)| **count < experts;
    let mut layers: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for ((layer, proj), count) in adapted.iter().filter(partial) {
        let part = format!("{} of {experts} experts' {}", count, proj.peft_name());
        layers.entry(*layer).or_default().push(part);
    }
    for (layer, parts) in layers {
        let message = format!(
            "layer {layer}: {} adapted; the others stay the base model's",
            parts.join(", ")
        );
        findings.warn(AuditReason::ExpertsMissing, None, message);
    }
}

/// Values that are not finite, and an adapter that changes nothing.
fn check_values(
    context: Context<'_>,
    inventory: &Inventory,
    pairs: &[AuditedPair],
    findings: &mut Findings,
) {
    let Some(store) = context.values else {
        let message = "only the header was read: NaN, infinity and an adapter that changes nothing are found when the data is";
        return findings.warn(AuditReason::ValuesUnread, None, message);
    };
    let ignored: BTreeSet<TensorId> = inventory.ignored.iter().copied().collect();
    let values = scan::scan(store, |id| !ignored.contains(&id));
    for (index, Values { first_bad, .. }) in values.iter().enumerate() {
        let id = TensorId(index);
        if let Some(at) = *first_bad {
            let value = scan::value_at(store, id, at).unwrap_or(f32::NAN);
            let what = if value.is_finite() {
                ", which is too large for BF16"
            } else {
                ""
            };
            let message = format!("value {at} (row-major) is {value}{what}");
            findings.error(AuditReason::NonFiniteWeights, context.name(id), message);
        }
    }
    let zero = |pair: &AuditedPair| {
        let [_, b] = pair.source.tensors();
        !values[b.0].any_nonzero
    };
    let refused = findings.0.iter().any(Finding::is_error);
    if !refused && !pairs.is_empty() && inventory.overlays.is_empty() && pairs.iter().all(zero) {
        let message = "every B is zero, as before training: the adapter changes nothing";
        findings.warn(AuditReason::NoEffect, None, message);
    }
}

/// What the adapter takes; a pool that cannot be laid out is a finding.
fn bytes(
    context: Context<'_>,
    inventory: &Inventory,
    pairs: &[AuditedPair],
    findings: &mut Findings,
) -> AdapterBytes {
    let mut sized = |bytes: Result<u64, WeightsError>| {
        bytes.unwrap_or_else(|error| {
            findings.error_all(AuditReason::BadPool, error.to_string());
            0
        })
    };
    let expert_rank = context.pool.experts.map_or(0, |experts| experts.max_rank);
    AdapterBytes {
        slot: sized(pool_slot_bytes(context.spec, context.pool)),
        expert: sized(expert_router_bytes(pairs, expert_rank)),
        overlay: overlays::bytes(&inventory.overlays),
    }
}
