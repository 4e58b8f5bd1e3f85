use std::fmt;

/// Stable reasons of an audit's own findings. A finding can also carry the reason of a name
/// ([`RejectReason`](crate::RejectReason)), of a file ([`StoreError::reason`](crate::StoreError::reason)) or of a config field
/// (`config-<field>`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum AuditReason {
    /// Error: two tensors for one matrix, after prefixes and wrappers are taken off.
    DuplicateTensor,
    /// Error: A without B, or B without A.
    UnpairedTensor,
    /// Error: a shape that is not the one model and rank ask for.
    ShapeMismatch,
    /// Error: A, B and the config do not agree on the rank.
    RankMismatch,
    /// Error: a rank over the pool's.
    RankExceedsPool,
    /// Error: a matrix with no rows or no columns.
    ZeroRank,
    /// Error: a dtype other than BF16, F16 and F32.
    UnsupportedDtype,
    /// Error: a NaN, an infinity, or a value that BF16 cannot hold.
    NonFiniteWeights,
    /// Error: a file with no tensor.
    EmptyAdapter,
    /// Error where the model has the module that the config targets and the file holds nothing for it; warning where the model has
    /// none of that name, or where the policy takes parts.
    UnmatchedTarget,
    /// Error: router or expert tensors, and the pool has no room for experts.
    ExpertLoraDisabled,
    /// Error: a router's or expert's rank over the expert region's.
    ExpertRankExceedsCap,
    /// Error: nothing in the file is applied.
    NothingApplied,
    /// Error: trained rows and token ids differ in number.
    TokenCountMismatch,
    /// Error: trained rows, and the config names no ids for them.
    TokenIdsMissing,
    /// Error: token ids, and the file holds no rows for them.
    TokenRowsMissing,
    /// Error: a token id past the vocabulary and past the adapter's own table.
    TokenBeyondVocab,
    /// Error: `modules_to_save` names a table that is not in the file.
    SavedModuleMissing,
    /// Error: two tensors for one vocabulary table and role.
    DuplicateOverlayTensor,
    /// Error: rows or tables of the vocabulary, and nothing that applies them.
    OverlayUnapplied,
    /// Error: `ensure_weight_tying`, and the head's pair is not the transpose of the embedding's.
    TiedLoraMismatch,
    /// Error: DoRA's magnitude vectors.
    DoraUnimplemented,
    /// Error: trained biases.
    BiasUnimplemented,
    /// Error: a low-rank pair on the LM head.
    LmHeadLoraUnimplemented,
    /// Error: neither shapes, version nor config tell how stacked experts lie.
    StackedLayoutAmbiguous,
    /// Error: stacked experts whose rows are not experts times rank.
    StackedRankMismatch,
    /// Error: tensors of several adapters in one file, or several adapters where one is asked for.
    TooManyAdapters,
    /// Error, of a landing plan alone: values that copies of rows do not bring into their place.
    LandingGeometry,
    /// Error: a pool that cannot be laid out.
    BadPool,
    /// Warning: a `rank_pattern` or `alpha_pattern` key that matches nothing in the file.
    UnmatchedPattern,
    /// Warning: several `alpha_pattern` keys match one module; the first in the file decides.
    PatternOverlap,
    /// Warning: tensors for modules that the config does not target; they are applied.
    UndeclaredTarget,
    /// Warning: only the header was there, so that no value was looked at.
    ValuesUnread,
    /// Warning: every B is zero.
    NoEffect,
    /// Warning: some experts of a projection are adapted and others are not.
    ExpertsMissing,
    /// Warning: wrapper segments were taken off names.
    Renamed,
    /// Warning: tensors that inference does not need.
    IgnoredExtra,
}

impl AuditReason {
    /// Every reason.
    pub const ALL: [Self; 37] = [
        Self::DuplicateTensor,
        Self::UnpairedTensor,
        Self::ShapeMismatch,
        Self::RankMismatch,
        Self::RankExceedsPool,
        Self::ZeroRank,
        Self::UnsupportedDtype,
        Self::NonFiniteWeights,
        Self::EmptyAdapter,
        Self::UnmatchedTarget,
        Self::ExpertLoraDisabled,
        Self::ExpertRankExceedsCap,
        Self::NothingApplied,
        Self::TokenCountMismatch,
        Self::TokenIdsMissing,
        Self::TokenRowsMissing,
        Self::TokenBeyondVocab,
        Self::SavedModuleMissing,
        Self::DuplicateOverlayTensor,
        Self::OverlayUnapplied,
        Self::TiedLoraMismatch,
        Self::DoraUnimplemented,
        Self::BiasUnimplemented,
        Self::LmHeadLoraUnimplemented,
        Self::StackedLayoutAmbiguous,
        Self::StackedRankMismatch,
        Self::TooManyAdapters,
        Self::LandingGeometry,
        Self::BadPool,
        Self::UnmatchedPattern,
        Self::PatternOverlap,
        Self::UndeclaredTarget,
        Self::ValuesUnread,
        Self::NoEffect,
        Self::ExpertsMissing,
        Self::Renamed,
        Self::IgnoredExtra,
    ];

    /// The stable word: `shape-mismatch`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::DuplicateTensor => "duplicate-tensor",
            Self::UnpairedTensor => "unpaired-tensor",
            Self::ShapeMismatch => "shape-mismatch",
            Self::RankMismatch => "rank-mismatch",
            Self::RankExceedsPool => "rank-exceeds-pool",
            Self::ZeroRank => "zero-rank",
            Self::UnsupportedDtype => "unsupported-dtype",
            Self::NonFiniteWeights => "non-finite-weights",
            Self::EmptyAdapter => "empty-adapter",
            Self::UnmatchedTarget => "unmatched-target",
            Self::ExpertLoraDisabled => "expert-lora-disabled",
            Self::ExpertRankExceedsCap => "expert-rank-exceeds-cap",
            Self::NothingApplied => "nothing-applied",
            Self::TokenCountMismatch => "token-count-mismatch",
            Self::TokenIdsMissing => "token-ids-missing",
            Self::TokenRowsMissing => "token-rows-missing",
            Self::TokenBeyondVocab => "token-beyond-vocab",
            Self::SavedModuleMissing => "saved-module-missing",
            Self::DuplicateOverlayTensor => "duplicate-overlay-tensor",
            Self::OverlayUnapplied => "overlay-unapplied",
            Self::TiedLoraMismatch => "tied-lora-mismatch",
            Self::DoraUnimplemented => "dora-unimplemented",
            Self::BiasUnimplemented => "bias-unimplemented",
            Self::LmHeadLoraUnimplemented => "lm-head-lora-unimplemented",
            Self::StackedLayoutAmbiguous => "stacked-layout-ambiguous",
            Self::StackedRankMismatch => "stacked-rank-mismatch",
            Self::TooManyAdapters => "too-many-adapters",
            Self::LandingGeometry => "landing-geometry",
            Self::BadPool => "bad-pool",
            Self::UnmatchedPattern => "unmatched-pattern",
            Self::PatternOverlap => "pattern-overlap",
            Self::UndeclaredTarget => "undeclared-target",
            Self::ValuesUnread => "values-unread",
            Self::NoEffect => "no-effect",
            Self::ExpertsMissing => "experts-missing",
            Self::Renamed => "renamed",
            Self::IgnoredExtra => "ignored-extra",
        }
    }
}

impl fmt::Display for AuditReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
