//! Spread rows whose whole delta is one launch.

use super::*;

/// Rows of a MoE block as few as are cut into small tiles alone.
fn few_spread(rows: u32, entries: u32, rank: u32, (k_in, n_outs): (u32, &[u32])) -> DeltaParams {
    let mut params = params(&Problem::uniform(rows, entries, rank, (k_in, n_outs)));
    params.flags = FLAG_SPREAD;
    params.slots = entries;
    params.tile_rows = SMALL_TILE_ROWS;
    params.max_tiles = crate::RowGroupsSpec::experts(rows, entries, 48).max_tiles();
    (params.tiles, params.perm) = (16, 16);
    for site in &mut params.sites {
        site.a_table = 16;
    }
    params
}

/// Kernel, grid, outputs a block and dynamic shared memory of a whole delta in one launch.
fn one_launch(params: &DeltaParams, caps: &DeviceCaps) -> Option<(Kernel, [u32; 3], u32, u32)> {
    let plan = plan_delta_spread(params, caps)?;
    let launch = plan.launch;
    Some((
        launch.kernel,
        launch.grid,
        plan.outputs,
        launch.shared_bytes,
    ))
}

#[test]
fn few_spread_rows_of_small_pairs_take_one_launch() {
    let plan = |params: &DeltaParams| one_launch(params, &h200());
    let gate_up = |rows, entries| plan(&few_spread(rows, entries, 16, (2048, &[768, 768])));
    let down = |rows, entries| plan(&few_spread(rows, entries, 16, (768, &[2048])));
    let (one, two) = (Kernel::DeltaSpread1024, Kernel::DeltaSpread2048);
    // No more blocks than multiprocessors: half as many outputs each.
    assert_eq!(gate_up(8, 128), Some((two, [4, 8, 1], 512, 512 * 32)));
    assert_eq!(down(8, 128), Some((one, [4, 8, 1], 512, 512 * 32)));
    assert_eq!(gate_up(512, 128), Some((two, [2, 176, 1], 1024, 768 * 32)));
    assert_eq!(down(512, 128), Some((one, [2, 176, 1], 1024, 1024 * 32)));
    // 324 tiles are more than two waves.
    assert_eq!((gate_up(512, 512), down(512, 512)), (None, None));

    let served = few_spread(64, 128, 16, (2048, &[768]));
    assert!(plan(&served).is_some());
    let dense = DeltaParams { flags: 0, ..served };
    let odd_x = DeltaParams {
        x_stride: 2049,
        ..served
    };
    let mut pair = served;
    pair.sites[0].a_table = 0;
    let wide = few_spread(64, 128, 16, (2056, &[768]));
    let ranks = few_spread(64, 128, 17, (2048, &[768]));
    let odd_out = few_spread(64, 128, 16, (2048, &[767]));
    for params in [dense, odd_x, pair, wide, ranks, odd_out] {
        assert_eq!(plan(&params), None, "{params:?}");
    }
}

/// Rows of a MoE block that are cut into large tiles.
fn many_spread(rows: u32, entries: u32, rank: u32, shape: (u32, &[u32])) -> DeltaParams {
    DeltaParams {
        tile_rows: LARGE_TILE_ROWS,
        max_tiles: entries + rows / LARGE_TILE_ROWS,
        ..few_spread(rows, entries, rank, shape)
    }
}

/// x on its way and xa of 128 rows.
fn shared_bytes(rank: u32) -> u32 {
    32_768 + 128 * if rank == 16 { 32 } else { 96 }
}

#[test]
fn spread_rows_of_seldom_full_tiles_take_a_block_a_tile() {
    let down = |rows, entries, rank| many_spread(rows, entries, rank, (768, &[2048][..]));
    let gate_up = |rows, entries| many_spread(rows, entries, 32, (2048, &[768, 768][..]));
    let plan = |params: &DeltaParams| one_launch(params, &h200());
    let (grid, outputs) = ([1, 576, 1], 2048);
    assert_eq!(
        plan(&down(8192, 512, 16)),
        Some((Kernel::DeltaRows16, grid, outputs, shared_bytes(16)))
    );
    assert_eq!(
        plan(&down(8192, 512, 17)),
        Some((Kernel::DeltaRows32, grid, outputs, shared_bytes(32)))
    );
    // The sums of the first of two k blocks; however many rows an entry has, two blocks a tile would have no registers for two sites.
    let (kernel, two_blocks) = (Kernel::DeltaRows32Of2048, shared_bytes(32) + 128 * 128);
    assert_eq!(
        plan(&gate_up(8192, 512)),
        Some((kernel, [2, 576, 1], 768, two_blocks))
    );
    assert_eq!(
        plan(&gate_up(32_768, 128)),
        Some((kernel, [2, 384, 1], 768, two_blocks))
    );
    // Two blocks of 32 ranks do not fit a multiprocessor of a GB10.
    assert!(one_launch(&down(8192, 512, 16), &gb10()).is_some());
    assert_eq!(one_launch(&down(8192, 512, 32), &gb10()), None);

    let others = [
        gate_up(8192, 64),                              // fewer blocks than have room
        down(8192, 512, 33),                            // more ranks
        many_spread(8192, 512, 32, (2056, &[768][..])), // more k
    ];
    for params in others {
        assert_eq!(plan(&params), None, "{params:?}");
    }
}

#[test]
fn fuller_tiles_and_pairs_of_sites_take_several_blocks_a_tile() {
    let down = |rows, entries, rank| many_spread(rows, entries, rank, (768, &[2048][..]));
    let gate_up = |rows, entries, rank| many_spread(rows, entries, rank, (2048, &[768, 640][..]));
    let plan = |params: &DeltaParams| one_launch(params, &h200());
    let halves = |kernel, rank| Some((kernel, [2, 192, 1], 1024, shared_bytes(rank)));
    assert_eq!(
        plan(&down(8192, 128, 16)),
        halves(Kernel::DeltaHalves16, 16)
    );
    assert_eq!(
        plan(&down(8192, 128, 32)),
        halves(Kernel::DeltaHalves32, 32)
    );
    // The sums of two k blocks; all outputs of a site, or half of the only one's in whole runs of a warp.
    let sums = shared_bytes(16) + 2 * 128 * 16 * 4;
    assert_eq!(
        plan(&gate_up(8192, 128, 16)),
        Some((Kernel::DeltaCross16Pair, [2, 192, 1], 768, sums))
    );
    let wide_down = many_spread(4096, 60, 16, (1408, &[2056][..]));
    assert_eq!(
        plan(&wide_down),
        None,
        "68 rows an entry are few tiles of many rows"
    );
    let wide_down = many_spread(4096, 240, 16, (1408, &[2056][..]));
    assert_eq!(
        plan(&wide_down),
        Some((Kernel::DeltaCross16, [2, 272, 1], 1088, sums))
    );
    // Four k blocks, or three: more rows than a pass of two launches has.
    let wide = |(rows, entries), k_in, n_outs: &[u32]| {
        plan(&many_spread(rows, entries, 16, (k_in, n_outs)))
    };
    let four_sums = shared_bytes(16) + 4 * 128 * 16 * 4;
    let outs = &[1536, 1536][..];
    assert_eq!(
        wide((8193, 128), 4096, outs),
        Some((Kernel::DeltaCross16PairOf4096, [4, 192, 1], 768, four_sums))
    );
    assert_eq!(
        wide((8193, 32), 2880, &[2880]),
        Some((Kernel::DeltaCross16Of4096, [4, 96, 1], 768, four_sums))
    );
    assert_eq!(wide((8192, 128), 4096, outs), None);
    assert_eq!(wide((8193, 131), 4096, outs), None, "63 rows an entry");
    assert_eq!(wide((8193, 128), 4104, outs), None);
    // Narrower than a warp's run: the second block has no outputs.
    let narrow = many_spread(8192, 128, 16, (768, &[8][..]));
    let grid = one_launch(&narrow, &h200()).map(|(_, grid, ..)| grid);
    assert_eq!(grid, Some([2, 192, 1]));
    // 16 rows an entry: as few as 50 tiles.
    assert!(plan(&down(64 * 16, 64, 16)).is_some());
    assert_eq!(plan(&down(48 * 16, 48, 16)), None);
    // A GB10's multiprocessor has no room for two blocks with the sums of two k blocks.
    assert!(one_launch(&down(8192, 128, 16), &gb10()).is_some());
    assert_eq!(one_launch(&gate_up(8192, 128, 16), &gb10()), None);

    let three_sites = many_spread(8192, 128, 16, (2048, &[768, 768, 768][..]));
    for params in [gate_up(8192, 128, 17), three_sites] {
        let kernel = plan(&params).map(|(kernel, ..)| kernel);
        let a_block_a_site = (params.site_count == 2).then_some(Kernel::DeltaRows32Of2048);
        assert_eq!(kernel, a_block_a_site, "{params:?}");
    }
}

proptest! {
    #[test]
    fn one_launch_of_few_spread_rows_has_all_outputs_and_fits_a_gb10(
        rows in 1_u32..600,
        entries in 1_u32..600,
        k_in in 1_u32..=256,
        widths in prop::collection::vec(1_u32..600, 1..=MAX_SITES),
    ) {
        let n_outs: Vec<u32> = widths.iter().map(|width| width * 8).collect();
        let mut params = few_spread(rows, entries, 16, (k_in * 8, &n_outs));
        params.max_tiles = params.max_tiles.min(rows);
        let Some(plan) = plan_delta_spread(&params, &gb10()) else {
            return Ok(());
        };
        let launch = plan.launch;
        // Two blocks a multiprocessor, of 10,496 bytes of their own each, and a kilobyte that the driver keeps.
        prop_assert!(2 * (launch.shared_bytes + 10_496 + 1024) <= GB10_SHARED + 1024, "{launch}");
        prop_assert_eq!(launch.grid[1], params.max_tiles);
        let mut end = 0;
        for (site, n_out) in n_outs.iter().enumerate() {
            end += n_out.div_ceil(plan.outputs);
            prop_assert_eq!(plan.block_ends[site], end);
        }
        prop_assert_eq!(launch.grid[0], end);
        // A block's outputs, in whole runs of a warp's, have room.
        let most = n_outs.iter().map(|n_out| plan.outputs.min(n_out.next_multiple_of(64))).max();
        prop_assert_eq!(most.map(|rows| rows * 32), Some(launch.shared_bytes));
    }

    #[test]
    fn one_launch_of_larger_tiles_has_all_outputs_and_two_blocks_fit(
        rows in 9_u32..70_000,
        entries in 1_u32..600,
        rank in 1_u32..=32,
        k_in in 1_u32..=520,
        widths in prop::collection::vec(1_u32..600, 1..=MAX_SITES),
        on_gb10: bool,
    ) {
        let n_outs: Vec<u32> = widths.iter().map(|width| width * 8).collect();
        let params = many_spread(rows, entries, rank, (k_in * 8, &n_outs));
        let caps = if on_gb10 { gb10() } else { h200() };
        let Some(plan) = plan_delta_spread(&params, &caps) else {
            return Ok(());
        };
        let launch = plan.launch;
        let (groups, sets) = match launch.kernel {
            Kernel::DeltaRows16
            | Kernel::DeltaHalves16
            | Kernel::DeltaCross16
            | Kernel::DeltaCross16Of4096 => (1, 1),
            Kernel::DeltaCross16Pair | Kernel::DeltaCross16PairOf4096 => (1, 2),
            _ => (2, 2),
        };
        prop_assert!(rank <= groups * 16);
        // The exchange of chunk sums, addresses of 128 rows, and a kilobyte that the driver keeps.
        let block = launch.shared_bytes + sets * 5120 + 128 * 16 + 1024;
        prop_assert!(2 * block <= caps.shared_bytes + 1024, "{launch}");
        prop_assert_eq!(launch.grid[1], params.max_tiles);
        prop_assert!(plan.outputs.is_multiple_of(8));
        // Blocks of the cluster that share a site, or blocks of the site.
        let sites = n_outs.len() as u32;
        let clusters = !matches!(
            launch.kernel,
            Kernel::DeltaRows16 | Kernel::DeltaRows32 | Kernel::DeltaRows32Of2048
        );
        for (site, n_out) in n_outs.iter().enumerate() {
            let before = if site == 0 { 0 } else { plan.block_ends[site - 1] };
            let blocks = if clusters { launch.grid[0] / sites } else { plan.block_ends[site] - before };
            prop_assert!(blocks * plan.outputs >= *n_out, "{launch}");
        }
    }
}
