//! Every tensor of the file, sorted by what it is. Each one lands in exactly one place or in a finding.

use super::context::{Context, Findings};
use super::stacked::{self, Level};
use super::{AuditReason, Finding};
use crate::names::{
    LayerPath, LoraWeightPath, TensorPath, is_original_module, overlay_of, place, table_of,
};
use crate::{AdapterAb, LoraTarget, OverlayTensor, OverlayTensors, RejectReason, TensorId};
use lora_config::{DeclaredBuffers, FindingLevel, TokenTable};
use std::collections::{BTreeMap, HashSet};

/// The two matrices of a pair, as far as they are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Halves {
    /// Module path of the first one met.
    pub(super) path: String,
    first: TensorId,
    pub(super) a: Option<TensorId>,
    pub(super) b: Option<TensorId>,
}

impl Halves {
    /// Both, or the one that is there and which one is not.
    pub(super) fn both(&self) -> Result<(TensorId, TensorId), (TensorId, &'static str)> {
        match (self.a, self.b) {
            (Some(a), Some(b)) => Ok((a, b)),
            (_, None) => Err((self.first, "lora_B")),
            (None, _) => Err((self.first, "lora_A")),
        }
    }

    fn new(path: &str, first: TensorId) -> Self {
        Self {
            path: path.to_owned(),
            first,
            a: None,
            b: None,
        }
    }
}

/// The file's tensors by what they are.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    /// Ordinary pairs.
    pub(super) pairs: BTreeMap<(usize, LoraTarget), Halves>,
    /// Pairs that hold all experts of a layer.
    pub(super) stacked: BTreeMap<Level, Halves>,
    /// The pair on the LM head.
    pub(super) head: Option<Halves>,
    /// Rows and tables of the vocabulary.
    pub(super) overlays: OverlayTensors,
    /// What inference does not need, or what the policy lets go.
    pub(super) ignored: Vec<TensorId>,
    /// Modules (layer, path inside it) that some pair's tensor stands for, refused ones included.
    pub(super) seen: HashSet<(usize, String)>,
    /// What stands before `layers.N` in this file.
    pub(super) parent: Option<String>,
    /// Names of the wrapped, the needless and the adapters, for findings that sum them up.
    renamed: Vec<TensorId>,
    needless: Vec<TensorId>,
    adapters: BTreeMap<Option<String>, TensorId>,
}

impl Inventory {
    /// Sorts every tensor of the store.
    pub(super) fn take(context: Context<'_>, findings: &mut Findings) -> Self {
        let mut inventory = Self::default();
        for index in 0..context.tensors.len() {
            inventory.sort(context, TensorId(index), findings);
        }
        inventory.sum_up(context, findings);
        inventory
    }

    fn sort(&mut self, context: Context<'_>, id: TensorId, findings: &mut Findings) {
        let name = context.name(id);
        let path = match TensorPath::parse(name, context.pool.policy.accept_bare_names) {
            Ok(path) => path,
            Err(reject) => return findings.0.push(reject.into()),
        };
        if path.renamed {
            self.renamed.push(id);
        }
        if let Some((module, kind)) = overlay_of(&path) {
            let tensor = OverlayTensor {
                module,
                kind,
                id,
                name: name.to_owned(),
                shape: context.shape(id).to_vec(),
            };
            if self.overlays.insert(tensor).is_err() {
                let message = format!(
                    "a second tensor for {} of {}",
                    role(kind),
                    module.peft_name()
                );
                findings.error(AuditReason::DuplicateOverlayTensor, name, message);
            }
        } else if is_original_module(&path) || is_declared_buffer(context, &path.path) {
            self.needless.push(id);
            self.ignored.push(id);
        } else if let Some((reason, message)) = unimplemented_part(&path.path) {
            findings.error(reason, name, message);
        } else if let Some(weight) = path.lora_weight() {
            self.sort_weight(context, (id, &path), weight, findings);
        } else if let Err(reject) = place(name, &path, context.spec, context.pool.modules) {
            findings.0.push(reject.into());
        }
    }

    /// A `lora_A` or `lora_B` weight.
    fn sort_weight(
        &mut self,
        context: Context<'_>,
        (id, path): (TensorId, &TensorPath<'_>),
        weight: LoraWeightPath<'_>,
        findings: &mut Findings,
    ) {
        let name = context.name(id);
        self.adapters
            .entry(weight.adapter.map(str::to_owned))
            .or_insert(id);
        if table_of(weight.module) == Some(TokenTable::LmHead) {
            let message = "a low-rank pair on the LM head is not applied; merge it into a full lm_head (modules_to_save)";
            findings.error(AuditReason::LmHeadLoraUnimplemented, name, message);
            let head = &mut self.head;
            let place = head.get_or_insert_with(|| Halves::new(weight.module, id));
            return fill(place, (id, weight.ab), context, findings);
        }
        if let Ok(at) = LayerPath::parse(weight.module) {
            self.seen.insert((at.layer, at.rest.to_owned()));
            if let Some(level) = stacked::level_of(&at, context.spec)
                && stacked::is_declared(context, weight.module)
            {
                self.parent.get_or_insert_with(|| at.parent.to_owned());
                let place = self
                    .stacked
                    .entry(level)
                    .or_insert_with(|| Halves::new(weight.module, id));
                return fill(place, (id, weight.ab), context, findings);
            }
        }
        match place(name, path, context.spec, context.pool.modules) {
            Ok(placed) => {
                self.parent.get_or_insert_with(|| placed.parent.to_owned());
                let key = (placed.layer, placed.target);
                let place = self
                    .pairs
                    .entry(key)
                    .or_insert_with(|| Halves::new(weight.module, id));
                fill(place, (id, weight.ab), context, findings);
            }
            Err(reject) => {
                let optional = reject.reason == RejectReason::GdnTarget;
                let mut finding = Finding::from(reject);
                if optional && context.pool.policy.allow_partial_targets {
                    finding.level = FindingLevel::Warning;
                    self.ignored.push(id);
                }
                findings.0.push(finding);
            }
        }
    }

    /// One finding for what many tensors share.
    fn sum_up(&self, context: Context<'_>, findings: &mut Findings) {
        if let Some(&first) = self.renamed.first() {
            let message = format!(
                "wrapper segments (torch.compile, FSDP) taken off {} of {} names, this one first",
                self.renamed.len(),
                context.tensors.len()
            );
            findings.warn(AuditReason::Renamed, Some(context.name(first)), message);
        }
        if let Some(&first) = self.needless.first() {
            let message = format!(
                "{} tensors that inference does not need are ignored, this one first",
                self.needless.len()
            );
            findings.warn(
                AuditReason::IgnoredExtra,
                Some(context.name(first)),
                message,
            );
        }
        let mut adapters = self.adapters.iter();
        if let (Some((one, _)), Some((other, &id))) = (adapters.next(), adapters.next()) {
            let show = |name: &Option<String>| match name {
                None => "no name".to_owned(),
                Some(name) => format!("`{name}`"),
            };
            let message = format!(
                "one file holds tensors of an adapter with {} and of one with {}; it may hold one adapter's",
                show(one),
                show(other)
            );
            findings.error(AuditReason::TooManyAdapters, context.name(id), message);
        }
    }
}

fn fill(
    halves: &mut Halves,
    (id, ab): (TensorId, AdapterAb),
    context: Context<'_>,
    findings: &mut Findings,
) {
    let place = match ab {
        AdapterAb::A => &mut halves.a,
        AdapterAb::B => &mut halves.b,
    };
    match *place {
        None => *place = Some(id),
        Some(first) => {
            let message = format!("stands for the same matrix as {}", context.name(first));
            findings.error(AuditReason::DuplicateTensor, context.name(id), message);
        }
    }
}

fn role(kind: crate::OverlayTensorKind) -> &'static str {
    use crate::OverlayTensorKind as K;
    match kind {
        K::Base => "the base table",
        K::Delta => "the trained rows",
        K::FullTable => "the full table",
        K::EmbeddingA => "lora_embedding_A",
        K::EmbeddingB => "lora_embedding_B",
    }
}

/// Buffers that `velora_config` and `monteclora_config` leave in the file.
fn is_declared_buffer(context: Context<'_>, path: &str) -> bool {
    let Some(config) = context.config else {
        return false;
    };
    let DeclaredBuffers { velora, monteclora } = config.declares_buffers();
    (velora && path.ends_with(".lora_velora_embed"))
        || (monteclora && path.contains(".lora_monteclora_sampler."))
}

/// Parts of an adapter that have a meaning and are not applied.
fn unimplemented_part(path: &str) -> Option<(AuditReason, &'static str)> {
    let magnitude = |segment: &str| segment == "lora_magnitude_vector";
    if path.split('.').any(magnitude) {
        let message = "a DoRA magnitude, which is not applied; merge the adapter or train it without use_dora";
        Some((AuditReason::DoraUnimplemented, message))
    } else if path.ends_with(".bias") {
        let message =
            "a trained bias, which is not applied; train with bias=\"none\" and lora_bias=false";
        Some((AuditReason::BiasUnimplemented, message))
    } else {
        None
    }
}
