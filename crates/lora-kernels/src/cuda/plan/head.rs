//! Plans of the head.

use crate::cuda::Kernel;
use crate::params::{
    HEAD_DEEP_STAGES, HEAD_DEEP_TILES, HEAD_FEW_IDS, HEAD_FEW_STAGES, HEAD_FEW_TILES, HEAD_IDS,
    HEAD_LOW_STAGES, HEAD_PAIR_IDS, HEAD_PAIR_STAGES, HEAD_PAIR_TILES, HEAD_SPLIT_ROWS,
    HEAD_SPLIT_STAGES, HEAD_STAGE_K, HEAD_THREADS, HEAD_WIDE_ROWS, HEAD_WIDE_STAGES, LOGIT_PARTS,
    LogitsParams,
};
use crate::{DeviceCaps, KernelPlan};

/// What blocks have of shared memory beside what a plan asks for: the list of work.
const STATIC_SHARED: u32 = 2 << 10;

/// A kernel whose clusters share the hidden size of an item.
struct SplitKernel {
    kernel: Kernel,
    /// Blocks of a cluster.
    blocks: u32,
    /// Overlay rows of an item.
    ids: u32,
    /// Times [`HEAD_STAGE_K`] hidden columns in a stage.
    tiles: u32,
    stages: u32,
}

impl SplitKernel {
    /// Its stages, and FP32 sums: all parts of the rows that a block adds up.
    const fn shared_bytes(&self) -> u32 {
        let stage = self.tiles * (self.ids + HEAD_SPLIT_ROWS) * HEAD_STAGE_K * 2;
        self.stages * stage + LOGIT_PARTS * (HEAD_SPLIT_ROWS / self.blocks) * self.ids * 4
    }

    fn fits(&self, caps: &DeviceCaps) -> bool {
        self.shared_bytes() + STATIC_SHARED <= caps.shared_bytes
    }

    fn launch(&self, clusters: u32) -> KernelPlan<Kernel> {
        KernelPlan {
            kernel: self.kernel,
            grid: [clusters.max(1) * self.blocks, 1, 1],
            block: HEAD_THREADS,
            shared_bytes: self.shared_bytes(),
        }
    }
}

/// Kernels for little work, that of the smallest items first. Each is taken where its items, all running at once, are what there is to do.
const FOR_LITTLE: [SplitKernel; 3] = [
    SplitKernel {
        kernel: Kernel::HeadFewDeep,
        blocks: 4,
        ids: HEAD_FEW_IDS,
        tiles: HEAD_DEEP_TILES,
        stages: HEAD_DEEP_STAGES,
    },
    SplitKernel {
        kernel: Kernel::HeadFew,
        blocks: 4,
        ids: HEAD_FEW_IDS,
        tiles: HEAD_FEW_TILES,
        stages: HEAD_FEW_STAGES,
    },
    SplitKernel {
        kernel: Kernel::HeadPair,
        blocks: 2,
        ids: HEAD_PAIR_IDS,
        tiles: HEAD_PAIR_TILES,
        stages: HEAD_PAIR_STAGES,
    },
];

/// A kernel for any amount of work.
const fn for_much(kernel: Kernel, stages: u32) -> SplitKernel {
    SplitKernel {
        kernel,
        blocks: LOGIT_PARTS,
        ids: HEAD_IDS,
        tiles: 1,
        stages,
    }
}

const SPLIT: SplitKernel = for_much(Kernel::HeadSplit, HEAD_SPLIT_STAGES);
const SPLIT_LOW: SplitKernel = for_much(Kernel::HeadSplitLow, HEAD_LOW_STAGES);
const UNALIGNED: SplitKernel = for_much(Kernel::HeadUnaligned, HEAD_LOW_STAGES);

fn split_for_much(caps: &DeviceCaps, aligned: bool) -> &'static SplitKernel {
    match aligned {
        true if SPLIT.fits(caps) => &SPLIT,
        true => &SPLIT_LOW,
        false => &UNALIGNED,
    }
}

/// Clusters of the head's kernels that a device runs at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeadClusters {
    /// Of each kernel for little work, in order; 0 where the device lacks the shared memory.
    little: [u32; FOR_LITTLE.len()],
    /// Of the kernel for much work.
    much: u32,
}

impl HeadClusters {
    /// Asks `resident` how many clusters, of so many blocks each, a launch's kernel has at once.
    pub(in crate::cuda) fn ask<E>(
        caps: &DeviceCaps,
        mut resident: impl FnMut(&KernelPlan<Kernel>, u32) -> Result<u32, E>,
    ) -> Result<Self, E> {
        let mut of = |split: &SplitKernel| resident(&split.launch(1), split.blocks);
        let mut clusters = Self {
            much: of(split_for_much(caps, true))?,
            ..Self::default()
        };
        for (count, split) in clusters.little.iter_mut().zip(&FOR_LITTLE) {
            if split.fits(caps) {
                *count = of(split)?;
            }
        }
        Ok(clusters)
    }
}

/// Plans the head. Overlays change under a captured graph, so blocks take what work there is in turn.
///
/// Where all expected items of a small kind can run at once, clusters take such items: every multiprocessor has work, and none has much more than another. A
/// batch of more rows than a cluster takes at a time goes through whole blocks where its overlays are expected to have an item for every other
/// multiprocessor, and a block has the shared memory.
pub fn plan_head_logits(
    params: &LogitsParams,
    caps: &DeviceCaps,
    clusters: &HeadClusters,
) -> KernelPlan<Kernel> {
    let aligned = params.k_in.is_multiple_of(8)
        && params.x_stride.is_multiple_of(8)
        && params.x.is_multiple_of(16);
    let ids = params.expected_ids.min(params.vocab);
    let units = caps.units.max(1);
    let wide_bytes = HEAD_WIDE_STAGES * (HEAD_IDS + HEAD_WIDE_ROWS) * HEAD_STAGE_K * 2
        + HEAD_WIDE_ROWS * HEAD_IDS * 4;
    if aligned
        && params.rows > HEAD_SPLIT_ROWS
        && ids.div_ceil(HEAD_IDS) >= units / 2
        && wide_bytes + STATIC_SHARED <= caps.shared_bytes
    {
        return KernelPlan {
            kernel: Kernel::HeadWide,
            grid: [units, 1, 1],
            block: HEAD_THREADS,
            shared_bytes: wide_bytes,
        };
    }
    let chunks = params
        .rows
        .div_ceil(HEAD_SPLIT_ROWS)
        .max(params.slots.min(params.rows));
    // None where nothing is known.
    let items = |split: &SplitKernel| ids.div_ceil(split.ids).saturating_mul(chunks);
    let much = split_for_much(caps, aligned);
    match items(much) {
        0 => much.launch(clusters.much),
        _ if !aligned => much.launch(items(much).min(clusters.much)),
        _ => FOR_LITTLE
            .iter()
            .zip(clusters.little)
            .find(|(split, most)| items(split) <= *most)
            .map_or_else(
                || much.launch(items(much).min(clusters.much)),
                |(split, _)| split.launch(items(split)),
            ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    fn caps(units: u32, shared_bytes: u32) -> DeviceCaps {
        DeviceCaps {
            name: String::new(),
            units,
            shared_bytes,
            l2_bytes: 0,
            warpgroup_mma: false,
        }
    }

    fn head(rows: u32, expected_ids: u32) -> LogitsParams {
        LogitsParams {
            rows,
            k_in: 4096,
            x_stride: 4096,
            vocab: 152_000,
            expected_ids,
            ..LogitsParams::zeroed()
        }
    }

    /// What an H200 runs at once.
    const OF_H200: HeadClusters = HeadClusters {
        little: [30, 62, 66],
        much: 62,
    };

    fn h200() -> DeviceCaps {
        caps(132, 232_448)
    }

    #[test]
    fn little_work_is_cut_into_the_smallest_items_that_all_run_at_once() {
        let plan = |rows, slots, ids| {
            let params = LogitsParams {
                slots,
                ..head(rows, ids)
            };
            let plan = plan_head_logits(&params, &h200(), &OF_H200);
            (plan.kernel, plan.grid[0])
        };
        assert_eq!(plan(8, 8, 16), (Kernel::HeadFewDeep, 8 * 4));
        assert_eq!(plan(64, 1, 1024), (Kernel::HeadFew, 32 * 4));
        assert_eq!(plan(256, 4, 1024), (Kernel::HeadPair, 64 * 2));
        assert_eq!(plan(256, 4, 2048), (Kernel::HeadSplit, 62 * 4));
        assert_eq!(plan(70, 3, 1500), (Kernel::HeadSplit, 36 * 4));
    }

    #[test]
    fn nearly_whole_tables_of_many_rows_are_a_product_and_the_rest_is_shared_by_clusters() {
        let plan = |rows, ids| plan_head_logits(&head(rows, ids), &h200(), &OF_H200);
        assert_eq!(plan(1, 152_000).kernel, Kernel::HeadSplit);
        assert_eq!(plan(1, 152_000).shared_bytes, 104 << 10);
        let wide = plan(256, 152_000);
        assert_eq!((wide.kernel, wide.grid), (Kernel::HeadWide, [132, 1, 1]));
    }

    #[test]
    fn as_many_clusters_as_run_at_once_wait_for_work_that_nobody_expects() {
        let plan = plan_head_logits(&head(8, 0), &h200(), &OF_H200);
        assert_eq!((plan.kernel, plan.grid[0]), (Kernel::HeadSplit, 62 * 4));
        let plan = plan_head_logits(&head(8, 0), &h200(), &HeadClusters::default());
        assert_eq!(plan.grid[0], LOGIT_PARTS);
    }

    #[test]
    fn every_block_fits_an_h200() {
        let params = |rows, slots, ids| LogitsParams {
            slots,
            ..head(rows, ids)
        };
        for params in [
            params(8, 8, 16),
            params(64, 1, 1024),
            params(256, 4, 1024),
            params(1, 1, 152_000),
            params(256, 1, 152_000),
        ] {
            let plan = plan_head_logits(&params, &h200(), &OF_H200);
            assert!(plan.shared_bytes + STATIC_SHARED <= 232_448, "{plan:?}");
        }
    }

    #[test]
    fn a_gb10_takes_the_kernel_of_few_stages() {
        let gb10 = caps(48, 101_376);
        let asked = HeadClusters::ask(&gb10, |plan, blocks| {
            assert!(plan.shared_bytes + STATIC_SHARED <= gb10.shared_bytes);
            Ok::<_, ()>(48 / blocks)
        });
        let clusters = asked.expect("nothing refuses");
        assert_eq!(clusters.much, 12);
        for (rows, ids) in [(256, 152_000), (1, 1)] {
            let plan = plan_head_logits(&head(rows, ids), &gb10, &clusters);
            assert_eq!(plan.kernel, Kernel::HeadSplitLow);
            assert!(plan.shared_bytes + STATIC_SHARED <= 101_376);
        }
    }

    #[test]
    fn rows_that_are_not_16_byte_aligned_have_a_kernel_of_their_own() {
        let odd_width = LogitsParams {
            k_in: 4095,
            ..head(256, 152_000)
        };
        let odd_stride = LogitsParams {
            x_stride: 4099,
            ..head(1, 1)
        };
        for params in [odd_width, odd_stride] {
            let plan = plan_head_logits(&params, &h200(), &OF_H200);
            assert_eq!(plan.kernel, Kernel::HeadUnaligned);
            assert!(plan.shared_bytes + STATIC_SHARED <= 101_376);
        }
    }
}
