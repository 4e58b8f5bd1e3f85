// Shrink: partial sums of `x @ A^T`, one set for each block of 1024 k.
//
// The canonical order of summation, which every path follows so that a row's bits never depend on the path: k is cut into
// blocks of 1024 and those into chunks of 128. A chunk is eight m16n8k16 MMAs in order, onto sums that start at zero; chunk
// sums are added in order to a block's sum; block sums are added in order, by a later kernel. A is always the MMA's 16-row operand
// and the rows of x its 8 columns. Inside 32 consecutive k, lane quarter t of both operands takes the 8 elements 8t..8t+7, so
// that a fragment is one 16-byte load: the first MMA of the two gets elements 0..3 of each lane, the second 4..7.
//
// Small tiles (up to 8 rows): each of a block's 8 warps holds one chunk of 16 rank rows in registers, straight from global memory;
// the chunk sums meet in shared memory. The work is reading A once; the loads are issued before the wait for the predecessor.
// Large tiles (up to 128 rows): chunks of x and of A pass through shared memory in asynchronous stages; a warp owns up to 32 rank rows
// and some of the x rows for the whole block, so chunk sums never leave its registers, and what it reads from shared memory serves several MMAs.
// A kernel between this one and expand adds their k blocks up, since expand's blocks are many; of a small tile each expand block does that itself, which is quicker.
#pragma once

#include "primitives.cuh"
#include "tile.cuh"

constexpr int kShrinkWarps = kShrinkThreads / 32;
constexpr int kChunkSteps = kChunkK / 32;
constexpr int kChunksPerBlock = kBlockK / kChunkK;
static_assert(kChunksPerBlock == kShrinkWarps);

constexpr int kExchangeFloats = kShrinkWarps * kSmallTileRows * kExchangePitch;

constexpr int kChunkBytes = kChunkK * 2;
constexpr int kChunkPieces = kChunkBytes / 16;
constexpr int kMaxTiledGroups = kRanksABlock / kRankGranule;

// The lane's 8 elements of 32, one element at a time: for rows that are not 16-byte aligned. `left`: elements from `at` to the row's end.
__device__ __forceinline__ uint4 load_elements(const __nv_bfloat16* at, int left) {
    uint4 v;
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(at);
    uint32_t* words = reinterpret_cast<uint32_t*>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = 2 * i < left ? __ldcg(bits + 2 * i) : 0;
        const uint32_t high = 2 * i + 1 < left ? __ldcg(bits + 2 * i + 1) : 0;
        words[i] = low | high << 16;
    }
    return v;
}

// The lane's part of a chunk of a row: 8 elements of every 32 from `at` on, of which `left` are in the row. x, unlike weights, takes the coherent path,
// since the predecessor may have written it.
template <bool kAligned, bool kWeights>
__device__ __forceinline__ void load_chunk(uint4 (&v)[kChunkSteps], const __nv_bfloat16* at, int left) {
    static_assert(kChunkSteps == 4);
    if (!kAligned) {
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) v[step] = load_elements(at + step * 32, left - step * 32);
    } else if (left > 96) {
        v[0] = kWeights ? load_weights16<0>(at) : load16<0>(at);
        v[1] = kWeights ? load_weights16<64>(at) : load16<64>(at);
        v[2] = kWeights ? load_weights16<128>(at) : load16<128>(at);
        v[3] = kWeights ? load_weights16<192>(at) : load16<192>(at);
    } else {
        v[0] = kWeights ? load_weights16_if<0>(left > 0, at) : load16_if<0>(left > 0, at);
        v[1] = kWeights ? load_weights16_if<64>(left > 32, at) : load16_if<64>(left > 32, at);
        v[2] = kWeights ? load_weights16_if<128>(left > 64, at) : load16_if<128>(left > 64, at);
        v[3] = make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ void mma_pair(float (&sum)[4], const uint4& low, const uint4& high, const uint4& x) {
    mma_16x8x16(sum, low.x, high.x, low.y, high.y, x.x, x.y);
    mma_16x8x16(sum, low.z, high.z, low.w, high.w, x.z, x.w);
}

// What a block of the grid works on at one site: 16 ranks from `first_rank` on, of one k block.
struct ShrinkWork {
    uint32_t k_block;
    uint32_t first_rank;
    uint32_t site;
};

// The 16-rank groups of all sites stand one after the other; this is the `index`th, its site the last one and its rank past that site's
// where there are fewer.
__device__ __forceinline__ ShrinkWork shrink_work(const DeltaParams& p, uint32_t k_block, uint32_t index) {
    uint32_t site = 0;
    while (site + 1 < p.site_count && index >= p.sites[site].max_rank / kRankGranule) {
        index -= p.sites[site].max_rank / kRankGranule;
        ++site;
    }
    return ShrinkWork{k_block, index * kRankGranule, site};
}

__device__ __forceinline__ uint32_t chunks_of_block(const DeltaParams& p, uint32_t k_block) {
    return min(uint32_t(kChunksPerBlock), (p.k_in - k_block * kBlockK + kChunkK - 1) / kChunkK);
}

// One chunk of 16 rows of A, from row `first_rank` on. Past the true rank the last row is repeated: it makes sums that meet B's zeros.
template <bool kAligned>
struct WeightChunk {
    uint4 low[kChunkSteps];
    uint4 high[kChunkSteps];

    __device__ __forceinline__ void load(const Adapter& adapter, uint32_t first_rank, uint32_t k, uint32_t k_in,
                                         const Lane& lane) {
        const uint32_t row = first_rank + lane.group;
        const uint32_t at = k + lane.quarter * 8;
        const __nv_bfloat16* a = adapter.matrix + at;
        load_chunk<kAligned, true>(low, a + uint64_t(min(row, adapter.rank - 1)) * k_in, int(k_in - at));
        load_chunk<kAligned, true>(high, a + uint64_t(min(row + 8, adapter.rank - 1)) * k_in, int(k_in - at));
    }
};

// The x row of the `index`th of a tile's rows; past the last one the first one's, whose sums are then not used.
__device__ __forceinline__ const __nv_bfloat16* x_pointer(const DeltaParams& p, const Tile& tile, uint32_t index) {
    const uint32_t row = x_row(p, out_row(p, tile.first + (index < tile.count ? index : 0)));
    return reinterpret_cast<const __nv_bfloat16*>(p.x) + uint64_t(min(row, p.x_row_count - 1)) * p.x_stride;
}

// The lane's part of the chunk of x row `row` that starts at `k`.
template <bool kAligned = true>
__device__ __forceinline__ void load_x(const DeltaParams& p, const __nv_bfloat16* row, uint32_t k, const Lane& lane, uint4 (&x)[kChunkSteps]) {
    const uint32_t at = k + lane.quarter * 8;
    load_chunk<kAligned, false>(x, row + at, int(p.k_in - at));
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
        const uint32_t chunks = chunks_of_block(p, work.k_block);
        const float* from = exchange + row * kExchangePitch + rank;
        float sums[kChunksPerBlock];
#pragma unroll
        for (int chunk = 0; chunk < kChunksPerBlock; ++chunk) sums[chunk] = from[chunk * kSmallTileRows * kExchangePitch];
        float total = sums[0];
#pragma unroll
        for (int chunk = 1; chunk < kChunksPerBlock; ++chunk) {
            if (chunk < chunks) total += sums[chunk];
        }
        partials_at(p, site, work.k_block, first_position + row)[work.first_rank + rank] = total;
    }
    __syncthreads();
}

// `row` is the x row of the lane's group. `kSmall`: the tile has at most 8 rows.
template <bool kAligned, bool kSmall>
__device__ __forceinline__ void shrink_rows8(const DeltaParams& p, const DeltaSite& site, const ShrinkWork& work,
                                             const Tile& tile, const WeightChunk<kAligned>& a,
                                             const __nv_bfloat16* row, float* exchange) {
    const Lane lane = lane_of_thread();
    const uint32_t k = work.k_block * kBlockK + lane.warp * kChunkK;
    for (uint32_t first = 0; first < tile.count; first += kSmallTileRows) {
        if (!kSmall && first > 0) row = x_pointer(p, tile, first + lane.group);
        uint4 x[kChunkSteps];
        load_x<kAligned>(p, row, k, lane, x);
        float sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) mma_pair(sum, a.low[step], a.high[step], x[step]);
        exchange_and_store(p, site, work, tile.first + first, min(tile.count - first, uint32_t(kSmallTileRows)), sum,
                           exchange, lane);
        if (kSmall) break;
    }
}

// Byte offset of 16-byte piece `piece` of row `row` of a stage; odd rows have their 64-byte halves swapped, so that the eight lanes of a
// phase, four of each of two rows, hit all banks once.
__device__ __forceinline__ uint32_t stage_offset(uint32_t row, uint32_t piece) {
    return row * kChunkBytes + ((piece ^ ((row & 1) << 2)) << 4);
}

// The groups of 16 ranks that a block takes of a tile, maybe of several sites.
struct GroupSet {
    ShrinkWork work[kMaxTiledGroups];
    Adapter adapter[kMaxTiledGroups];

    // Called by one thread for each of the set's ranks: the row of A of rank `rank` of the set, null past the true rank. `adapter.rank` is 0 where the tile has
    // no delta at the group's site, or not that many ranks.
    __device__ __forceinline__ const __nv_bfloat16* find(const DeltaParams& p, uint32_t entry, uint32_t set, uint32_t rank) {
        const uint32_t group = rank / kRankGranule;
        const ShrinkWork own = shrink_work(p, 0, set * kMaxTiledGroups + group);
        Adapter found = adapter_of<Factor::kA>(p, p.sites[own.site], entry);
        if (found.rank <= own.first_rank) found.rank = 0;
        if (rank % kRankGranule == 0) {
            work[group] = own;
            adapter[group] = found;
        }
        const uint32_t row = own.first_rank + rank % kRankGranule;
        return row < found.rank ? found.matrix + uint64_t(row) * p.k_in : nullptr;
    }

    // Groups up to the last one with a delta.
    __device__ __forceinline__ int count() const {
        int count = kMaxTiledGroups;
        while (count > 0 && adapter[count - 1].rank == 0) --count;
        return count;
    }
};

// A block's k blocks of a large tile, for up to `kGroups` groups of 16 ranks.
template <int kGroups>
struct TiledShrink {
    static constexpr int kStageRows = kLargeTileRows + kGroups * kRankGranule;
    static constexpr int kStageBytes = kStageRows * kChunkBytes;
    static constexpr int kRowsATurn = kShrinkThreads / kChunkPieces;
    static constexpr int kTurns = (kStageRows + kRowsATurn - 1) / kRowsATurn;
    static constexpr int kGroupsAWarp = kGroups < 2 ? 1 : 2;
    static constexpr int kWarpsAcross = kGroups / kGroupsAWarp;
    static constexpr int kRowsAWarp = kLargeTileRows * kWarpsAcross / kShrinkWarps;
    static constexpr int kColumns = kRowsAWarp / 8;

    const DeltaParams& p;
    const GroupSet& set;
    const Tile& tile;
    char* stages;
    const __nv_bfloat16* const* rows;  // of x, then of A; null past the last row or the true rank

    // Rows that no warp will read are left as they are.
    __device__ __forceinline__ void copy_chunk(uint32_t k_block, uint32_t chunk) const {
        const uint32_t piece = threadIdx.x % kChunkPieces;
        const uint32_t at = k_block * kBlockK + chunk * kChunkK + piece * 8;
        const bool inside = at < p.k_in;
        const uint32_t first = threadIdx.x / kChunkPieces;
        const uint32_t read = (tile.count + kRowsAWarp - 1) / kRowsAWarp * kRowsAWarp;
        char* to = stages + chunk % kShrinkStages * kStageBytes + stage_offset(first, piece);
#pragma unroll 2
        for (int i = 0; i < kTurns; ++i) {
            const uint32_t row = i * kRowsATurn + first;
            if (row >= kStageRows || (row < kLargeTileRows && row >= read)) continue;
            const __nv_bfloat16* from = rows[row];
            const bool present = inside && from != nullptr;
            copy_async16(to + i * kRowsATurn * kChunkBytes,
                         present ? from + at : reinterpret_cast<const __nv_bfloat16*>(p.x), present);
        }
        copy_async_commit();
    }

    __device__ __forceinline__ void run(uint32_t k_block, const Lane& lane) const {
        const uint32_t chunks = chunks_of_block(p, k_block);
        const uint32_t first_group = lane.warp % kWarpsAcross * kGroupsAWarp;
        const uint32_t first_row = lane.warp / kWarpsAcross * kRowsAWarp;
        const bool active = first_row < tile.count;
        float block_sum[kGroupsAWarp][kColumns][4] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < kShrinkStages - 1; ++chunk) copy_chunk_if(k_block, chunk, chunks);
#pragma unroll 1
        for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
            copy_async_wait<kShrinkStages - 2>();
            __syncthreads();
            copy_chunk_if(k_block, chunk + kShrinkStages - 1, chunks);
            if (!active) continue;
            float sum[kGroupsAWarp][kColumns][4] = {};
            multiply(sum, stages + chunk % kShrinkStages * kStageBytes, first_group, first_row, lane);
#pragma unroll
            for (int g = 0; g < kGroupsAWarp; ++g) {
#pragma unroll
                for (int column = 0; column < kColumns; ++column) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        block_sum[g][column][i] += sum[g][column][i];
                    }
                }
            }
        }
        copy_async_wait<0>();
        __syncthreads();
        if (active) store(k_block, block_sum, first_group, first_row, lane);
    }

    __device__ __forceinline__ void copy_chunk_if(uint32_t k_block, uint32_t chunk, uint32_t chunks) const {
        if (chunk < chunks) {
            copy_chunk(k_block, chunk);
        } else {
            copy_async_commit();
        }
    }

    __device__ __forceinline__ static void multiply(float (&sum)[kGroupsAWarp][kColumns][4], const char* stage, uint32_t first_group,
                                                    uint32_t first_row, const Lane& lane) {
        // Rows are multiples of 8 from the lane's own, so that all have its parity and one offset serves them.
        const char* x_rows = stage + first_row * kChunkBytes;
        const char* a_rows = stage + (kLargeTileRows + first_group * kRankGranule) * kChunkBytes;
#pragma unroll 1
        for (int step = 0; step < kChunkSteps; ++step) {
            const uint32_t at = stage_offset(lane.group, step * 4 + lane.quarter);
            uint4 x[kColumns];
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
                x[column] = *reinterpret_cast<const uint4*>(x_rows + at + column * 8 * kChunkBytes);
            }
#pragma unroll
            for (int g = 0; g < kGroupsAWarp; ++g) {
                const char* rank_row = a_rows + at + g * kRankGranule * kChunkBytes;
                const uint4 low = *reinterpret_cast<const uint4*>(rank_row);
                const uint4 high = *reinterpret_cast<const uint4*>(rank_row + 8 * kChunkBytes);
                const uint4 first = in_mma_order(low.x, high.x, low.y, high.y);
                const uint4 second = in_mma_order(low.z, high.z, low.w, high.w);
#pragma unroll
                for (int column = 0; column < kColumns; ++column) mma_16x8x16(sum[g][column], first, x[column].x, x[column].y);
#pragma unroll
                for (int column = 0; column < kColumns; ++column) mma_16x8x16(sum[g][column], second, x[column].z, x[column].w);
            }
        }
    }

    __device__ __forceinline__ void store(uint32_t k_block, const float (&sum)[kGroupsAWarp][kColumns][4], uint32_t first_group,
                                          uint32_t first_row, const Lane& lane) const {
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

// Tiles of up to 8 rows at one site: k block; site and ranks; tile. A block takes `groups` groups of 16 ranks in turn, one without `kSeveral`; past the true rank it
// does nothing. The next group's A is asked for as soon as the last one's is multiplied.
template <bool kSeveral>
__device__ __forceinline__ void shrink_small(const DeltaParams& p, const SiteEnds& block_ends, uint32_t groups) {
    __shared__ float exchange[kExchangeFloats];
    const uint32_t site_index = site_of(block_ends, blockIdx.y);
    const uint32_t ranks = kRankGranule * (kSeveral ? groups : 1);
    const uint32_t first_rank = (blockIdx.y - site_start(block_ends, site_index)) * ranks;
    const DeltaSite& site = p.sites[site_index];
    begin(p);
    Tile tile = tile_at(p, blockIdx.z);  // not after the count: one latency less
    const uint32_t total = tile_total(p);
#pragma unroll 1
    for (uint32_t index = blockIdx.z; index < total;) {
        Adapter adapter{nullptr, 0};
        if (tile_in_pass(p, tile)) adapter = adapter_of<Factor::kA>(p, site, tile.entry);
        if (first_rank < adapter.rank) {
            const Lane lane = lane_of_thread();
            const uint32_t k = blockIdx.x * kBlockK + lane.warp * kChunkK;
            WeightChunk<true> a;
            a.load(adapter, first_rank, k, p.k_in, lane);
            const __nv_bfloat16* row = x_pointer(p, tile, lane.group);
            wait_for_predecessor();
            if constexpr (kSeveral) {
                uint4 x[kChunkSteps];
                load_x(p, row, k, lane, x);
                ShrinkWork work{blockIdx.x, first_rank, site_index};
                for (const uint32_t end = min(adapter.rank, first_rank + ranks); work.first_rank < end; work.first_rank += kRankGranule) {
                    float sum[4] = {0, 0, 0, 0};
#pragma unroll
                    for (int step = 0; step < kChunkSteps; ++step) mma_pair(sum, a.low[step], a.high[step], x[step]);
                    if (work.first_rank + kRankGranule < end) a.load(adapter, work.first_rank + kRankGranule, k, p.k_in, lane);
                    exchange_and_store(p, site, work, tile.first, tile.count, sum, exchange, lane);
                }
            } else {
                shrink_rows8<true, true>(p, site, ShrinkWork{blockIdx.x, first_rank, site_index}, tile, a, row, exchange);
            }
        }
        index += gridDim.z;
        if (index < total) tile = tile_at(p, index);
    }
    wait_for_predecessor();
}

// Tiles of both kinds, 16 ranks of A in registers while the tile's rows go by, 8 at a time: where tiles are seldom full, no row is read or multiplied that is not
// there. Partial sums are left to the expand kernel.
__device__ __forceinline__ void shrink_streamed(const DeltaParams& p, const SiteEnds& block_ends) {
    __shared__ float exchange[kExchangeFloats];
    const uint32_t site_index = site_of(block_ends, blockIdx.y);
    const uint32_t first_rank = (blockIdx.y - site_start(block_ends, site_index)) * kRankGranule;
    const ShrinkWork work{blockIdx.x, first_rank, site_index};
    const DeltaSite& site = p.sites[work.site];
    const Lane lane = lane_of_thread();
    begin_late(p);
    const uint32_t total = tile_total(p);
    for (uint32_t index = blockIdx.z; index < total; index += gridDim.z) {
        const Tile tile = tile_at(p, index);
        const Adapter adapter = adapter_of<Factor::kA>(p, site, tile.entry);
        if (!tile_in_pass(p, tile) || work.first_rank >= adapter.rank) continue;
        WeightChunk<true> a;
        a.load(adapter, work.first_rank, work.k_block * kBlockK + lane.warp * kChunkK, p.k_in, lane);
        const __nv_bfloat16* row = x_pointer(p, tile, lane.group);
        wait_late();
        shrink_rows8<true, false>(p, site, work, tile, a, row, exchange);
    }
    wait_late();
}

// A set's groups one after the other, 8 rows at a time.
template <bool kAligned>
__device__ __forceinline__ void shrink_groups(const DeltaParams& p, const GroupSet& set, int groups, uint32_t k_block,
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

// Tiles of both kinds; a block takes up to 64 ranks, of several sites where they have fewer, so that x is read once, and one of `parts` equal parts
// of the k blocks. Without 16-byte aligned
// rows (`kAligned` false) large tiles are taken 8 rows at a time.
template <bool kAligned>
__device__ __forceinline__ void shrink_mixed(const DeltaParams& p, uint32_t parts) {
    extern __shared__ __align__(128) char shared[];
    __shared__ const __nv_bfloat16* rows[kLargeTileRows + kRanksABlock];
    __shared__ GroupSet set;
    __shared__ Tile tile;  // not in registers, which the sums need
    const Lane lane = lane_of_thread();
    begin_late(p);
    for (uint32_t index = blockIdx.y; index < tile_total(p); index += gridDim.y) {
        const Tile own = tile_at(p, index);
        if (!tile_in_pass(p, own) || part_of(p, parts).count == 0) continue;
        __syncthreads();
        if (threadIdx.x == 0) tile = own;
        if (threadIdx.x < kLargeTileRows) {
            const bool present = threadIdx.x < max(own.count, uint32_t(kSmallTileRows));
            rows[threadIdx.x] = present ? x_pointer(p, own, threadIdx.x) : nullptr;
        } else if (threadIdx.x < kLargeTileRows + kRanksABlock) {
            rows[threadIdx.x] = set.find(p, own.entry, blockIdx.x / parts, threadIdx.x - kLargeTileRows);
        }
        __syncthreads();
        const int groups = set.count();
        if (groups == 0) continue;
        wait_late();
        const KPart part = part_of(p, parts);
        const auto each_block = [&](const auto& tiled) {
#pragma unroll 1
            for (uint32_t i = 0; i < part.count; ++i) tiled.run(part.first + i, lane);
        };
        if (!kAligned || tile.count <= kSmallTileRows) {
            for (uint32_t i = 0; i < part.count; ++i) {
                shrink_groups<kAligned>(p, set, groups, part.first + i, tile, rows[lane.group], reinterpret_cast<float*>(shared));
            }
        } else if (groups == 1) {
            each_block(TiledShrink<1>{p, set, tile, shared, rows});
        } else if (groups == 2) {
            each_block(TiledShrink<2>{p, set, tile, shared, rows});
        } else {
            each_block(TiledShrink<4>{p, set, tile, shared, rows});
        }
    }
    wait_late();
}

constexpr int kSumAhead = 14;

// `x @ A^T` of large tiles: a block takes 8 rows of a tile at one site. Tiles; slices of a tile; sites.
__device__ __forceinline__ void sum_blocks(const DeltaParams& p) {
    const DeltaSite& site = p.sites[blockIdx.z];
    begin(p);
    for (uint32_t index = blockIdx.y; index < tile_total(p); index += gridDim.y) {
        const Tile tile = tile_at(p, index);
        const uint32_t first = blockIdx.x * kSumRows;
        if (tile.count <= kSmallTileRows || first >= tile.count || !tile_in_pass(p, tile)) continue;
        const uint32_t quads = padded_rank(adapter_of<Factor::kA>(p, site, tile.entry).rank) / 4;
        wait_for_predecessor();
        for (uint32_t item = threadIdx.x; item < min(tile.count - first, uint32_t(kSumRows)) * quads; item += kSumThreads) {
            const uint32_t position = tile.first + first + item / quads;
            const uint32_t rank = item % quads * 4;
            XaSum<kSumAhead> sum;
            sum.ask(p, site, position, rank, true);
            *reinterpret_cast<uint2*>(xa_at(p, site, position) + rank) = sum.finish(p);
        }
    }
    wait_for_predecessor();
}
