//! The kernels by name, their PTX, and the handles that launches use.

use super::{CudaError, driver};
use cudarc::driver::sys;
use std::fmt;

/// More shared memory than a multiprocessor has.
const ALL_SHARED: u32 = 1 << 20;

/// Every kernel of this crate. The only place where their symbols are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Stable sort of rows by table entry, and the tile list.
    GroupRows,
    /// The same for the rows of a MoE block, whose entries it finds first.
    GroupExperts,
    /// [`Kernel::GroupRows`] for more rows than a block has threads, in a cluster.
    GroupManyRows,
    /// [`Kernel::GroupExperts`] for more rows than a block has threads, in a cluster.
    GroupManyExperts,
    /// Partial sums of `x @ A^T`, tiles of up to 8 rows, 16 ranks a block.
    ShrinkSmall,
    /// The same, several times 16 ranks a block.
    ShrinkSmallRanks,
    /// The same, tiles of up to 128 rows that pass by 16 ranks of A in registers.
    ShrinkStreamed16,
    /// The same by 32 ranks, of one site or two.
    ShrinkStreamed32,
    /// The same, tiles of up to 128 rows, up to 96 ranks a block.
    ShrinkMixed,
    /// The same with less shared memory.
    ShrinkMixedLow,
    /// The same for rows that are not 16-byte aligned.
    ShrinkUnaligned,
    /// The same, up to 64 ranks a block that warpgroups multiply; on an H200 alone.
    ShrinkWarpgroup64,
    /// The same, up to 128 ranks.
    ShrinkWarpgroup128,
    /// The same, up to 192 ranks.
    ShrinkWarpgroup192,
    /// The k blocks of tiles of more than 8 rows, added up.
    SumBlocks,
    /// Shrink, expand and fold of spread rows in one launch, tiles of up to 8 rows, padded rank 16, up to 1024 k.
    DeltaSpread1024,
    /// The same, up to 2048 k.
    DeltaSpread2048,
    /// A whole delta of spread rows, tiles of up to 128 rows, padded rank 16, k up to 1024.
    DeltaRows16,
    /// The same, padded rank up to 32.
    DeltaRows32,
    /// The same, padded rank up to 32, k up to 2048.
    DeltaRows32Of2048,
    /// A whole delta of spread rows at one site, tiles of up to 128 rows, a cluster of two blocks a tile, padded rank 16, k up to 1024.
    DeltaHalves16,
    /// The same, padded rank up to 32.
    DeltaHalves32,
    /// The same, padded rank 16, k from 1025 to 2048.
    DeltaCross16,
    /// The same at two sites.
    DeltaCross16Pair,
    /// The same at one site, a cluster of four blocks a tile, k from 2049 to 4096.
    DeltaCross16Of4096,
    /// The same at two sites.
    DeltaCross16PairOf4096,
    /// Expand and fold, tiles of up to 8 rows, padded rank 16.
    ExpandSmall16,
    /// The same, padded rank up to 32.
    ExpandSmall32,
    /// The same, padded rank up to 64.
    ExpandSmall64,
    /// Expand and fold of spread rows, tiles of up to 8 rows, padded rank 16.
    ExpandSpreadSmall16,
    /// The same, padded rank up to 32.
    ExpandSpreadSmall32,
    /// Expand and fold, tiles of up to 128 rows, padded rank 16.
    ExpandMixed16,
    /// The same, padded rank up to 64.
    ExpandMixed64,
    /// Expand and fold of spread rows, tiles of up to 128 rows, padded rank 16, sums of k blocks still to be added.
    ExpandSpread16,
    /// The same, padded rank up to 32.
    ExpandSpread32,
    /// Expand and fold, any padded rank, and out that is not in whole, aligned runs of 8.
    ExpandAny,
    /// Largest absolute difference of each row of two tables.
    RowDiff,
    /// Rows of two tables copied into one.
    GatherRows,
    /// Embedding rows replaced by overlays'.
    ReplaceRows,
    /// Logits of overridden ids, a cluster for up to 64 rows and 32 ids, a block to a multiprocessor.
    HeadFewDeep,
    /// The same, two blocks to a multiprocessor.
    HeadFew,
    /// The same, a cluster of two blocks for up to 64 rows and 64 ids.
    HeadPair,
    /// The same, a cluster for up to 64 rows and 128 ids.
    HeadSplit,
    /// The same with less shared memory.
    HeadSplitLow,
    /// The same for rows that are not 16-byte aligned.
    HeadUnaligned,
    /// The same, a block for more rows and 128 ids.
    HeadWide,
    /// The same, a cluster that keeps up to 64 rows while ids pass, which warpgroups multiply; on an H200 alone.
    HeadKept,
}

impl Kernel {
    /// Every kernel.
    pub const ALL: [Self; 47] = [
        Self::GroupRows,
        Self::GroupExperts,
        Self::GroupManyRows,
        Self::GroupManyExperts,
        Self::ShrinkSmall,
        Self::ShrinkSmallRanks,
        Self::ShrinkStreamed16,
        Self::ShrinkStreamed32,
        Self::ShrinkMixed,
        Self::ShrinkMixedLow,
        Self::ShrinkUnaligned,
        Self::ShrinkWarpgroup64,
        Self::ShrinkWarpgroup128,
        Self::ShrinkWarpgroup192,
        Self::SumBlocks,
        Self::DeltaSpread1024,
        Self::DeltaSpread2048,
        Self::DeltaRows16,
        Self::DeltaRows32,
        Self::DeltaRows32Of2048,
        Self::DeltaHalves16,
        Self::DeltaHalves32,
        Self::DeltaCross16,
        Self::DeltaCross16Pair,
        Self::DeltaCross16Of4096,
        Self::DeltaCross16PairOf4096,
        Self::ExpandSmall16,
        Self::ExpandSmall32,
        Self::ExpandSmall64,
        Self::ExpandSpreadSmall16,
        Self::ExpandSpreadSmall32,
        Self::ExpandMixed16,
        Self::ExpandMixed64,
        Self::ExpandSpread16,
        Self::ExpandSpread32,
        Self::ExpandAny,
        Self::RowDiff,
        Self::GatherRows,
        Self::ReplaceRows,
        Self::HeadFewDeep,
        Self::HeadFew,
        Self::HeadPair,
        Self::HeadSplit,
        Self::HeadSplitLow,
        Self::HeadUnaligned,
        Self::HeadWide,
        Self::HeadKept,
    ];

    /// Name in the PTX.
    pub fn symbol(self) -> &'static str {
        match self {
            Self::GroupRows => "lora_group_rows",
            Self::GroupExperts => "lora_group_experts",
            Self::GroupManyRows => "lora_group_many_rows",
            Self::GroupManyExperts => "lora_group_many_experts",
            Self::ShrinkSmall => "lora_shrink_small",
            Self::ShrinkSmallRanks => "lora_shrink_small_ranks",
            Self::ShrinkStreamed16 => "lora_shrink_streamed_16",
            Self::ShrinkStreamed32 => "lora_shrink_streamed_32",
            Self::ShrinkMixed => "lora_shrink_mixed",
            Self::ShrinkMixedLow => "lora_shrink_mixed_low",
            Self::ShrinkUnaligned => "lora_shrink_unaligned",
            Self::ShrinkWarpgroup64 => "lora_shrink_warpgroup_64",
            Self::ShrinkWarpgroup128 => "lora_shrink_warpgroup_128",
            Self::ShrinkWarpgroup192 => "lora_shrink_warpgroup_192",
            Self::SumBlocks => "lora_sum_blocks",
            Self::DeltaSpread1024 => "lora_delta_spread_1024",
            Self::DeltaSpread2048 => "lora_delta_spread_2048",
            Self::DeltaRows16 => "lora_delta_rows_16",
            Self::DeltaRows32 => "lora_delta_rows_32",
            Self::DeltaRows32Of2048 => "lora_delta_rows_32_2048",
            Self::DeltaHalves16 => "lora_delta_halves_16",
            Self::DeltaHalves32 => "lora_delta_halves_32",
            Self::DeltaCross16 => "lora_delta_cross_16",
            Self::DeltaCross16Pair => "lora_delta_cross_16_pair",
            Self::DeltaCross16Of4096 => "lora_delta_cross_16_4096",
            Self::DeltaCross16PairOf4096 => "lora_delta_cross_16_4096_pair",
            Self::ExpandSmall16 => "lora_expand_small_16",
            Self::ExpandSmall32 => "lora_expand_small_32",
            Self::ExpandSmall64 => "lora_expand_small_64",
            Self::ExpandSpreadSmall16 => "lora_expand_spread_small_16",
            Self::ExpandSpreadSmall32 => "lora_expand_spread_small_32",
            Self::ExpandMixed16 => "lora_expand_mixed_16",
            Self::ExpandMixed64 => "lora_expand_mixed_64",
            Self::ExpandSpread16 => "lora_expand_spread_16",
            Self::ExpandSpread32 => "lora_expand_spread_32",
            Self::ExpandAny => "lora_expand_any",
            Self::RowDiff => "lora_row_diff",
            Self::GatherRows => "lora_gather_rows",
            Self::ReplaceRows => "lora_replace_rows",
            Self::HeadFewDeep => "lora_head_few_deep",
            Self::HeadFew => "lora_head_few",
            Self::HeadPair => "lora_head_pair",
            Self::HeadSplit => "lora_head_split",
            Self::HeadSplitLow => "lora_head_split_low",
            Self::HeadUnaligned => "lora_head_unaligned",
            Self::HeadWide => "lora_head_wide",
            Self::HeadKept => "lora_head_kept",
        }
    }

    /// Shared memory that a multiprocessor should set aside while it runs this kernel, bytes; `None` leaves that to the driver.
    ///
    /// A multiprocessor runs dry before it sets aside more or less. So kernels that follow one another have the same, or the next one's blocks could not
    /// start early, and clusters that found no multiprocessors for all their blocks would run after the others; and no more than they need, since loads in
    /// flight live in what is left.
    fn shared_carveout(self) -> Option<u32> {
        match self {
            Self::GroupRows
            | Self::GroupExperts
            | Self::ShrinkSmall
            | Self::ShrinkSmallRanks
            | Self::ExpandSmall16
            | Self::ExpandSmall32
            | Self::ExpandSmall64
            | Self::ExpandSpreadSmall16
            | Self::ExpandSpreadSmall32 => Some(32 << 10),
            Self::DeltaSpread1024 | Self::DeltaSpread2048 => Some(100 << 10),
            Self::ReplaceRows
            | Self::HeadFewDeep
            | Self::HeadFew
            | Self::HeadPair
            | Self::HeadSplit
            | Self::HeadSplitLow
            | Self::HeadUnaligned
            | Self::HeadWide
            | Self::HeadKept => Some(ALL_SHARED),
            Self::DeltaRows16 | Self::DeltaRows32 => Some(132 << 10),
            Self::SumBlocks
            | Self::ExpandMixed64
            | Self::DeltaRows32Of2048
            | Self::DeltaHalves16
            | Self::DeltaHalves32
            | Self::DeltaCross16
            | Self::DeltaCross16Pair
            | Self::DeltaCross16Of4096
            | Self::DeltaCross16PairOf4096 => Some(164 << 10),
            _ => None,
        }
    }

    /// Whether the sums of k blocks of large tiles are left to the expand kernel.
    pub(super) fn leaves_sums_open(self) -> bool {
        matches!(self, Self::ShrinkStreamed16 | Self::ShrinkStreamed32)
    }

    fn module(self) -> ModuleName {
        match self {
            Self::GroupRows | Self::GroupExperts | Self::GroupManyRows | Self::GroupManyExperts => {
                ModuleName::GroupRows
            }
            Self::ShrinkSmall
            | Self::ShrinkSmallRanks
            | Self::ShrinkStreamed16
            | Self::ShrinkStreamed32
            | Self::ShrinkMixed
            | Self::ShrinkMixedLow
            | Self::ShrinkUnaligned
            | Self::SumBlocks => ModuleName::Shrink,
            Self::ShrinkWarpgroup64 | Self::ShrinkWarpgroup128 | Self::ShrinkWarpgroup192 => {
                ModuleName::ShrinkWarpgroup
            }
            Self::DeltaSpread1024
            | Self::DeltaSpread2048
            | Self::DeltaRows16
            | Self::DeltaRows32
            | Self::DeltaRows32Of2048
            | Self::DeltaHalves16
            | Self::DeltaHalves32
            | Self::DeltaCross16
            | Self::DeltaCross16Pair
            | Self::DeltaCross16Of4096
            | Self::DeltaCross16PairOf4096 => ModuleName::DeltaSpread,
            Self::ExpandSmall16
            | Self::ExpandSmall32
            | Self::ExpandSmall64
            | Self::ExpandSpreadSmall16
            | Self::ExpandSpreadSmall32
            | Self::ExpandMixed16
            | Self::ExpandMixed64
            | Self::ExpandSpread16
            | Self::ExpandSpread32
            | Self::ExpandAny => ModuleName::Expand,
            Self::RowDiff | Self::GatherRows | Self::ReplaceRows => ModuleName::OverlayRows,
            Self::HeadFewDeep
            | Self::HeadFew
            | Self::HeadPair
            | Self::HeadSplit
            | Self::HeadSplitLow
            | Self::HeadUnaligned
            | Self::HeadWide => ModuleName::OverlayHead,
            Self::HeadKept => ModuleName::OverlayHeadWarpgroup,
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.symbol())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ModuleName {
    GroupRows,
    Shrink,
    Expand,
    OverlayRows,
    OverlayHead,
    DeltaSpread,
    ShrinkWarpgroup,
    OverlayHeadWarpgroup,
}

impl ModuleName {
    const ALL: [Self; 8] = [
        Self::GroupRows,
        Self::Shrink,
        Self::Expand,
        Self::OverlayRows,
        Self::OverlayHead,
        Self::DeltaSpread,
        Self::ShrinkWarpgroup,
        Self::OverlayHeadWarpgroup,
    ];
}

/// Modules whose instructions one architecture has and no other: the last ones.
const WARPGROUP_MODULES: usize = 2;

/// PTX built for one architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PtxTarget {
    /// Name in `kernels/KERNEL.toml`.
    pub name: &'static str,
    /// Compute capability, `10 * major + minor`.
    pub capability: u32,
    modules: [&'static str; ModuleName::ALL.len() - WARPGROUP_MODULES],
    /// Those whose instructions this very architecture has and no other.
    warpgroup: Option<[&'static str; WARPGROUP_MODULES]>,
}

macro_rules! ptx {
    ($target:literal) => {
        [
            include_str!(concat!(
                "../../../../kernels/ptx/",
                $target,
                "/group_rows.ptx"
            )),
            include_str!(concat!("../../../../kernels/ptx/", $target, "/shrink.ptx")),
            include_str!(concat!("../../../../kernels/ptx/", $target, "/expand.ptx")),
            include_str!(concat!(
                "../../../../kernels/ptx/",
                $target,
                "/overlay_rows.ptx"
            )),
            include_str!(concat!(
                "../../../../kernels/ptx/",
                $target,
                "/overlay_head.ptx"
            )),
            include_str!(concat!(
                "../../../../kernels/ptx/",
                $target,
                "/delta_spread.ptx"
            )),
        ]
    };
}

impl PtxTarget {
    /// Targets that are built in, newest architecture first.
    pub const ALL: [Self; 2] = [
        Self {
            name: "gb10",
            capability: 121,
            modules: ptx!("gb10"),
            warpgroup: None,
        },
        Self {
            name: "h200",
            capability: 90,
            modules: ptx!("h200"),
            warpgroup: Some([
                include_str!("../../../../kernels/ptx/h200/shrink_warpgroup.ptx"),
                include_str!("../../../../kernels/ptx/h200/overlay_head_warpgroup.ptx"),
            ]),
        },
    ];

    /// The PTX for a device of this compute capability: built for it exactly, else the newest that the driver can compile for it, without what that target's
    /// own architecture alone can run.
    ///
    /// # Errors
    /// [`CudaError::UnsupportedArchitecture`] where every target is newer than the device.
    pub fn for_device(major: u32, minor: u32) -> Result<Self, CudaError> {
        let capability = major * 10 + minor;
        Self::ALL
            .into_iter()
            .find(|target| target.capability <= capability)
            .map(|target| Self {
                warpgroup: target.warpgroup.filter(|_| target.capability == capability),
                ..target
            })
            .ok_or_else(|| CudaError::UnsupportedArchitecture {
                major,
                minor,
                supported: Self::ALL.iter().map(|t| t.name).collect(),
            })
    }

    /// Whether there are kernels whose warpgroups multiply.
    pub(super) fn has_warpgroup_mma(&self) -> bool {
        self.warpgroup.is_some()
    }

    fn module(&self, name: ModuleName) -> Option<&'static str> {
        match (name as usize).checked_sub(self.modules.len()) {
            Some(own) => self.warpgroup.map(|modules| modules[own]),
            None => Some(self.modules[name as usize]),
        }
    }
}

/// All kernels of a target, loaded into a context and resolved.
pub(super) struct Kernels {
    modules: [sys::CUmodule; ModuleName::ALL.len()],
    functions: [sys::CUfunction; Kernel::ALL.len()],
}

// SAFETY: module and function handles are driver-owned names that any thread may use; the driver locks for itself.
unsafe impl Send for Kernels {}
// SAFETY: as above; nothing is mutated after loading.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads every module into the current context and resolves every kernel, each with as much dynamic shared memory as a
    /// block of the device may use.
    pub(super) fn load(target: &PtxTarget, device: &driver::Device) -> Result<Self, CudaError> {
        let mut kernels = Self {
            modules: [std::ptr::null_mut(); ModuleName::ALL.len()],
            functions: [std::ptr::null_mut(); Kernel::ALL.len()],
        };
        for name in ModuleName::ALL {
            if let Some(ptx) = target.module(name) {
                kernels.modules[name as usize] = driver::load_module(ptx)?;
            }
        }
        for kernel in Kernel::ALL {
            if target.module(kernel.module()).is_none() {
                continue;
            }
            let function =
                driver::function(kernels.modules[kernel.module() as usize], kernel.symbol())?
                    .ok_or(CudaError::MissingKernel {
                        kernel: kernel.symbol(),
                        target: target.name,
                    })?;
            driver::allow_dynamic_shared(function, device.shared_bytes)?;
            if let Some(bytes) = kernel.shared_carveout() {
                driver::prefer_shared(function, bytes * 100 / device.multiprocessor_shared_bytes)?;
            }
            kernels.functions[kernel as usize] = function;
        }
        Ok(kernels)
    }

    /// Null, which no launch takes, where the target does not have the kernel.
    pub(super) fn function(&self, kernel: Kernel) -> sys::CUfunction {
        self.functions[kernel as usize]
    }

    /// Unloads the modules; the context must be current and no launch pending.
    pub(super) fn unload(&mut self) {
        for module in &mut self.modules {
            let module = std::mem::replace(module, std::ptr::null_mut());
            if !module.is_null() {
                driver::unload_module(module);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_target_wins_and_newer_devices_take_the_newest_older_ptx() {
        assert_eq!(PtxTarget::for_device(9, 0).unwrap().name, "h200");
        assert_eq!(PtxTarget::for_device(12, 1).unwrap().name, "gb10");
        assert_eq!(PtxTarget::for_device(10, 0).unwrap().name, "h200");
        assert_eq!(PtxTarget::for_device(12, 0).unwrap().name, "h200");
    }

    #[test]
    fn older_devices_are_refused_by_name() {
        let error = PtxTarget::for_device(8, 0).unwrap_err();
        assert!(
            error.to_string().contains("8.0") && error.to_string().contains("host backend"),
            "{error}"
        );
    }

    #[test]
    fn every_symbol_is_in_the_ptx_of_every_target_that_has_its_module() {
        for target in PtxTarget::ALL {
            for kernel in Kernel::ALL {
                let entry = format!(".entry {}(", kernel.symbol());
                let module = target.module(kernel.module());
                assert!(
                    module.is_none_or(|ptx| ptx.contains(&entry)),
                    "{} {entry}",
                    target.name
                );
            }
        }
    }

    #[test]
    fn warpgroups_multiply_on_the_architecture_that_has_them_alone() {
        let on = |major, minor| {
            PtxTarget::for_device(major, minor)
                .unwrap()
                .has_warpgroup_mma()
        };
        assert!(on(9, 0));
        assert!(!on(10, 0) && !on(12, 0) && !on(12, 1));
    }

    #[test]
    fn indices_follow_declaration_order() {
        for (index, kernel) in Kernel::ALL.into_iter().enumerate() {
            assert_eq!(kernel as usize, index);
        }
        for (index, module) in ModuleName::ALL.into_iter().enumerate() {
            assert_eq!(module as usize, index);
        }
    }
}
