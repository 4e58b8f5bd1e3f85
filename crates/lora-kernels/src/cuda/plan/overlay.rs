//! Plans of whole-row operations.

use crate::cuda::Kernel;
use crate::params::{
    GatherRowsParams, HEAD_IDS, HEAD_LOW_STAGES, HEAD_SPLIT_ROWS, HEAD_SPLIT_STAGES, HEAD_STAGE_K,
    HEAD_THREADS, HEAD_WIDE_ROWS, HEAD_WIDE_STAGES, LOGIT_PARTS, LogitsParams, ROW_THREADS,
    ReplaceRowsParams, RowDiffParams,
};
use crate::{DeviceCaps, KernelPlan};

/// Rows of a diff or a gather that a block takes.
const ROWS_A_BLOCK: u32 = ROW_THREADS / 32;

/// What blocks have of shared memory beside what a plan asks for: the list of work.
const STATIC_SHARED: u32 = 2 << 10;

fn row_plan(kernel: Kernel, blocks: u32) -> KernelPlan<Kernel> {
    KernelPlan {
        kernel,
        grid: [blocks, 1, 1],
        block: ROW_THREADS,
        shared_bytes: 0,
    }
}

/// Plans a row diff: a warp a row.
pub fn plan_row_diff(params: &RowDiffParams) -> KernelPlan<Kernel> {
    row_plan(Kernel::RowDiff, params.rows.div_ceil(ROWS_A_BLOCK))
}

/// Plans a gather: a warp a row.
pub fn plan_gather_rows(params: &GatherRowsParams) -> KernelPlan<Kernel> {
    row_plan(Kernel::GatherRows, params.rows.div_ceil(ROWS_A_BLOCK))
}

/// Plans the replacement of embedding rows: a block a row.
pub fn plan_replace_rows(params: &ReplaceRowsParams) -> KernelPlan<Kernel> {
    row_plan(Kernel::ReplaceRows, params.rows)
}

/// Dynamic shared memory of a block of the head: its stages, and FP32 sums of all rows and ids.
const fn head_bytes(rows: u32, stages: u32) -> u32 {
    stages * (HEAD_IDS + rows) * HEAD_STAGE_K * 2 + rows * HEAD_IDS * 4
}

/// Plans the head. Overlays change under a captured graph, so blocks take what work there is in turn. `clusters` of [`LOGIT_PARTS`] blocks run at
/// once; where less work is expected there are fewer, so that each has a multiprocessor to itself.
///
/// A batch of more rows than a cluster takes at a time goes through whole blocks where its overlays are expected to have an item for every
/// other multiprocessor, and a block has the shared memory.
pub fn plan_head_logits(
    params: &LogitsParams,
    caps: &DeviceCaps,
    clusters: u32,
) -> KernelPlan<Kernel> {
    let aligned = params.k_in.is_multiple_of(8)
        && params.x_stride.is_multiple_of(8)
        && params.x.is_multiple_of(16);
    let units = caps.units.max(1);
    let fits = |bytes: u32| bytes + STATIC_SHARED <= caps.shared_bytes;
    let wide_bytes = head_bytes(HEAD_WIDE_ROWS, HEAD_WIDE_STAGES);
    let items = params.expected_ids.min(params.vocab).div_ceil(HEAD_IDS);
    if aligned && params.rows > HEAD_SPLIT_ROWS && items >= units / 2 && fits(wide_bytes) {
        return KernelPlan {
            kernel: Kernel::HeadWide,
            grid: [units, 1, 1],
            block: HEAD_THREADS,
            shared_bytes: wide_bytes,
        };
    }
    let (kernel, stages) = match aligned {
        true if fits(head_bytes(HEAD_SPLIT_ROWS, HEAD_SPLIT_STAGES)) => {
            (Kernel::HeadSplit, HEAD_SPLIT_STAGES)
        }
        true => (Kernel::HeadSplitLow, HEAD_LOW_STAGES),
        false => (Kernel::HeadUnaligned, HEAD_LOW_STAGES),
    };
    let chunks = params
        .rows
        .div_ceil(HEAD_SPLIT_ROWS)
        .max(params.slots.min(params.rows));
    let expected = match items.saturating_mul(chunks) {
        0 => clusters,
        items => items.min(clusters),
    };
    KernelPlan {
        kernel,
        grid: [expected.max(1) * LOGIT_PARTS, 1, 1],
        block: HEAD_THREADS,
        shared_bytes: head_bytes(HEAD_SPLIT_ROWS, stages),
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

    #[test]
    fn nearly_whole_tables_of_many_rows_are_a_product_and_the_rest_is_shared_by_clusters() {
        let h200 = caps(132, 232_448);
        let plan = |rows, ids| plan_head_logits(&head(rows, ids), &h200, 32);
        assert_eq!(plan(256, 1024).kernel, Kernel::HeadSplit);
        assert_eq!(plan(1, 152_000).kernel, Kernel::HeadSplit);
        let wide = plan(256, 152_000);
        assert_eq!((wide.kernel, wide.grid), (Kernel::HeadWide, [132, 1, 1]));
        assert_eq!(plan(1, 3).shared_bytes, 104 << 10);
        assert!(wide.shared_bytes + STATIC_SHARED <= 232_448);
    }

    #[test]
    fn a_gb10_takes_the_kernel_of_few_stages() {
        let plan = plan_head_logits(&head(256, 152_000), &caps(48, 101_376), 12);
        assert_eq!((plan.kernel, plan.grid), (Kernel::HeadSplitLow, [48, 1, 1]));
        assert!(plan.shared_bytes + STATIC_SHARED <= 101_376);
    }

    #[test]
    fn rows_that_are_not_16_byte_aligned_have_a_kernel_of_their_own() {
        let h200 = caps(132, 232_448);
        let odd_width = LogitsParams {
            k_in: 4095,
            ..head(256, 152_000)
        };
        let odd_stride = LogitsParams {
            x_stride: 4099,
            ..head(1, 1)
        };
        for params in [odd_width, odd_stride] {
            let plan = plan_head_logits(&params, &h200, 32);
            assert_eq!(plan.kernel, Kernel::HeadUnaligned);
            assert!(plan.shared_bytes + STATIC_SHARED <= 101_376);
        }
    }

    #[test]
    fn a_grid_is_as_many_clusters_as_there_is_work_for_or_run_at_once() {
        let clusters = |rows, slots, ids, most| {
            let params = LogitsParams {
                slots,
                ..head(rows, ids)
            };
            let plan = plan_head_logits(&params, &caps(132, 232_448), most);
            assert!(plan.grid[0].is_multiple_of(LOGIT_PARTS));
            plan.grid[0] / LOGIT_PARTS
        };
        assert_eq!(clusters(256, 4, 1024, 60), 32, "8 times 128 ids of 4 slots");
        assert_eq!(clusters(8, 8, 16, 60), 8, "a slot's ids each");
        assert_eq!(clusters(1, 4, 152_000, 60), 60, "as many as run at once");
        assert_eq!(clusters(8, 4, 0, 60), 60, "nothing is known");
        assert_eq!(clusters(8, 4, 100, 0), 1);
    }

    #[test]
    fn every_row_of_a_diff_has_a_warp() {
        let params = RowDiffParams {
            rows: 17,
            ..RowDiffParams::zeroed()
        };
        assert_eq!(plan_row_diff(&params).grid, [3, 1, 1]);
    }
}
