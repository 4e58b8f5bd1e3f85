use crate::LoraBackend;
use std::fmt;
use std::sync::Arc;

/// Levers that touch launches, as plain values. [`Default`] applies everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LaunchOptions {
    /// Largest number of rows that goes through small tiles of 8; above it, tiles of 64. Bits are the same either way. For a pair it
    /// is compared with the batch's rows, for routed launches with the rows of each group (when the groups are made).
    pub gemv_max_m: u32,
    /// Launch no delta at all: adapters stay resident, so the difference in time is the cost of applying them.
    pub no_apply: bool,
    /// Launch no delta of the dense FFN and of the GDN output projection; attention still applies.
    pub no_ffn: bool,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        Self {
            gemv_max_m: 48,
            no_apply: false,
            no_ffn: false,
        }
    }
}

/// Where in a layer a delta goes: what [`LaunchOptions`] switches by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SiteKind {
    /// q, k, v and o projections.
    Attention,
    /// gate, up and down of a dense FFN, and of a shared expert.
    DenseFfn,
    /// Output projection of linear attention (GDN).
    GdnOut,
    /// Input projections of linear attention.
    GdnIn,
    /// Router logits of a MoE layer.
    Router,
    /// Expert projections of a MoE layer.
    Expert,
}

/// Which lever left a delta out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Skip {
    /// [`LaunchOptions::no_apply`].
    NoApply,
    /// [`LaunchOptions::no_ffn`].
    NoFfn,
}

impl LaunchOptions {
    /// The lever that leaves deltas of `kind` out, if one does.
    pub fn skips(&self, kind: SiteKind) -> Option<Skip> {
        if self.no_apply {
            return Some(Skip::NoApply);
        }
        match kind {
            SiteKind::DenseFfn | SiteKind::GdnOut if self.no_ffn => Some(Skip::NoFfn),
            _ => None,
        }
    }
}

/// A backend and how to launch on it. Cheap to clone; one for an engine.
///
/// Backends resolve every kernel when they are made, so a missing one is an error there and never at a launch.
#[derive(Clone)]
pub struct LoraKernels {
    backend: Arc<dyn LoraBackend>,
    options: LaunchOptions,
}

impl LoraKernels {
    /// Launches on `backend` under `options`. Levers that leave deltas out give a warning here, once, since they change what a model says.
    pub fn new(backend: Arc<dyn LoraBackend>, options: LaunchOptions) -> Self {
        if options.no_apply {
            tracing::warn!(
                "no_apply is set: no LoRA delta is launched, every output is the base model's"
            );
        } else if options.no_ffn {
            tracing::warn!("no_ffn is set: dense FFN and GDN output deltas are left out");
        }
        Self { backend, options }
    }

    /// The backend.
    pub fn backend(&self) -> &Arc<dyn LoraBackend> {
        &self.backend
    }

    /// The options.
    pub fn options(&self) -> &LaunchOptions {
        &self.options
    }

    /// Makes everything ready that a first launch would otherwise load; see [`LoraBackend::warm_up`].
    ///
    /// # Errors
    /// What loading gives.
    pub fn warm_up(&self) -> Result<(), crate::KernelError> {
        self.backend.warm_up()
    }
}

impl fmt::Debug for LoraKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoraKernels")
            .field("caps", self.backend.caps())
            .field("options", &self.options)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [SiteKind; 6] = [
        SiteKind::Attention,
        SiteKind::DenseFfn,
        SiteKind::GdnOut,
        SiteKind::GdnIn,
        SiteKind::Router,
        SiteKind::Expert,
    ];

    #[test]
    fn no_ffn_leaves_out_dense_ffn_and_gdn_output_alone() {
        let options = LaunchOptions {
            no_ffn: true,
            ..Default::default()
        };
        let skipped = KINDS.map(|kind| options.skips(kind));
        let ffn = Some(Skip::NoFfn);
        assert_eq!(skipped, [None, ffn, ffn, None, None, None]);
    }

    #[test]
    fn no_apply_leaves_out_everything_and_the_default_nothing() {
        let options = LaunchOptions {
            no_apply: true,
            ..Default::default()
        };
        assert!(
            KINDS
                .iter()
                .all(|&kind| options.skips(kind) == Some(Skip::NoApply))
        );
        assert!(
            KINDS
                .iter()
                .all(|&kind| LaunchOptions::default().skips(kind).is_none())
        );
    }
}
