//! Plans of the head.

use crate::cuda::Kernel;
use crate::params::{
    HEAD_DEEP_STAGES, HEAD_DEEP_TILES, HEAD_FEW_IDS, HEAD_FEW_STAGES, HEAD_FEW_TILES, HEAD_IDS,
    HEAD_KEPT_IDS, HEAD_KEPT_ROW_TILES, HEAD_KEPT_ROWS, HEAD_KEPT_STAGES, HEAD_KEPT_THREADS,
    HEAD_KEPT_TILES, HEAD_LOW_STAGES, HEAD_PAIR_IDS, HEAD_PAIR_STAGES, HEAD_PAIR_TILES,
    HEAD_SPLIT_ROWS, HEAD_SPLIT_STAGES, HEAD_STAGE_K, HEAD_THREADS, HEAD_WIDE_ROWS,
    HEAD_WIDE_STAGES, LOGIT_PARTS, LogitsParams,
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
    /// Where items have many rows, and they can be kept, more than half so many of the clusters that run at once must have one, or keeping them is quicker.
    busy_halves: u32,
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
        busy_halves: 0,
    },
    SplitKernel {
        kernel: Kernel::HeadFew,
        blocks: 4,
        ids: HEAD_FEW_IDS,
        tiles: HEAD_FEW_TILES,
        stages: HEAD_FEW_STAGES,
        busy_halves: 2,
    },
    SplitKernel {
        kernel: Kernel::HeadPair,
        blocks: 2,
        ids: HEAD_PAIR_IDS,
        tiles: HEAD_PAIR_TILES,
        stages: HEAD_PAIR_STAGES,
        busy_halves: 1,
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
        busy_halves: 2,
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

/// The kernel whose clusters keep hidden rows while overlays pass: the hidden rows, stages, and FP32 sums of two items.
fn kept(clusters: u32) -> KernelPlan<Kernel> {
    const ROWS: u32 = HEAD_KEPT_ROW_TILES * HEAD_KEPT_ROWS * HEAD_STAGE_K * 2;
    const STAGES: u32 = HEAD_KEPT_STAGES * HEAD_KEPT_TILES * HEAD_KEPT_IDS * HEAD_STAGE_K * 2;
    const SUMS: u32 = 2 * HEAD_KEPT_ROWS * HEAD_KEPT_IDS * 4;
    KernelPlan {
        kernel: Kernel::HeadKept,
        grid: [clusters.max(1) * LOGIT_PARTS, 1, 1],
        block: HEAD_KEPT_THREADS,
        shared_bytes: ROWS + STAGES + SUMS,
    }
}

/// Items' worth of a slot's rows up to which passing the overlay by each is quicker than a whole block for all.
const KEPT_BLOCKS: u32 = 2;

/// Whether a block has room for its part of hidden rows.
fn can_keep(params: &LogitsParams, caps: &DeviceCaps) -> bool {
    let tiles = params.k_in.div_ceil(HEAD_STAGE_K).div_ceil(LOGIT_PARTS);
    caps.warpgroup_mma && tiles <= HEAD_KEPT_ROW_TILES
}

/// Clusters of the head's kernels that a device runs at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeadClusters {
    /// Of each kernel for little work, in order; 0 where the device lacks the shared memory.
    little: [u32; FOR_LITTLE.len()],
    /// Of the kernel for much work.
    much: u32,
    /// Of the kernel that keeps hidden rows; 0 where the device lacks it.
    kept: u32,
}

impl HeadClusters {
    /// Asks `resident` how many clusters, of so many blocks each, a launch's kernel has at once.
    pub(in crate::cuda) fn ask<E>(
        caps: &DeviceCaps,
        mut resident: impl FnMut(&KernelPlan<Kernel>, u32) -> Result<u32, E>,
    ) -> Result<Self, E> {
        let kept = match caps.warpgroup_mma {
            true => resident(&kept(1), LOGIT_PARTS)?,
            false => 0,
        };
        let mut of = |split: &SplitKernel| resident(&split.launch(1), split.blocks);
        let mut clusters = Self {
            much: of(split_for_much(caps, true))?,
            kept,
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
/// Where all expected items of a small kind can run at once, clusters take such items: every multiprocessor has work, and none has much more than another. Where
/// warpgroups multiply, clusters that keep hidden rows take what is left, and what has many rows but would keep few multiprocessors busy. A batch of more rows than
/// a cluster takes at a time, and than are quickly passed by, goes through whole blocks where its overlays are expected to have an item for every other
/// multiprocessor, and a block has the shared memory.
pub fn plan_head_logits(
    params: &LogitsParams,
    caps: &DeviceCaps,
    clusters: &HeadClusters,
) -> KernelPlan<Kernel> {
    let aligned = params.k_in.is_multiple_of(8)
        && params.x_stride.is_multiple_of(8)
        && params.x.is_multiple_of(16);
    let keeps = aligned && can_keep(params, caps);
    let ids = params.expected_ids.min(params.vocab);
    let slots = if params.tiles == 0 { 1 } else { params.slots };
    let units = caps.units.max(1);
    let wide_bytes = HEAD_WIDE_STAGES * (HEAD_IDS + HEAD_WIDE_ROWS) * HEAD_STAGE_K * 2
        + HEAD_WIDE_ROWS * HEAD_IDS * 4;
    if aligned
        && params.rows > HEAD_SPLIT_ROWS
        && !(keeps && params.rows <= slots.saturating_mul(KEPT_BLOCKS * HEAD_KEPT_ROWS))
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
        .max(slots.min(params.rows));
    // None where nothing is known.
    let items = |of_ids: u32| ids.div_ceil(of_ids).saturating_mul(chunks);
    let much = split_for_much(caps, aligned);
    let many_rows = keeps && params.rows > chunks.saturating_mul(HEAD_KEPT_ROWS / 2);
    let takes_little = |split: &SplitKernel, most: u32| {
        let items = items(split.ids);
        items <= most && (!many_rows || 2 * items > split.busy_halves * most)
    };
    match items(much.ids) {
        0 => much.launch(clusters.much),
        items if !aligned => much.launch(items.min(clusters.much)),
        of_much => FOR_LITTLE
            .iter()
            .zip(clusters.little)
            .find(|(split, most)| takes_little(split, *most))
            .map_or_else(
                || match keeps {
                    true => kept(items(HEAD_KEPT_IDS).min(clusters.kept)),
                    false => much.launch(of_much.min(clusters.much)),
                },
                |(split, _)| split.launch(items(split.ids)),
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
        kept: 30,
    };

    fn h200() -> DeviceCaps {
        DeviceCaps {
            warpgroup_mma: true,
            ..without_warpgroups()
        }
    }

    /// As large, but of another architecture.
    fn without_warpgroups() -> DeviceCaps {
        caps(132, 232_448)
    }

    fn kernel_and_blocks(caps: &DeviceCaps, (rows, slots, ids): (u32, u32, u32)) -> (Kernel, u32) {
        let params = LogitsParams {
            slots,
            tiles: 16,
            ..head(rows, ids)
        };
        let plan = plan_head_logits(&params, caps, &OF_H200);
        (plan.kernel, plan.grid[0])
    }

    #[test]
    fn little_work_is_cut_into_the_smallest_items_that_all_run_at_once() {
        let plan = |rows, slots, ids| kernel_and_blocks(&without_warpgroups(), (rows, slots, ids));
        assert_eq!(plan(8, 8, 16), (Kernel::HeadFewDeep, 8 * 4));
        assert_eq!(plan(64, 1, 1024), (Kernel::HeadFew, 32 * 4));
        assert_eq!(plan(256, 4, 1024), (Kernel::HeadPair, 64 * 2));
        assert_eq!(plan(256, 4, 2048), (Kernel::HeadSplit, 62 * 4));
        assert_eq!(plan(70, 3, 1500), (Kernel::HeadSplit, 36 * 4));
    }

    #[test]
    fn rows_are_kept_where_small_items_are_too_many_or_many_rows_leave_multiprocessors_idle() {
        let plan = |rows, slots, ids| kernel_and_blocks(&h200(), (rows, slots, ids));
        assert_eq!(plan(8, 8, 16), (Kernel::HeadFewDeep, 8 * 4));
        assert_eq!(plan(256, 4, 1024), (Kernel::HeadPair, 64 * 2));
        assert_eq!(plan(64, 1, 1024), (Kernel::HeadKept, 30 * 4));
        assert_eq!(plan(256, 4, 512), (Kernel::HeadKept, 30 * 4));
        assert_eq!(plan(8, 1, 1024), (Kernel::HeadFew, 32 * 4));
        assert_eq!(plan(64, 8, 256), (Kernel::HeadPair, 32 * 2));
        assert_eq!(plan(256, 4, 2048), (Kernel::HeadKept, 30 * 4));
        assert_eq!(plan(1, 1, 152_000), (Kernel::HeadKept, 30 * 4));
    }

    #[test]
    fn rows_too_wide_to_be_kept_are_read_again() {
        let kernel = |k_in| {
            let params = LogitsParams {
                k_in,
                x_stride: 8192,
                ..head(64, 152_000)
            };
            plan_head_logits(&params, &h200(), &OF_H200).kernel
        };
        assert_eq!(kernel(4096), Kernel::HeadKept);
        assert_eq!(kernel(4104), Kernel::HeadSplit);
    }

    #[test]
    fn nearly_whole_tables_of_many_rows_are_a_product_and_the_rest_is_shared_by_clusters() {
        let plan = |caps, rows, ids| plan_head_logits(&head(rows, ids), &caps, &OF_H200);
        let split = plan(without_warpgroups(), 1, 152_000);
        assert_eq!(
            (split.kernel, split.shared_bytes),
            (Kernel::HeadSplit, 104 << 10)
        );
        let kept = plan(h200(), 1, 152_000);
        assert_eq!(
            (kept.kernel, kept.shared_bytes),
            (Kernel::HeadKept, 208 << 10)
        );
        let wide = plan(h200(), 256, 152_000);
        assert_eq!((wide.kernel, wide.grid), (Kernel::HeadWide, [132, 1, 1]));
        let kernel = |slots| kernel_and_blocks(&h200(), (256, slots, 16_384)).0;
        assert_eq!([kernel(1), kernel(2)], [Kernel::HeadWide, Kernel::HeadKept]);
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
            params(256, 4, 2048),
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
