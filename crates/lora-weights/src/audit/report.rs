use super::{AuditedPair, Finding};
use crate::OverlayTensors;
use lora_config::{ConfigError, FindingLevel};
use serde::ser::SerializeSeq;
use serde::{Serialize, Serializer};

/// Bytes an adapter takes on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct AdapterBytes {
    /// Its slot of the pool. Every slot takes the same, whatever is in it.
    pub slot: u64,
    /// Its router and expert pairs.
    pub expert: u64,
    /// Its rows and tables of the vocabulary as BF16, before rows that equal the served ones are left out.
    pub overlay: u64,
}

/// What an overlay does to one vocabulary table of the model, before it is compared with the served one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct OverlayTableRows {
    /// Rows of the vocabulary that it replaces at most: those of the adapter's own table and the trained ones. Rows of a table of its own that equal
    /// the served ones turn out not to be replaced.
    pub replaced: u64,
    /// Rows of ids that the model does not have, offered to an engine that extends its vocabulary.
    pub extension: u64,
}

/// What the overlay of an adapter does, as far as its file tells. A tied head follows the embedding and is not counted again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct OverlayRows {
    /// The input embedding.
    #[serde(rename = "embed_tokens")]
    pub embed: OverlayTableRows,
    /// The LM head.
    pub lm_head: OverlayTableRows,
}

/// Everything an audit saw.
///
/// An adapter loads if [`ok`](Self::ok). Then `applied` and the number of `ignored` make `tensors`.
///
/// Serialized it is `{"ok", "adapter", "applied", "ignored": [name], "tensors", "findings": [Finding], "modules": [{"layer", "module",
/// "expert", "rank", "scale"}], "bytes": {"slot", "expert", "overlay"}, "overlay": {"embed_tokens": {"replaced", "extension"}, "lm_head":
/// {"replaced", "extension"}}}`. `expert` is null where there is none; `module` is PEFT's path inside the layer with the expert's number left out.
#[derive(Debug, Clone, Default)]
pub struct AuditReport {
    /// What was audited: the folder, or empty for tensors in memory.
    pub adapter: String,
    /// Findings, errors first, each in the order found.
    pub findings: Vec<Finding>,
    /// Whether every value was looked at. Where only a header was there, `values-unread` is among the findings, and what loads
    /// is audited again with its values.
    pub values_read: bool,
    /// Tensors in the file.
    pub tensors: usize,
    /// Tensors applied.
    pub applied: usize,
    /// Names of the tensors that are not applied and need not be, in the file's order.
    pub ignored: Vec<String>,
    /// Pairs to pack, in (layer, target) order. Not all of them where there are errors.
    pub pairs: Vec<AuditedPair>,
    /// Rows and tables of the vocabulary.
    pub overlays: OverlayTensors,
    /// Rows that they replace at most, and rows past the vocabulary.
    pub overlay_rows: OverlayRows,
    /// Bytes on the device.
    pub bytes: AdapterBytes,
}

impl AuditReport {
    /// True if no finding is an error: the adapter loads.
    pub fn ok(&self) -> bool {
        self.errors().next().is_none()
    }

    /// Findings that keep the adapter from loading.
    pub fn errors(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.is_error())
    }

    /// Findings that a person should know and that keep nothing from loading.
    pub fn warnings(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| !finding.is_error())
    }

    /// The largest rank of a dense pair, 0 without one: the smallest `max_rank` that takes this adapter.
    pub fn max_rank(&self) -> u32 {
        let dense = self.pairs.iter().filter(|pair| pair.target.is_dense());
        dense.map(|pair| pair.rank).max().unwrap_or(0)
    }

    /// The report of an adapter whose model is not known: one error, with the reason `model-config`.
    pub fn unknown_model(adapter: impl Into<String>, error: &ConfigError) -> Self {
        Self {
            adapter: adapter.into(),
            findings: vec![Finding {
                level: FindingLevel::Error,
                reason: "model-config".to_owned(),
                tensor: None,
                message: error.to_string(),
            }],
            ..Self::default()
        }
    }

    /// The report of an adapter that could not be read: the one finding that says why.
    pub fn unreadable(adapter: impl Into<String>, why: impl Into<Finding>) -> Self {
        Self {
            adapter: adapter.into(),
            findings: vec![why.into()],
            ..Self::default()
        }
    }

    /// Puts errors first, keeping their order.
    pub(super) fn sort_findings(&mut self) {
        self.findings.sort_by_key(|finding| finding.level);
    }
}

impl Serialize for AuditReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Shape<'a> {
            ok: bool,
            adapter: &'a str,
            applied: usize,
            ignored: &'a [String],
            tensors: usize,
            findings: &'a [Finding],
            #[serde(serialize_with = "modules")]
            modules: &'a [AuditedPair],
            bytes: AdapterBytes,
            overlay: OverlayRows,
        }
        Shape {
            ok: self.ok(),
            adapter: &self.adapter,
            applied: self.applied,
            ignored: &self.ignored,
            tensors: self.tensors,
            findings: &self.findings,
            modules: &self.pairs,
            bytes: self.bytes,
            overlay: self.overlay_rows,
        }
        .serialize(serializer)
    }
}

/// `{"level", "reason", "tensor", "message"}`: `level` is `error` or `warning`, `tensor` null where there is none.
impl Serialize for Finding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Shape<'a> {
            level: &'static str,
            reason: &'a str,
            tensor: Option<&'a str>,
            message: &'a str,
        }
        Shape {
            level: match self.level {
                FindingLevel::Error => "error",
                FindingLevel::Warning => "warning",
            },
            reason: &self.reason,
            tensor: self.tensor.as_deref(),
            message: &self.message,
        }
        .serialize(serializer)
    }
}

fn modules<S: Serializer>(pairs: &[AuditedPair], serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Shape {
        layer: usize,
        module: &'static str,
        expert: Option<usize>,
        rank: u32,
        scale: f32,
    }
    let mut seq = serializer.serialize_seq(Some(pairs.len()))?;
    for pair in pairs {
        seq.serialize_element(&Shape {
            layer: pair.layer,
            module: pair.target.module_name(),
            expert: pair.target.expert(),
            rank: pair.rank,
            scale: pair.scale,
        })?;
    }
    seq.end()
}
