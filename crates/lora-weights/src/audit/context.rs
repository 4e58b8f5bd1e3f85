use super::{AuditReason, Finding};
use crate::{AdapterStore, PoolSpec, RejectReason, TensorId, TensorMeta};
use lora_config::{AdapterConfig, FindingLevel, ModelSpec};

/// What is audited, and against what.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    /// Every tensor; a [`TensorId`] is a position here.
    pub(super) tensors: &'a [TensorMeta],
    /// Holds their values; `None` where only the header is there.
    pub(super) values: Option<&'a AdapterStore>,
    /// `None` where the config was refused: what the tensors alone tell is still said.
    pub(super) config: Option<&'a AdapterConfig>,
    pub(super) spec: &'a ModelSpec,
    pub(super) pool: &'a PoolSpec,
}

impl<'a> Context<'a> {
    pub(super) fn tensor(&self, id: TensorId) -> &'a TensorMeta {
        &self.tensors[id.0]
    }

    pub(super) fn name(&self, id: TensorId) -> &'a str {
        &self.tensor(id).name
    }

    pub(super) fn shape(&self, id: TensorId) -> &'a [usize] {
        &self.tensor(id).shape
    }
}

/// Findings in the order they are made.
#[derive(Debug, Default)]
pub(super) struct Findings(pub(super) Vec<Finding>);

impl Findings {
    /// An error about a tensor.
    pub(super) fn error(&mut self, reason: AuditReason, tensor: &str, message: impl Into<String>) {
        self.push(FindingLevel::Error, reason, Some(tensor), message.into());
    }

    /// A name that the config leaves without a meaning.
    pub(super) fn reject(
        &mut self,
        reason: RejectReason,
        tensor: &str,
        message: impl Into<String>,
    ) {
        self.0.push(Finding {
            level: FindingLevel::Error,
            reason: reason.as_str().to_owned(),
            tensor: Some(tensor.to_owned()),
            message: message.into(),
        });
    }

    /// An error about the adapter as a whole.
    pub(super) fn error_all(&mut self, reason: AuditReason, message: impl Into<String>) {
        self.push(FindingLevel::Error, reason, None, message.into());
    }

    /// A warning, about a tensor where there is one.
    pub(super) fn warn(
        &mut self,
        reason: AuditReason,
        tensor: Option<&str>,
        message: impl Into<String>,
    ) {
        self.push(FindingLevel::Warning, reason, tensor, message.into());
    }

    pub(super) fn push(
        &mut self,
        level: FindingLevel,
        reason: AuditReason,
        tensor: Option<&str>,
        message: String,
    ) {
        self.0.push(Finding {
            level,
            reason: reason.as_str().to_owned(),
            tensor: tensor.map(str::to_owned),
            message,
        });
    }
}
