use super::shrink::{EXCHANGE_BYTES, group_sets};
use super::*;
use crate::ProblemSite;
use crate::params::{FLAG_SPREAD, GroupParams, LARGE_TILE_ROWS};
use proptest::prelude::*;

mod spread;

/// Shared memory of a block of GB10, bytes.
const GB10_SHARED: u32 = 101_376;

fn gb10() -> DeviceCaps {
    DeviceCaps {
        name: "GB10".into(),
        units: 48,
        shared_bytes: GB10_SHARED,
        l2_bytes: 24 << 20,
        warpgroup_mma: false,
    }
}

fn params(problem: &Problem) -> DeltaParams {
    first_launch(problem)
}

#[test]
fn decode_gives_each_16_ranks_and_k_block_of_a_tile_a_block() {
    let problem = Problem::uniform(8, 8, 16, (4096, &[4096, 1024, 1024]));
    let plan = plan_delta(&params(&problem), &gb10());
    assert_eq!(plan.shrink.kernel, Kernel::ShrinkSmall);
    assert_eq!(plan.shrink.grid, [4, 3, 8]);
    assert_eq!(plan.shrink.shared_bytes, 0);
    assert_eq!(plan.shrink_shares, ShrinkShares::Sites([1, 2, 3, 3]));
    assert_eq!(plan.shrink_groups, 1);
    assert_eq!(plan.expand.kernel, Kernel::ExpandSmall16);
    assert_eq!(plan.expand.grid, [24, 8, 1]);
    assert_eq!(plan.block_ends, [16, 20, 24, 24]);
    // 8 rows of 16 ranks, BF16, no two rows on the same banks.
    assert_eq!(plan.expand.shared_bytes, 8 * 16 * 2);
}

fn h200() -> DeviceCaps {
    DeviceCaps {
        name: "H200".into(),
        units: 132,
        shared_bytes: 232_448,
        l2_bytes: 60 << 20,
        warpgroup_mma: true,
    }
}

#[test]
fn shrink_blocks_take_several_groups_of_ranks_where_that_leaves_enough_blocks() {
    let shrink = |rows, rank| {
        let problem = Problem::uniform(rows, rows, rank, (4096, &[4096]));
        let plan = plan_delta(&params(&problem), &h200());
        (plan.shrink.kernel, plan.shrink_groups, plan.shrink.grid)
    };
    assert_eq!(shrink(64, 64), (Kernel::ShrinkSmallRanks, 2, [4, 2, 64]));
    assert_eq!(shrink(128, 64), (Kernel::ShrinkSmallRanks, 4, [4, 1, 128]));
    assert_eq!(shrink(8, 64), (Kernel::ShrinkSmall, 1, [4, 4, 8]));
    assert_eq!(shrink(128, 16), (Kernel::ShrinkSmall, 1, [4, 1, 128]));
}

#[test]
fn expand_blocks_take_as_many_runs_as_end_soonest() {
    let runs = |rows, rank, n_outs: &[u32]| {
        let problem = Problem::uniform(rows, rows, rank, (4096, n_outs));
        plan_delta(&params(&problem), &h200()).expand_runs
    };
    assert_eq!(runs(1, 16, &[14336, 14336]), 1, "a wave has room for all");
    assert_eq!(runs(64, 16, &[4096]), 2, "half of two waves");
    assert_eq!(runs(64, 16, &[4096, 1024, 1024]), 3);
    assert_eq!(runs(64, 16, &[14336, 14336]), 6, "the most");
}

#[test]
fn shrink_blocks_of_a_moe_block_loop_where_more_tiles_may_be_than_two_waves() {
    let tiles = |rows, entries| {
        let mut params = params(&Problem::uniform(rows, entries, 16, (2048, &[768, 768])));
        params.flags = FLAG_SPREAD;
        params.tile_rows = SMALL_TILE_ROWS;
        params.max_tiles = crate::RowGroupsSpec::experts(rows, entries, 48).max_tiles();
        (
            params.max_tiles,
            plan_delta(&params, &h200()).shrink.grid[2],
        )
    };
    assert_eq!(tiles(8, 128), (8, 8));
    assert_eq!(tiles(512, 128), (176, 132), "a wave");
    assert_eq!(tiles(512, 512), (512, 264), "two");
}

#[test]
fn long_batches_take_the_kernels_for_both_kinds_of_tile() {
    let problem = Problem::uniform(4096, 4, 64, (4096, &[14336, 14336]));
    let plan = plan_delta(&params(&problem), &gb10());
    // Three stages of 128 rows and 64 ranks, half a chunk of k each.
    assert_eq!(plan.shrink.kernel, Kernel::ShrinkMixedLow);
    assert_eq!(plan.shrink.shared_bytes, 3 * (128 + 64) * 128);
    assert_eq!(plan.sum.unwrap().grid, [16, params(&problem).max_tiles, 2]);
    assert_eq!(plan.shrink_groups, 4);
    let ShrinkShares::KParts(parts) = plan.shrink_shares else {
        panic!("{:?}", plan.shrink_shares);
    };
    assert_eq!(plan.shrink.grid[0], parts * 2);
    assert_eq!(plan.expand.kernel, Kernel::ExpandMixed64);
    // Base elements of two times 16 rows and 256 outputs; 128 rows of 64 ranks, no four rows of a phase on the same banks.
    assert_eq!(plan.expand.shared_bytes, 2 * 16 * 256 * 2 + 128 * 80 * 2);
    assert_eq!(plan.expand_runs, 1);
    assert_eq!(plan.expand.grid[0], 2 * 14336 / 256);
}

#[test]
fn a_printed_plan_names_every_kernel() {
    let printed = |rows| plan(&Problem::uniform(rows, 1, 16, (4096, &[4096])), &gb10()).to_string();
    assert!(!printed(1).contains(Kernel::SumBlocks.symbol()));
    let long = printed(4096);
    let kernels = [
        Kernel::ShrinkMixedLow,
        Kernel::SumBlocks,
        Kernel::ExpandMixed16,
    ];
    let places = kernels.map(|kernel| long.find(kernel.symbol()).expect("named"));
    assert!(places.is_sorted(), "{long}");
}

#[test]
fn shared_memory_for_whole_chunks_is_used_where_there_is_so_much() {
    let problem = Problem::uniform(4096, 1, 64, (4096, &[4096, 1024, 1024]));
    let caps = DeviceCaps {
        warpgroup_mma: false,
        ..h200()
    };
    let plan = plan_delta(&params(&problem), &caps);
    assert_eq!(plan.shrink.kernel, Kernel::ShrinkMixed);
    assert_eq!(plan.shrink.shared_bytes, 3 * (128 + 96) * 256);
    // 32 tiles, twice 6 groups, and two parts of the k blocks: a block for all but 4 of 132 multiprocessors.
    assert_eq!(plan.shrink_groups, 6);
    assert_eq!(plan.shrink_shares, ShrinkShares::KParts(2));
    assert_eq!(plan.shrink.grid[0], 4);
}

#[test]
fn warpgroups_multiply_where_there_are_ranks_enough() {
    let plan = |rank, k_in, sites: &[u32], flags| {
        let mut params = params(&Problem::uniform(4096, 1, rank, (k_in, sites)));
        params.flags = flags;
        plan_delta(&params, &h200())
    };
    let shrink = |rank, k_in, sites: &[u32]| {
        let plan = plan(rank, k_in, sites, 0);
        (plan.shrink.kernel, plan.shrink_shares, plan.shrink.grid)
    };
    // 32 tiles and 4 k blocks.
    let qkv = shrink(64, 4096, &[4096, 1024, 1024]);
    assert_eq!(
        qkv,
        (
            Kernel::ShrinkWarpgroup192,
            ShrinkShares::RankSets(1),
            [128, 1, 1]
        )
    );
    let gate_up = shrink(64, 4096, &[14336, 14336]);
    assert_eq!(
        gate_up,
        (
            Kernel::ShrinkWarpgroup128,
            ShrinkShares::RankSets(1),
            [128, 1, 1]
        )
    );
    // 14 k blocks: seven halves a block.
    let down = shrink(64, 14336, &[4096]);
    assert_eq!(
        down,
        (
            Kernel::ShrinkWarpgroup64,
            ShrinkShares::RankSets(1),
            [128, 1, 1]
        )
    );
    let four = shrink(64, 4096, &[64; 4]);
    assert_eq!(
        four,
        (
            Kernel::ShrinkWarpgroup128,
            ShrinkShares::RankSets(2),
            [128, 1, 1]
        )
    );
    let wide = plan(64, 4096, &[4096, 1024, 1024], 0).shrink;
    let stage = 128 * (256 + 16) + 16 * (192 * 16 + 16);
    assert_eq!((wide.block, wide.shared_bytes), (512, 2 * stage));
    assert_eq!(shrink(16, 4096, &[64; 3]).0, Kernel::ShrinkMixed);
    let spread = plan(64, 4096, &[64], FLAG_SPREAD).shrink.kernel;
    assert_eq!(spread, Kernel::ShrinkMixed);
}

#[test]
fn groups_of_ranks_are_cut_into_few_equal_sets() {
    let sets = [
        (1, 1),
        (1, 2),
        (1, 3),
        (1, 4),
        (1, 6),
        (1, 6),
        (2, 4),
        (2, 4),
    ];
    for (groups, expected) in (1..).zip(sets) {
        assert_eq!(group_sets(groups), expected, "{groups} groups");
    }
    assert_eq!(group_sets(12), (2, 6));
    assert_eq!(group_sets(128), (22, 6));
}

#[test]
fn few_ranks_are_summed_by_few_blocks() {
    let slices = |rank| {
        let params = params(&Problem::uniform(4096, 1, rank, (4096, &[4096])));
        plan_delta(&params, &h200()).sum.unwrap().grid[0]
    };
    assert_eq!((slices(16), slices(48), slices(512)), (4, 16, 16));
}

#[test]
fn rows_that_are_not_16_byte_aligned_take_the_unaligned_shrink() {
    let aligned = params(&Problem::uniform(4, 1, 16, (4096, &[64])));
    let odd_width = params(&Problem::uniform(4, 1, 16, (4095, &[64])));
    let odd_stride = DeltaParams {
        x_stride: 4097,
        ..aligned
    };
    let odd_address = DeltaParams { x: 8, ..aligned };
    let shrink = |params: &DeltaParams| plan_delta(params, &gb10()).shrink;
    assert_eq!(shrink(&aligned).kernel, Kernel::ShrinkSmall);
    for params in [odd_width, odd_stride, odd_address] {
        assert_eq!(shrink(&params).kernel, Kernel::ShrinkUnaligned);
        assert_eq!(shrink(&params).shared_bytes, EXCHANGE_BYTES);
    }
}

#[test]
fn outs_that_are_not_16_byte_aligned_take_the_unaligned_expand() {
    let aligned = params(&Problem::uniform(4, 1, 16, (4096, &[64, 64])));
    let odd_width = params(&Problem::uniform(4, 1, 16, (4096, &[64, 65])));
    let mut odd_address = aligned;
    odd_address.sites[1].out = 2;
    let expand = |params: &DeltaParams| plan_delta(params, &gb10()).expand.kernel;
    assert_eq!(expand(&aligned), Kernel::ExpandSmall16);
    assert_eq!(expand(&odd_width), Kernel::ExpandAny);
    assert_eq!(expand(&odd_address), Kernel::ExpandAny);
}

#[test]
fn ranks_above_64_take_the_expand_for_any_rank_in_any_batch() {
    for rows in [1, 4096] {
        let plan = plan(&Problem::uniform(rows, 1, 65, (1024, &[1024])), &gb10());
        assert_eq!(plan.expand.kernel, Kernel::ExpandAny);
    }
}

#[test]
fn more_tiles_than_a_grid_is_high_are_looped_over() {
    let many = DeltaParams {
        max_tiles: MOST_GRID_YZ + 1,
        ..params(&Problem::uniform(8, 8, 16, (1024, &[1024])))
    };
    let plan = plan_delta(&many, &gb10());
    assert_eq!(plan.shrink.kernel, Kernel::ShrinkMixedLow);
    assert!(plan.shrink.grid[1] <= MOST_GRID_YZ);
    assert_eq!(plan.expand.kernel, Kernel::ExpandMixed16);
    assert_eq!(plan.expand.grid[1], MOST_GRID_YZ);
}

#[test]
fn many_rows_are_counted_in_shared_memory_with_a_pass_for_what_does_not_fit() {
    let group = |rows, slots| {
        let params = GroupParams {
            rows,
            slots,
            ..GroupParams::zeroed()
        };
        plan_group_rows(GroupSource::Slots, &params)
    };
    let counted = group(1025, 512);
    assert_eq!(counted.launch.kernel, Kernel::GroupManyRows);
    assert_eq!(
        (counted.launch.grid, counted.launch.block),
        ([8, 1, 1], 512)
    );
    assert_eq!(
        (counted.capacity, counted.launch.shared_bytes),
        (512, 512 * 52)
    );
    // Counts are sent four at a time.
    assert_eq!(group(1025, 5).capacity, 8);
    let many = group(1 << 24, 4096 * 512);
    assert_eq!(many.launch.grid, [8, 1, 1]);
    assert!(many.capacity < 4096 * 512 && many.launch.shared_bytes <= GB10_SHARED);
}

#[test]
fn spread_rows_pass_by_a_in_registers_where_ranks_or_rows_of_an_entry_are_few() {
    let kernel = |rank, rows, flags| {
        let mut params = params(&Problem::uniform(rows, 128, rank, (2048, &[768, 768])));
        params.flags = flags;
        plan_delta(&params, &gb10()).shrink.kernel
    };
    assert_eq!(kernel(16, 8192, FLAG_SPREAD), Kernel::ShrinkStreamed32);
    assert_eq!(kernel(32, 8192, FLAG_SPREAD), Kernel::ShrinkStreamed32);
    assert_eq!(kernel(33, 8193, FLAG_SPREAD), Kernel::ShrinkMixedLow);
    assert_eq!(kernel(64, 64 * 128, FLAG_SPREAD), Kernel::ShrinkStreamed32);
    assert_eq!(
        kernel(64, 64 * 128 + 1, FLAG_SPREAD),
        Kernel::ShrinkMixedLow
    );
    assert_eq!(kernel(65, 64 * 128, FLAG_SPREAD), Kernel::ShrinkMixedLow);
    assert_eq!(kernel(16, 8192, 0), Kernel::ShrinkMixedLow);
    assert_eq!(kernel(16, 256, FLAG_SPREAD), Kernel::ShrinkSmall);
}

#[test]
fn as_many_blocks_of_spread_rows_as_run_at_once_take_tiles_or_shares_of_them() {
    let plan = |entries, rank, sites: &[u32]| {
        let mut params = params(&Problem::uniform(8192, entries, rank, (2048, sites)));
        params.flags = FLAG_SPREAD;
        plan_delta(&params, &gb10())
    };
    // 96 blocks at once of 48 multiprocessors; two k blocks, one set of two sites' 16 ranks.
    let two_sites = plan(128, 16, &[768, 768]);
    assert_eq!(two_sites.shrink.grid, [2, 1, 48]);
    assert_eq!(two_sites.shrink.shared_bytes, 2 * 8 * 1024 * 2);
    assert_eq!(two_sites.shrink_shares, ShrinkShares::TileRows(1));
    assert_eq!(two_sites.sum, None);
    // 144 blocks at once; 8 entries have 64 full tiles and, about every other one, a tile more.
    let one_site = plan(8, 16, &[2048]);
    assert_eq!(one_site.shrink.kernel, Kernel::ShrinkStreamed16);
    assert_eq!(
        (one_site.shrink.grid, one_site.shrink_shares),
        ([2, 1, 68], ShrinkShares::TileRows(1))
    );
    let few_tiles = DeltaParams {
        max_tiles: 8,
        flags: FLAG_SPREAD,
        ..params(&Problem::uniform(1024, 8, 16, (1024, &[2048])))
    };
    let few_tiles = plan_delta(&few_tiles, &gb10());
    assert_eq!(
        (few_tiles.shrink.grid, few_tiles.shrink_shares),
        ([1, 1, 64], ShrinkShares::TileRows(8))
    );
}

#[test]
fn expand_blocks_of_spread_rows_are_as_long_as_end_soonest() {
    let h200 = DeviceCaps {
        units: 132,
        ..gb10()
    };
    let expand = |entries, rank, k_in, sites: &[u32]| {
        let mut params = params(&Problem::uniform(8192, entries, rank, (k_in, sites)));
        params.flags = FLAG_SPREAD;
        let plan = plan_delta(&params, &h200);
        (plan.expand.kernel, plan.expand_runs)
    };
    let gate_up = |entries, rank| expand(entries, rank, 2048, &[768, 768]);
    let down = |entries, rank| expand(entries, rank, 768, &[2048]);
    // 528 blocks at once: 512 tiles, a block each, are one wave.
    assert_eq!(gate_up(128, 16), (Kernel::ExpandSpread16, 2));
    assert_eq!(down(128, 16), (Kernel::ExpandSpread16, 2));
    assert_eq!(gate_up(512, 32), (Kernel::ExpandSpread32, 3));
    assert_eq!(down(512, 32), (Kernel::ExpandSpread32, 8));
    assert_eq!(down(512, 33).0, Kernel::ExpandMixed64);
    assert_eq!(expand(128, 16, 2048, &[767]).0, Kernel::ExpandAny);
    // 512 rows reach 324 entries of 512: a block a tile and site is one wave of 924.
    let few_rows = |entries, rank, k_in, sites: &[u32]| {
        let params = DeltaParams {
            tile_rows: SMALL_TILE_ROWS,
            max_tiles: 512,
            flags: FLAG_SPREAD,
            ..params(&Problem::uniform(512, entries, rank, (k_in, sites)))
        };
        let plan = plan_delta(&params, &h200);
        (plan.expand.kernel, plan.expand_runs)
    };
    let spread_small = Kernel::ExpandSpreadSmall16;
    assert_eq!(few_rows(512, 16, 2048, &[768, 768]), (spread_small, 3));
    assert_eq!(few_rows(512, 16, 768, &[2048]), (spread_small, 4));
    assert_eq!(
        few_rows(512, 32, 768, &[2048]).0,
        Kernel::ExpandSpreadSmall32
    );
    assert_eq!(few_rows(512, 33, 768, &[2048]).0, Kernel::ExpandSmall64);
    assert_eq!(few_rows(128, 16, 768, &[2048]).0, Kernel::ExpandSmall16);
    // Where x is not aligned, a kernel of its own adds the k blocks up.
    assert_eq!(expand(128, 16, 2047, &[768]).0, Kernel::ExpandMixed16);
}

#[test]
fn sites_beyond_one_launch_count_as_further_launches() {
    let plan = plan(&Problem::uniform(9000, 3, 16, (4096, &[64; 5])), &gb10());
    assert_eq!(plan.launches, 2 * 2);
    assert_eq!(plan.shrink.kernel, Kernel::ShrinkMixedLow);
}

fn problems() -> impl Strategy<Value = Problem> {
    let site = (1_u32..40_000, 1_u32..=512);
    (
        1_u32..70_000,
        1_u32..600,
        1_u32..40_000,
        prop::collection::vec(site, 1..=MAX_SITES),
    )
        .prop_map(|(rows, adapters, k_in, sites)| {
            let mut problem = Problem::uniform(rows, adapters, 1, (k_in, &[]));
            let groups = problem.groups.len();
            let site = |(n_out, rank)| ProblemSite {
                n_out,
                max_rank: lora_weights::padded_rank(rank),
                ranks: vec![rank; groups],
            };
            problem.sites = sites.into_iter().map(site).collect();
            problem
        })
}

proptest! {
    #[test]
    fn warpgroups_take_all_ranks_and_fit_an_h200(problem in problems()) {
        let plan = plan_delta(&params(&problem), &h200());
        // What a block of the widest has besides.
        let fixed = 8960;
        prop_assert!(plan.shrink.shared_bytes + fixed <= h200().shared_bytes, "{}", plan.shrink);
        prop_assert!(plan.shrink.grid.iter().all(|&blocks| blocks > 0), "{}", plan.shrink);
        if let ShrinkShares::RankSets(sets) = plan.shrink_shares {
            let all: u32 = problem.sites.iter().map(|site| site.max_rank / 16).sum();
            prop_assert!(sets * plan.shrink_groups >= all, "{}", plan.shrink);
            prop_assert!(plan.shrink.grid[0] <= h200().units, "{}", plan.shrink);
        }
    }

    #[test]
    fn every_launch_fits_a_gb10(problem in problems(), slots in 1_u32..1 << 21, rows in 1_u32..1 << 24, flags in prop::sample::select(vec![0, FLAG_SPREAD])) {
        let mut params = params(&problem);
        params.flags = flags;
        let plan = plan_delta(&params, &gb10());
        let group = plan_group_rows(GroupSource::Experts, &GroupParams { rows, slots, ..GroupParams::zeroed() });
        for launch in [plan.shrink, plan.expand, group.launch] {
            prop_assert!(launch.shared_bytes <= GB10_SHARED, "{launch}");
            prop_assert!(launch.block <= 1024 && launch.block.is_multiple_of(32), "{launch}");
            prop_assert!(launch.grid.iter().all(|&blocks| blocks > 0), "{launch}");
            prop_assert!(launch.grid[1] <= MOST_GRID_YZ && launch.grid[2] <= MOST_GRID_YZ, "{launch}");
        }
        // Every 16 ranks of a site, and every 256 outputs, are in some block.
        let all: u32 = problem.sites.iter().map(|site| site.max_rank / 16).sum();
        match plan.shrink_shares {
            ShrinkShares::KParts(parts) => {
                prop_assert!(plan.shrink.grid[0] / parts * plan.shrink_groups >= all, "{}", plan.shrink);
                prop_assert!((1..=params.k_blocks).contains(&parts));
            }
            ShrinkShares::TileRows(_) => {
                let groups_a_block = if plan.shrink.kernel == Kernel::ShrinkStreamed16 { 1 } else { 2 };
                prop_assert_eq!(plan.shrink.grid[1], all.div_ceil(groups_a_block));
            }
            ShrinkShares::Sites(ends) => {
                let groups: u32 = problem.sites.iter().map(|site| (site.max_rank / 16).div_ceil(plan.shrink_groups)).sum();
                prop_assert_eq!(plan.shrink.grid[1], groups);
                prop_assert_eq!(ends[MAX_SITES - 1], groups);
            }
            ShrinkShares::RankSets(_) => prop_assert!(false, "a GB10 has no such kernel: {}", plan.shrink),
        }
        let outputs = |site: &ProblemSite| site.n_out.div_ceil(256 * plan.expand_runs);
        let blocks: u32 = problem.sites.iter().map(outputs).sum();
        prop_assert_eq!(plan.expand.grid[0], blocks);
    }
}

#[test]
fn rows_that_a_block_has_threads_for_are_sorted_or_tallied() {
    let plan = |rows, slots| {
        let params = GroupParams {
            rows,
            slots,
            ..GroupParams::zeroed()
        };
        let plan = plan_group_rows(GroupSource::Experts, &params);
        assert_eq!(plan.launch.kernel, Kernel::GroupExperts);
        assert_eq!(plan.launch.grid, [1, 1, 1]);
        (plan.launch.block, plan.launch.shared_bytes, plan.capacity)
    };
    for (rows, threads) in [(1, 32), (33, 64), (64, 64), (512, 512), (1024, 1024)] {
        assert_eq!(plan(rows, 4096 * 512), (threads, 0, 0));
    }
    assert_eq!(plan(64, 128), (64, 0, 0));
    assert_eq!(plan(65, 127), (128, 4 * 127 * 2, 127));
    assert_eq!(plan(512, 2560), (512, 80 * 1024, 2560));
    assert_eq!(plan(512, 2561), (512, 0, 0));
}

#[test]
fn rows_that_choose_at_random_miss_some_entries() {
    assert_eq!(entries_hit(512, 512), 324);
    assert_eq!(entries_hit(128, 8192), 128);
    assert_eq!(entries_hit(128, 1), 1);
    assert_eq!(entries_hit(1, 1 << 24), 1);
    assert_eq!(entries_hit(0, 0), 0);
    assert!(entries_hit(1 << 21, 1 << 24) <= 1 << 21);
}
