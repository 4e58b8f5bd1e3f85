// Shrink: partial sums of `x @ A^T`, one set for each block of 1024 k.
//
// The canonical order of summation, which every path follows so that a row's bits never depend on the path: k is cut into
// blocks of 1024 and those into chunks of 128. A chunk is eight m16n8k16 MMAs in order, onto sums that start at zero; chunk
// sums are added in order to a block's sum; the expand kernel adds block sums in order. A is always the MMA's 16-row operand
// and the rows of x its 8 columns. Inside 32 consecutive k, lane quarter t of both operands takes the 8 elements 8t..8t+7, so
// that a fragment is one 16-byte load: the first MMA of the two gets elements 0..3 of each lane, the second 4..7.
//
// Small tiles (up to 8 rows): each of a block's 8 warps holds one chunk of 16 rank rows in registers, straight from global memory;
// the chunk sums meet in shared memory. The work is reading A once; the loads are issued before the wait for the predecessor.
// Large tiles (up to 64 rows): chunks of x and of A pass through shared memory in three asynchronous stages; a warp owns 16 rank rows
// and some of the x rows for the whole block, so chunk sums never leave its registers. The last of a tile's k blocks to arrive adds all
// of them up, in order, for the expand kernel, whose blocks are many; of a small tile each expand block does that itself, which is quicker.
#pragma once

#include "primitives.cuh"
#include "tile.cuh"

constexpr int kShrinkThreads = 256;
constexpr int kShrinkWarps = kShrinkThreads / 32;
constexpr int kChunkSteps = kChunkK / 32;
constexpr int kChunksPerBlock = kBlockK / kChunkK;
static_assert(kChunksPerBlock == kShrinkWarps);

// Pitch, in floats, of one row's 16 ranks in the exchange of chunk sums: conflict-free for the MMA's output layout.
constexpr int kExchangePitch = kRankGranule + 4;
constexpr int kExchangeFloats = kShrinkWarps * kSmallTileRows * kExchangePitch;

constexpr int kStages = 3;
constexpr int kChunkBytes = kChunkK * 2;
constexpr int kMaxTiledGroups = kRanksABlock / kRankGranule;

struct Lane {
    uint32_t warp;
    uint32_t group;    // row of A, column of x, row of the result
    uint32_t quarter;  // which 8 of 32 k; which two columns of the result
};

__device__ __forceinline__ Lane lane_of_thread() {
    return Lane{threadIdx.x / 32, (threadIdx.x % 32) / 4, threadIdx.x % 4};
}

// 8 consecutive elements from `k` on of a row of `k_in`, zeros past its end. Not for weights alone: through the coherent path, since x
// may have been written by the predecessor.
template <bool kAligned, bool kWeights>
__device__ __forceinline__ uint4 load_row8(const __nv_bfloat16* row, uint32_t k, uint32_t k_in) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (kAligned) {
        if (k < k_in) {
            v = kWeights ? load_weights16(row + k) : __ldcg(reinterpret_cast<const uint4*>(row + k));
        }
        return v;
    }
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(row);
    uint32_t* words = reinterpret_cast<uint32_t*>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t at = k + 2 * i;
        const uint32_t low = at < k_in ? __ldcg(bits + at) : 0;
        const uint32_t high = at + 1 < k_in ? __ldcg(bits + at + 1) : 0;
        words[i] = low | high << 16;
    }
    return v;
}

__device__ __forceinline__ void mma_pair(float (&sum)[4], const uint4& low, const uint4& high, const uint4& x) {
    mma_16x8x16(sum, low.x, high.x, low.y, high.y, x.x, x.y);
    mma_16x8x16(sum, low.z, high.z, low.w, high.w, x.z, x.w);
}

// What a block of the grid works on.
struct ShrinkWork {
    uint32_t k_block;
    uint32_t first_rank;
    uint32_t site;
};

template <int kGroups>
__device__ __forceinline__ ShrinkWork shrink_work(const DeltaParams& p) {
    const uint32_t groups = gridDim.x / (p.k_blocks * p.site_count);
    const uint32_t rest = blockIdx.x / p.k_blocks;
    return ShrinkWork{blockIdx.x % p.k_blocks, rest % groups * kGroups * kRankGranule, rest / groups};
}

// One chunk of 16 rows of A, from row `first_rank` on; rows at or past the true rank are zeros and are not read.
template <bool kAligned>
struct WeightChunk {
    uint4 low[kChunkSteps];
    uint4 high[kChunkSteps];

    __device__ __forceinline__ void load(const Adapter& adapter, uint32_t first_rank, uint32_t k, uint32_t k_in,
                                         const Lane& lane) {
        const uint32_t row = first_rank + lane.group;
        const __nv_bfloat16* a = adapter.matrix + uint64_t(row) * k_in;
        const __nv_bfloat16* a8 = a + uint64_t(8) * k_in;
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
            const uint32_t at = k + step * 32 + lane.quarter * 8;
            low[step] = row < adapter.rank ? load_row8<kAligned, true>(a, at, k_in) : make_uint4(0, 0, 0, 0);
            high[step] = row + 8 < adapter.rank ? load_row8<kAligned, true>(a8, at, k_in) : make_uint4(0, 0, 0, 0);
        }
    }
};

// x row of `position`, null where there is none.
__device__ __forceinline__ const __nv_bfloat16* x_pointer(const DeltaParams& p, const Tile& tile, uint32_t index) {
    if (index >= tile.count) return nullptr;
    const uint32_t row = x_row(p, out_row(p, tile.first + index));
    if (row >= p.x_row_count) return nullptr;
    return reinterpret_cast<const __nv_bfloat16*>(p.x) + uint64_t(row) * p.x_stride;
}

// Adds the warps' chunk sums in order and writes the block's sums of up to 8 rows.
__device__ __forceinline__ void exchange_and_store(const DeltaParams& p, const DeltaSite& site, const ShrinkWork& work,
                                                   uint32_t first_position, uint32_t rows, const float (&sum)[4],
                                                   float* exchange, const Lane& lane) {
    float* mine = exchange + (lane.warp * kSmallTileRows + 2 * lane.quarter) * kExchangePitch + lane.group;
    mine[0] = sum[0];
    mine[kExchangePitch] = sum[1];
    mine[8] = sum[2];
    mine[kExchangePitch + 8] = sum[3];
    __syncthreads();
    const uint32_t row = threadIdx.x / kRankGranule;
    const uint32_t rank = threadIdx.x % kRankGranule;
    if (row < rows) {
        const uint32_t chunks = min(uint32_t(kChunksPerBlock), (p.k_in - work.k_block * kBlockK + kChunkK - 1) / kChunkK);
        const float* from = exchange + row * kExchangePitch + rank;
        float total = from[0];
        for (uint32_t chunk = 1; chunk < chunks; ++chunk) total += from[chunk * kSmallTileRows * kExchangePitch];
        partials_at(p, site, work.k_block, first_position + row)[work.first_rank + rank] = total;
    }
    __syncthreads();
}

template <bool kAligned>
__device__ __forceinline__ void shrink_rows8(const DeltaParams& p, const DeltaSite& site, const ShrinkWork& work,
                                             const Tile& tile, const WeightChunk<kAligned>& a, float* exchange,
                                             const Lane& lane) {
    const uint32_t k = work.k_block * kBlockK + lane.warp * kChunkK;
    for (uint32_t first = 0; first < tile.count; first += kSmallTileRows) {
        const __nv_bfloat16* row = x_pointer(p, tile, first + lane.group);
        uint4 x[kChunkSteps];
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
            x[step] = row != nullptr ? load_row8<kAligned, false>(row, k + step * 32 + lane.quarter * 8, p.k_in)
                                     : make_uint4(0, 0, 0, 0);
        }
        float sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) mma_pair(sum, a.low[step], a.high[step], x[step]);
        exchange_and_store(p, site, work, tile.first + first, min(tile.count - first, uint32_t(kSmallTileRows)), sum,
                           exchange, lane);
    }
}

// Byte offset of 16-byte piece `piece` of row `row` of a stage; odd rows have their 64-byte halves swapped, so that the eight lanes of a
// phase, four of each of two rows, hit all banks once.
__device__ __forceinline__ uint32_t stage_offset(uint32_t row, uint32_t piece) {
    return row * kChunkBytes + ((piece ^ ((row & 1) << 2)) << 4);
}

template <int kGroups>
struct TiledShrink {
    static constexpr int kARows = kGroups * kRankGranule;
    static constexpr int kStageBytes = (kLargeTileRows + kARows) * kChunkBytes;
    static constexpr int kRowsPerWarp = kLargeTileRows * kGroups / kShrinkWarps;
    static constexpr int kColumns = kRowsPerWarp / 8;

    const DeltaParams& p;
    const Adapter& adapter;
    const ShrinkWork& work;
    const __nv_bfloat16* const* x_rows;
    char* stages;

    __device__ __forceinline__ void copy_chunk(uint32_t chunk) const {
        char* stage = stages + chunk % kStages * kStageBytes;
        const uint32_t k = work.k_block * kBlockK + chunk * kChunkK;
        const uint32_t piece = threadIdx.x % 16;
        const uint32_t at = k + piece * 8;
        const bool inside = at < p.k_in;
#pragma unroll
        for (int i = 0; i < kLargeTileRows / 16; ++i) {
            const uint32_t row = i * 16 + threadIdx.x / 16;
            const __nv_bfloat16* from = x_rows[row];
            const bool present = inside && from != nullptr;
            copy_async16(stage + stage_offset(row, piece), present ? from + at : reinterpret_cast<const __nv_bfloat16*>(p.x),
                         present ? 16 : 0);
        }
        char* a_stage = stage + kLargeTileRows * kChunkBytes;
#pragma unroll
        for (int i = 0; i < kARows / 16; ++i) {
            const uint32_t row = i * 16 + threadIdx.x / 16;
            const uint32_t rank = work.first_rank + row;
            const bool present = inside && rank < adapter.rank;
            copy_async16(a_stage + stage_offset(row, piece),
                         present ? adapter.matrix + uint64_t(rank) * p.k_in + at : adapter.matrix, present ? 16 : 0);
        }
    }

    __device__ __forceinline__ void run(const DeltaSite& site, const Tile& tile, const Lane& lane) const {
        const uint32_t chunks = min(uint32_t(kChunksPerBlock), (p.k_in - work.k_block * kBlockK + kChunkK - 1) / kChunkK);
        const uint32_t rank_row = lane.warp % kGroups * kRankGranule + lane.group;
        const uint32_t first = lane.warp / kGroups * kRowsPerWarp;
        float block_sum[kColumns][4];
#pragma unroll 1
        for (int stage = 0; stage < kStages - 1; ++stage) {
            if (stage < chunks) copy_chunk(stage);
            copy_async_commit();
        }
        for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
            copy_async_wait<kStages - 2>();
            __syncthreads();
            if (chunk + kStages - 1 < chunks) copy_chunk(chunk + kStages - 1);
            copy_async_commit();
            const char* stage = stages + chunk % kStages * kStageBytes;
            float sum[kColumns][4] = {};
#pragma unroll 2
            for (int step = 0; step < kChunkSteps; ++step) {
                const uint32_t piece = step * 4 + lane.quarter;
                const char* a_stage = stage + kLargeTileRows * kChunkBytes;
                const uint4 low = *reinterpret_cast<const uint4*>(a_stage + stage_offset(rank_row, piece));
                const uint4 high = *reinterpret_cast<const uint4*>(a_stage + stage_offset(rank_row + 8, piece));
#pragma unroll
                for (int column = 0; column < kColumns; ++column) {
                    const uint32_t row = first + column * 8 + lane.group;
                    mma_pair(sum[column], low, high, *reinterpret_cast<const uint4*>(stage + stage_offset(row, piece)));
                }
            }
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    block_sum[column][i] = chunk == 0 ? sum[column][i] : block_sum[column][i] + sum[column][i];
                }
            }
        }
        copy_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const uint32_t row = first + column * 8 + 2 * lane.quarter + odd;
                if (row >= tile.count) continue;
                float* to = partials_at(p, site, work.k_block, tile.first + row) + work.first_rank + rank_row;
                to[0] = block_sum[column][odd];
                to[8] = block_sum[column][odd + 2];
            }
        }
    }
};

// Called by all threads once a block's partial sums of a large tile are stored: the last k block to arrive finishes the tile.
__device__ __forceinline__ void finish_large_tile(const DeltaParams& p, const DeltaSite& site, const ShrinkWork& work,
                                                  const Tile& tile, uint32_t ranks) {
    __shared__ bool last;
    const uint32_t rank_blocks = (site.max_rank + kRanksABlock - 1) / kRanksABlock;
    const uint32_t place = (tile.first - p.pass_first) / kSmallTileRows;
    const uint64_t tiles = p.pass_rows / kSmallTileRows + 1;
    uint32_t* counter = reinterpret_cast<uint32_t*>(p.counters) +
                        (work.site * rank_blocks + work.first_rank / kRanksABlock) * tiles + place;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1u) + 1 == p.k_blocks;
        if (last) *counter = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    const uint32_t quads = (ranks + kRankGranule - 1) / kRankGranule * (kRankGranule / 4);
    for (uint32_t item = threadIdx.x; item < tile.count * quads; item += kShrinkThreads) {
        const uint32_t position = tile.first + item / quads;
        const uint32_t rank = work.first_rank + item % quads * 4;
        *reinterpret_cast<uint2*>(xa_at(p, site, position) + rank) = finish_xa(p, site, position, rank);
    }
}

// Tiles of up to 8 rows, 16 ranks a block.
__device__ __forceinline__ void shrink_small(const DeltaParams& p) {
    __shared__ float exchange[kExchangeFloats];
    const Lane lane = lane_of_thread();
    const ShrinkWork work = shrink_work<1>(p);
    const DeltaSite& site = p.sites[work.site];
    bool waited = (p.flags & kFlagTilesReady) == 0;
    if (waited) wait_for_predecessor();
    const uint32_t total = tile_total(p);
    for (uint32_t index = blockIdx.y; index < total; index += gridDim.y) {
        const Tile tile = tile_at(p, index);
        const Adapter adapter = adapter_of<Factor::kA>(p, site, tile.entry);
        if (!tile_in_pass(p, tile) || adapter.rank <= work.first_rank) continue;
        WeightChunk<true> a;
        a.load(adapter, work.first_rank, work.k_block * kBlockK + lane.warp * kChunkK, p.k_in, lane);
        if (!waited) wait_for_predecessor();
        waited = true;
        let_dependents_start();
        shrink_rows8<true>(p, site, work, tile, a, exchange, lane);
    }
    if (!waited) wait_for_predecessor();
}

// Tiles of both kinds, 64 ranks a block. Without 16-byte aligned rows (`kAligned` false) large tiles are taken 8 rows at a time.
template <bool kAligned>
__device__ __forceinline__ void shrink_mixed(const DeltaParams& p) {
    extern __shared__ __align__(128) char shared[];
    __shared__ const __nv_bfloat16* x_rows[kLargeTileRows];
    const Lane lane = lane_of_thread();
    const ShrinkWork work = shrink_work<kMaxTiledGroups>(p);
    const DeltaSite& site = p.sites[work.site];
    wait_for_predecessor();
    let_dependents_start();
    const uint32_t total = tile_total(p);
    for (uint32_t index = blockIdx.y; index < total; index += gridDim.y) {
        const Tile tile = tile_at(p, index);
        const Adapter adapter = adapter_of<Factor::kA>(p, site, tile.entry);
        if (!tile_in_pass(p, tile) || adapter.rank <= work.first_rank) continue;
        const uint32_t ranks = min(adapter.rank - work.first_rank, uint32_t(kRanksABlock));
        __syncthreads();
        if (!kAligned || tile.count <= kSmallTileRows) {
#pragma unroll 1
            for (uint32_t rank = 0; rank < ranks; rank += kRankGranule) {
                const ShrinkWork part{work.k_block, work.first_rank + rank, work.site};
                WeightChunk<kAligned> a;
                a.load(adapter, part.first_rank, work.k_block * kBlockK + lane.warp * kChunkK, p.k_in, lane);
                shrink_rows8<kAligned>(p, site, part, tile, a, reinterpret_cast<float*>(shared), lane);
            }
        } else {
            if (threadIdx.x < kLargeTileRows) x_rows[threadIdx.x] = x_pointer(p, tile, threadIdx.x);
            __syncthreads();
            if (ranks <= kRankGranule) {
                TiledShrink<1>{p, adapter, work, x_rows, shared}.run(site, tile, lane);
            } else if (ranks <= 2 * kRankGranule) {
                TiledShrink<2>{p, adapter, work, x_rows, shared}.run(site, tile, lane);
            } else {
                TiledShrink<4>{p, adapter, work, x_rows, shared}.run(site, tile, lane);
            }
        }
        if (tile.count > kSmallTileRows) finish_large_tile(p, site, work, tile, ranks);
    }
}
