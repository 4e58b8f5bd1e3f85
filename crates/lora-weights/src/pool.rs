use crate::LoraModule;

/// Ranks are padded to a multiple of this: one MMA's rows.
pub const RANK_GRANULE: u32 = 16;

/// `rank` rounded up to [`RANK_GRANULE`].
pub fn padded_rank(rank: u32) -> u32 {
    rank.next_multiple_of(RANK_GRANULE)
}

/// A set of modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModuleSet(u32);

impl ModuleSet {
    /// No module.
    pub const EMPTY: Self = Self(0);
    /// With `module` in it.
    pub fn with(self, module: LoraModule) -> Self {
        Self(self.0 | 1 << module as u32)
    }
    /// Without `module`.
    pub fn without(self, module: LoraModule) -> Self {
        Self(self.0 & !(1 << module as u32))
    }
    /// Whether `module` is in it.
    pub fn contains(self, module: LoraModule) -> bool {
        self.0 >> (module as u32) & 1 == 1
    }
    /// In layout order: [`LoraModule::ALL`], then [`LoraModule::EXTENDED`].
    pub fn iter(self) -> impl Iterator<Item = LoraModule> {
        LoraModule::ALL
            .into_iter()
            .chain(LoraModule::EXTENDED)
            .filter(move |m| self.contains(*m))
    }
}

impl Default for ModuleSet {
    /// [`LoraModule::ALL`].
    fn default() -> Self {
        LoraModule::ALL.into_iter().fold(Self::EMPTY, Self::with)
    }
}

/// What a caller declares of stacked-expert tensors where the file does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum StackedLayout {
    AIn,
    AOut,
}

/// Room for expert and router pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertPoolSpec {
    /// Largest expert or router rank, before rounding to the granule.
    pub max_rank: u32,
    /// Units (one padded pair each) to reserve for all slots together.
    pub units: u64,
}

/// What a caller asserts or permits beside the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoadPolicy {
    /// Load an adapter whose other targets cannot be applied, skipping and naming them.
    pub allow_partial_targets: bool,
    /// Accept tensor names without `base_model.model.`.
    pub accept_bare_names: bool,
    /// Layout of stacked experts where version and family do not say.
    pub stacked_layout: Option<StackedLayout>,
    /// Column order of stacked B where the file does not say.
    pub stacked_order: Option<lora_config::LoraBLayout>,
}

/// What the pool holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSpec {
    /// Slots.
    pub max_loras: u32,
    /// Largest rank as asked for, before rounding to the granule.
    pub max_rank: u32,
    /// Modules that have room in every slot.
    pub modules: ModuleSet,
    /// Room for experts; `None` = the EXPERTS lever is off.
    pub experts: Option<ExpertPoolSpec>,
    /// What the caller asserts or permits.
    pub policy: LoadPolicy,
}
