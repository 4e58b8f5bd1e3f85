// Shrink over large tiles: a block takes up to 128 rows of x, up to 96 ranks, of several sites where they have fewer, and a part of the k blocks.
//
// x and A pass through shared memory in asynchronous stages. A warp owns some of the ranks and of the rows for the whole block, so that chunk sums never leave
// its registers and what it reads from shared memory serves several MMAs. It reads the operands of the next 32 k while it multiplies these, and asks for a
// later stage in between: with one block of 8 warps a multiprocessor nobody else fills the time that one of those would otherwise wait.
//
// A kernel between this one and expand adds the k blocks up, since expand's blocks are many; of a small tile each expand block does that itself, which is
// quicker.
#pragma once

#include "shrink.cuh"

constexpr int kSetGroups = kShrinkSetRanks / kRankGranule;

// The k blocks that a block takes of a large tile.
struct KPart {
    uint32_t first;
    uint32_t count;
};

__device__ __forceinline__ KPart part_of(const DeltaParams& p, uint32_t parts) {
    const uint32_t most = (p.k_blocks + parts - 1) / parts;
    const uint32_t first = min(blockIdx.x % parts * most, p.k_blocks);
    return KPart{first, min(most, p.k_blocks - first)};
}

// A block's part of a large tile, for `kGroups` groups of 16 ranks, `kStageK` columns a stage.
template <int kGroups, int kStageK>
struct TiledShrink {
    static constexpr int kSteps = kStageK / 32;
    static constexpr int kRowBytes = kStageK * 2;
    static constexpr int kRowPieces = kRowBytes / 16;
    static constexpr int kStageRows = kLargeTileRows + kGroups * kRankGranule;
    static constexpr int kStageBytes = kStageRows * kRowBytes;
    static constexpr int kStagesAChunk = kChunkK / kStageK;
    static constexpr int kStagesABlock = kBlockK / kStageK;

    // Rows of a stage that the block's threads copy at a time.
    static constexpr int kRowsATurn = kShrinkThreads / kRowPieces;
    static constexpr int kXTurns = kLargeTileRows / kRowsATurn;
    static constexpr int kTurns = (kStageRows + kRowsATurn - 1) / kRowsATurn;

    static constexpr int kGroupsAWarp = kGroups < 4 ? kGroups : kGroups / 2;
    static constexpr int kWarpsAcross = kGroups / kGroupsAWarp;
    static constexpr int kRowsAWarp = kLargeTileRows * kWarpsAcross / kShrinkWarps;
    static constexpr int kColumns = kRowsAWarp / 8;

    using Sums = float[kGroupsAWarp][kColumns][4];

    // The operands of 32 k.
    struct Fragments {
        uint4 x[kColumns];
        uint4 low[kGroupsAWarp];
        uint4 high[kGroupsAWarp];
    };

    const DeltaParams& p;
    const GroupSet<kSetGroups>& set;
    const Tile& tile;
    char* stages;
    const __nv_bfloat16* const* rows;  // of x, then of A

    __device__ __forceinline__ static uint32_t slot_after(uint32_t slot) { return slot + 1 == kShrinkStages ? 0 : slot + 1; }

    // Asks for the stage of columns `k` and on. Rows past the tile's last one are left as they are: their sums are not stored.
    __device__ __forceinline__ void copy_stage(uint32_t k, uint32_t slot) const {
        const uint32_t piece = threadIdx.x % kRowPieces;
        const uint32_t first = threadIdx.x / kRowPieces;
        const bool inside = k + piece * 8 < p.k_in;
        const uint32_t at = inside ? k + piece * 8 : 0;
        const int x_turns = (tile.count + kRowsATurn - 1) / kRowsATurn;
        char* const to = stages + slot * kStageBytes + stage_offset<kRowBytes>(first, piece);
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const uint32_t row = turn * kRowsATurn + first;
            if ((turn >= x_turns && turn < kXTurns) || (kStageRows % kRowsATurn != 0 && row >= kStageRows)) continue;
            copy_async16(to + turn * kRowsATurn * kRowBytes, rows[row] + at, inside);
        }
    }

    // The k blocks `part` one after the other, without a break in the copies.
    __device__ __forceinline__ void run(const KPart& part, const Lane& lane) const {
        const uint32_t first_group = lane.warp % kWarpsAcross * kGroupsAWarp;
        const uint32_t first_row = lane.warp / kWarpsAcross * kRowsAWarp;
        const bool active = first_row < tile.count;
        const uint32_t k = part.first * kBlockK;
        const uint32_t chunks = (min(p.k_in - k, part.count * kBlockK) + kChunkK - 1) / kChunkK;
        const uint32_t total = chunks * kStagesAChunk;
        // Rows are multiples of 8 from the lane's own, so that all have its parity and one offset serves them.
        const char* const x_rows = stages + first_row * kRowBytes;
        const char* const a_rows = stages + (kLargeTileRows + first_group * kRankGranule) * kRowBytes;
        uint32_t asked = 0, asked_slot = 0, slot = 0;
        const auto ask_next = [&] {
            if (asked < total) copy_stage(k + asked * kStageK, asked_slot);
            copy_async_commit();
            ++asked;
            asked_slot = slot_after(asked_slot);
        };
#pragma unroll 1
        for (int i = 0; i < kShrinkStages - 1; ++i) ask_next();
        Fragments fragments[2];
        const auto load = [&](Fragments& to, int step) {
            const uint32_t at = slot * kStageBytes + stage_offset<kRowBytes>(lane.group, step * 4 + lane.quarter);
#pragma unroll
            for (int column = 0; column < kColumns; ++column) to.x[column] = *reinterpret_cast<const uint4*>(x_rows + at + column * 8 * kRowBytes);
#pragma unroll
            for (int g = 0; g < kGroupsAWarp; ++g) {
                to.low[g] = *reinterpret_cast<const uint4*>(a_rows + at + g * kRankGranule * kRowBytes);
                to.high[g] = *reinterpret_cast<const uint4*>(a_rows + at + (g * kRankGranule + 8) * kRowBytes);
            }
        };
        copy_async_wait<kShrinkStages - 2>();
        __syncthreads();
        load(fragments[0], 0);
        uint32_t stage = 0;
#pragma unroll 1
        while (stage < total) {
            const uint32_t block_end = min(stage + kStagesABlock, total);
            Sums block_sum = {};
#pragma unroll 1
            while (stage < block_end) {
                Sums sum = {};
#pragma unroll 1
                for (int i = 0; i < kStagesAChunk; ++i, ++stage) {
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        if (step == kSteps - 1) {
                            copy_async_wait<kShrinkStages - 2>();
                            __syncthreads();
                            slot = slot_after(slot);
                        }
                        load(fragments[(step + 1) % 2], (step + 1) % kSteps);
                        // Over the stage before this one, whose operands every warp has read.
                        if (step == 0) ask_next();
                        if (active) multiply(sum, fragments[step % 2]);
                    }
                }
                add(block_sum, sum);
            }
            if (active) store(part.first + (stage - 1) / kStagesABlock, block_sum, first_group, first_row, lane);
        }
    }

    __device__ __forceinline__ static void multiply(Sums& sum, const Fragments& f) {
#pragma unroll
        for (int g = 0; g < kGroupsAWarp; ++g) {
            const uint4 first = in_mma_order(f.low[g].x, f.high[g].x, f.low[g].y, f.high[g].y);
            const uint4 second = in_mma_order(f.low[g].z, f.high[g].z, f.low[g].w, f.high[g].w);
#pragma unroll
            for (int column = 0; column < kColumns; ++column) mma_16x8x16(sum[g][column], first, f.x[column].x, f.x[column].y);
#pragma unroll
            for (int column = 0; column < kColumns; ++column) mma_16x8x16(sum[g][column], second, f.x[column].z, f.x[column].w);
        }
    }

    __device__ __forceinline__ static void add(Sums& total, const Sums& sum) {
#pragma unroll
        for (int g = 0; g < kGroupsAWarp; ++g) {
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
#pragma unroll
                for (int i = 0; i < 4; ++i) total[g][column][i] += sum[g][column][i];
            }
        }
    }

    __device__ __forceinline__ void store(uint32_t k_block, const Sums& sum, uint32_t first_group, uint32_t first_row, const Lane& lane) const {
#pragma unroll
        for (int g = 0; g < kGroupsAWarp; ++g) {
            const uint32_t group = first_group + g;
            if (set.adapter[group].rank == 0) continue;
            const DeltaSite& site = p.sites[set.work[group].site];
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const uint32_t row = first_row + column * 8 + 2 * lane.quarter + odd;
                    if (row >= tile.count) continue;
                    float* to = partials_at(p, site, k_block, tile.first + row) + set.work[group].first_rank + lane.group;
                    to[0] = sum[g][column][odd];
                    to[8] = sum[g][column][odd + 2];
                }
            }
        }
    }
};

// A set's groups one after the other, 8 rows at a time.
template <bool kAligned>
__device__ __forceinline__ void shrink_groups(const DeltaParams& p, const GroupSet<kSetGroups>& set, int groups, uint32_t k_block,
                                              const Tile& tile, const __nv_bfloat16* row, float* exchange) {
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
        const Adapter adapter = set.adapter[group];
        if (adapter.rank == 0) continue;
        const Lane lane = lane_of_thread();
        const ShrinkWork work{k_block, set.work[group].first_rank, set.work[group].site};
        WeightChunk<kAligned> a;
        a.load(adapter, work.first_rank, k_block * kBlockK + lane.warp * kChunkK, p.k_in, lane);
        shrink_rows8<kAligned, false>(p, p.sites[work.site], work, tile, a, row, exchange);
    }
}

// Tiles of both kinds. A block takes the `index`th part of `parts` of the k blocks, for the `index / parts`th set of `set_groups` groups, `index` being its x
// in the grid. Without 16-byte aligned rows (`kAligned` false) large tiles are taken 8 rows at a time.
template <bool kAligned, int kStageK>
__device__ __forceinline__ void shrink_mixed(const DeltaParams& p, uint32_t parts, uint32_t set_groups) {
    extern __shared__ __align__(128) char shared[];
    __shared__ const __nv_bfloat16* rows[kLargeTileRows + kShrinkSetRanks];
    __shared__ GroupSet<kSetGroups> set;
    __shared__ Tile tile;  // not in registers, which the sums need
    const Lane lane = lane_of_thread();
    begin_late(p);
    for (uint32_t index = blockIdx.y; index < tile_total(p); index += gridDim.y) {
        const Tile own = tile_at(p, index);
        if (!tile_in_pass(p, own) || part_of(p, parts).count == 0) continue;
        __syncthreads();
        if (threadIdx.x == 0) tile = own;
        if (threadIdx.x < kLargeTileRows) {
            rows[threadIdx.x] = x_pointer(p, own, threadIdx.x);
        } else if (threadIdx.x < kLargeTileRows + set_groups * kRankGranule) {
            rows[threadIdx.x] = set.find(p, own.entry, blockIdx.x / parts * set_groups, threadIdx.x - kLargeTileRows);
        }
        __syncthreads();
        const int groups = set.count(set_groups);
        if (groups == 0) continue;
        wait_late();
        const KPart part = part_of(p, parts);
        if (!kAligned || tile.count <= kSmallTileRows) {
            for (uint32_t i = 0; i < part.count; ++i) {
                shrink_groups<kAligned>(p, set, groups, part.first + i, tile, rows[lane.group], reinterpret_cast<float*>(shared));
            }
        } else if (groups == 1) {
            TiledShrink<1, kStageK>{p, set, tile, shared, rows}.run(part, lane);
        } else if (groups == 2) {
            TiledShrink<2, kStageK>{p, set, tile, shared, rows}.run(part, lane);
        } else if (groups == 3) {
            TiledShrink<3, kStageK>{p, set, tile, shared, rows}.run(part, lane);
        } else if (groups == 4) {
            TiledShrink<4, kStageK>{p, set, tile, shared, rows}.run(part, lane);
        } else {
            TiledShrink<kSetGroups, kStageK>{p, set, tile, shared, rows}.run(part, lane);
        }
    }
    wait_late();
}

constexpr int kSumAhead = 8;

// `x @ A^T` of large tiles: a block takes some rows of a tile at one site. Slices of a tile; tiles; sites.
__device__ __forceinline__ void sum_blocks(const DeltaParams& p) {
    const DeltaSite& site = p.sites[blockIdx.z];
    begin(p);
    for (uint32_t index = blockIdx.y; index < tile_total(p); index += gridDim.y) {
        const Tile tile = tile_at(p, index);
        const uint32_t rows = (kLargeTileRows + gridDim.x - 1) / gridDim.x;
        const uint32_t first = blockIdx.x * rows;
        if (tile.count <= kSmallTileRows || first >= tile.count || !tile_in_pass(p, tile)) continue;
        const uint32_t quads = padded_rank(adapter_of<Factor::kA>(p, site, tile.entry).rank) / 4;
        // Whether a line of block sums is read by neighbouring threads, and by no others.
        const bool whole_lines = (site.partials | site.max_rank * sizeof(float) | quads * sizeof(uint4)) % kLineBytes == 0;
        wait_for_predecessor();
        for (uint32_t item = threadIdx.x; item < min(tile.count - first, rows) * quads; item += kSumThreads) {
            const uint32_t position = tile.first + first + item / quads;
            const uint32_t rank = item % quads * 4;
            XaSum<kSumAhead> sum;
            sum.ask(p, site, position, rank, true);
            *reinterpret_cast<uint2*>(xa_at(p, site, position) + rank) = sum.finish(p);
            if (whole_lines) {
                constexpr uint32_t kThreads = kLineBytes / sizeof(uint4);
                __syncwarp(((1u << kThreads) - 1) << threadIdx.x % 32 / kThreads * kThreads);
                if (threadIdx.x % kThreads == 0) sum.drop(p);
            }
        }
    }
    wait_for_predecessor();
}
