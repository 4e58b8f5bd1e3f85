//! What a pool is asked to hold: slots, rank, modules, room for experts.

use crate::LoraModule;
use lora_config::LoraBLayout;

/// Ranks are padded to a multiple of this: the rows of one `m16n8k16` MMA.
pub const RANK_GRANULE: u32 = 16;

/// `rank` rounded up to [`RANK_GRANULE`], the only place that rounds. Saturates at the largest multiple in a `u32`.
///
/// ```
/// assert_eq!(lora_weights::padded_rank(8), 16);
/// assert_eq!(lora_weights::padded_rank(64), 64);
/// ```
pub fn padded_rank(rank: u32) -> u32 {
    rank.checked_next_multiple_of(RANK_GRANULE)
        .unwrap_or(u32::MAX / RANK_GRANULE * RANK_GRANULE)
}

/// A set of dense modules: those that have room in every slot of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModuleSet(u32);

impl ModuleSet {
    /// No module.
    pub const EMPTY: Self = Self(0);

    /// [`LoraModule::ALL`] and [`LoraModule::EXTENDED`].
    pub fn everything() -> Self {
        LoraModule::every().collect()
    }

    /// With `module` in it.
    #[must_use]
    pub fn with(self, module: LoraModule) -> Self {
        Self(self.0 | 1 << module as u32)
    }

    /// Without `module`.
    #[must_use]
    pub fn without(self, module: LoraModule) -> Self {
        Self(self.0 & !(1 << module as u32))
    }

    /// Whether `module` is in it.
    pub fn contains(self, module: LoraModule) -> bool {
        self.0 >> (module as u32) & 1 == 1
    }

    /// In layout order: [`LoraModule::ALL`], then [`LoraModule::EXTENDED`].
    pub fn iter(self) -> impl Iterator<Item = LoraModule> {
        LoraModule::every().filter(move |module| self.contains(*module))
    }
}

impl Default for ModuleSet {
    /// [`LoraModule::ALL`].
    fn default() -> Self {
        LoraModule::ALL.into_iter().fold(Self::EMPTY, Self::with)
    }
}

impl FromIterator<LoraModule> for ModuleSet {
    fn from_iter<I: IntoIterator<Item = LoraModule>>(modules: I) -> Self {
        modules.into_iter().fold(Self::EMPTY, Self::with)
    }
}

/// Which axis of a stacked expert parameter `[E, d1, d2]` an adapter's A spans, as a caller declares it where neither
/// the file's PEFT version nor the model family settles it (PEFT changed it twice, see `docs/adapters.md`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StackedLayout {
    /// A is `[E * r, in]` and B is `[out, E * r]`: what a plain pair of the expert's projection would be.
    AIn,
    /// A is `[E * r, out]` and B is `[in, E * r]`: the delta is the transpose of B A.
    AOut,
}

/// Room for expert and router pairs, one region for all slots together, handed out in units of one padded pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertPoolSpec {
    /// Largest expert or router rank, before rounding to the granule (lever `EXPERT_RANK`).
    pub max_rank: u32,
    /// Units to reserve for all slots together. A unit holds one pair: one projection of one expert, or one router.
    pub units: u64,
}

/// What a caller asserts or permits beside the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoadPolicy {
    /// Load an adapter whose other targets cannot be applied, skipping and naming them (lever `ALLOW_PARTIAL`).
    pub allow_partial_targets: bool,
    /// Accept tensor names without `base_model.model.`.
    pub accept_bare_names: bool,
    /// Layout of stacked experts where version and family do not say.
    pub stacked_layout: Option<StackedLayout>,
    /// Column order of stacked B where the file does not say.
    pub stacked_order: Option<LoraBLayout>,
    /// Permit, at run time, a change of the active slot and new contents for a slot that was filled at startup (levers
    /// `ROTATE` and `PEER`). Promotion into the cache needs no permission.
    pub allow_rotation: bool,
    /// Take rows and tables of the vocabulary (token overlays); else they are refused by name.
    pub overlays: bool,
}

/// What the pool holds. Every slot has the same layout, so that one table pitch and one stride serve all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSpec {
    /// Slots, 1 to `i32::MAX`: slot numbers travel to the device as `i32`.
    pub max_loras: u32,
    /// Largest rank as asked for, before rounding to the granule.
    pub max_rank: u32,
    /// Modules that have room in every slot.
    pub modules: ModuleSet,
    /// Room for experts; `None` = the `EXPERTS` lever is off.
    pub experts: Option<ExpertPoolSpec>,
    /// What the caller asserts or permits.
    pub policy: LoadPolicy,
}

impl PoolSpec {
    /// `max_loras` slots of `max_rank` for [`LoraModule::ALL`], no experts, nothing permitted.
    pub fn new(max_loras: u32, max_rank: u32) -> Self {
        Self {
            max_loras,
            max_rank,
            modules: ModuleSet::default(),
            experts: None,
            policy: LoadPolicy::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_is_padded_to_the_granule_and_never_wraps() {
        assert_eq!(padded_rank(0), 0);
        assert_eq!(padded_rank(1), 16);
        assert_eq!(padded_rank(16), 16);
        assert_eq!(padded_rank(17), 32);
        assert_eq!(padded_rank(u32::MAX), u32::MAX - 15);
    }

    #[test]
    fn module_set_lists_in_layout_order_whatever_the_order_of_insertion() {
        let set: ModuleSet = [
            LoraModule::QkvProj,
            LoraModule::OProj,
            LoraModule::SharedGateProj,
            LoraModule::QProj,
        ]
        .into_iter()
        .collect();
        let listed: Vec<_> = set.iter().collect();
        assert_eq!(
            listed,
            [
                LoraModule::QProj,
                LoraModule::OProj,
                LoraModule::SharedGateProj,
                LoraModule::QkvProj
            ]
        );
        assert!(!set.without(LoraModule::OProj).contains(LoraModule::OProj));
        assert_eq!(ModuleSet::everything().iter().count(), 20);
    }
}
