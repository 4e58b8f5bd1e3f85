//! Plans of whole-row operations.

use crate::cuda::Kernel;
use crate::params::{GatherRowsParams, ROW_THREADS, ReplaceRowsParams, RowDiffParams};
use crate::{DeviceCaps, KernelPlan};

/// Rows of a diff or a gather that a block takes.
const ROWS_A_BLOCK: u32 = ROW_THREADS / 32;

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

/// Plans the replacement of embedding rows: a block a row, or two where there are more rows than multiprocessors.
///
/// A head that follows starts once all blocks have, and beside the blocks of one before it a multiprocessor has shared memory for one of these.
pub fn plan_replace_rows(params: &ReplaceRowsParams, caps: &DeviceCaps) -> KernelPlan<Kernel> {
    let blocks = if params.rows > caps.units {
        params.rows.div_ceil(2)
    } else {
        params.rows
    };
    row_plan(Kernel::ReplaceRows, blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    #[test]
    fn every_row_of_a_diff_has_a_warp() {
        let params = RowDiffParams {
            rows: 17,
            ..RowDiffParams::zeroed()
        };
        assert_eq!(plan_row_diff(&params).grid, [3, 1, 1]);
    }

    #[test]
    fn rows_to_replace_share_blocks_where_they_outnumber_multiprocessors() {
        let caps = DeviceCaps {
            name: String::new(),
            units: 132,
            shared_bytes: 0,
            l2_bytes: 0,
            warpgroup_mma: false,
        };
        for (rows, blocks) in [(1, 1), (132, 132), (133, 67), (256, 128)] {
            let params = ReplaceRowsParams {
                rows,
                ..ReplaceRowsParams::zeroed()
            };
            assert_eq!(plan_replace_rows(&params, &caps).grid, [blocks, 1, 1]);
        }
    }
}
