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
// Large tiles (up to 128 rows): see shrink_tiled.cuh, and `shrink_streamed` where they are seldom full.
#pragma once

#include "primitives.cuh"
#include "tile.cuh"

constexpr int kShrinkWarps = kShrinkThreads / 32;
constexpr int kChunkSteps = kChunkK / 32;
constexpr int kChunksPerBlock = kBlockK / kChunkK;
static_assert(kChunksPerBlock == kShrinkWarps);

constexpr int kExchangeFloats = kShrinkWarps * kSmallTileRows * kExchangePitch;

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

    // The chunk's sums of 8 rows.
    __device__ __forceinline__ void multiply(float (&sum)[4], const uint4 (&x)[kChunkSteps]) const {
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) mma_pair(sum, low[step], high[step], x[step]);
    }
};

// The x row of the `index`th of a tile's rows; past the last one the first one's, whose sums are then not used.
__device__ __forceinline__ const __nv_bfloat16* x_pointer(const DeltaParams& p, const Tile& tile, uint32_t index) {
    return x_row_start(p, out_row(p, tile.first + (index < tile.count ? index : 0)));
}

// The lane's part of the chunk of x row `row` that starts at `k`.
template <bool kAligned = true>
__device__ __forceinline__ void load_x(const DeltaParams& p, const __nv_bfloat16* row, uint32_t k, const Lane& lane, uint4 (&x)[kChunkSteps]) {
    const uint32_t at = k + lane.quarter * 8;
    load_chunk<kAligned, false>(x, row + at, int(p.k_in - at));
}

// The groups of 16 ranks that a block takes of a large tile, maybe of several sites.
template <int kGroups>
struct GroupSet {
    ShrinkWork work[kGroups];
    Adapter adapter[kGroups];

    // Called by one thread for each of the set's ranks: the row of A of rank `rank` of the set, whose first group is the `first`th of all sites. Past the true
    // rank the last row is repeated: it makes sums that meet B's zeros. `adapter.rank` is 0 where the tile has no delta at the group's site, or not that many
    // ranks; its sums are not stored, so that any row will do.
    __device__ __forceinline__ const __nv_bfloat16* find(const DeltaParams& p, uint32_t entry, uint32_t first, uint32_t rank) {
        const uint32_t group = rank / kRankGranule;
        const ShrinkWork own = shrink_work(p, 0, first + group);
        Adapter found = adapter_of<Factor::kA>(p, p.sites[own.site], entry);
        if (found.rank <= own.first_rank) found.rank = 0;
        if (rank % kRankGranule == 0) {
            work[group] = own;
            adapter[group] = found;
        }
        if (found.rank == 0) return reinterpret_cast<const __nv_bfloat16*>(p.x);
        return found.matrix + uint64_t(min(own.first_rank + rank % kRankGranule, found.rank - 1)) * p.k_in;
    }

    // Groups up to the last one with a delta, of the first `most`.
    __device__ __forceinline__ int count(int most) const {
        int count = most;
        while (count > 0 && adapter[count - 1].rank == 0) --count;
        return count;
    }
};

// One in how many blocks asks for what is likely to be wanted: about as much as memory moves while rows are being grouped. A GB10's moves a sixth as much for each
// multiprocessor.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr uint32_t kLikelyShare = 12;
#else
constexpr uint32_t kLikelyShare = 2;
#endif

// The adapter whose A one of `blocks` blocks asks for in L2 while rows are being grouped and memory has nothing else to do, where the batch is likely to have rows of
// many entries: one as far down the table as the block is among the others. One in `share` asks; more would still be on its way when the tiles are there. Rank 0
// where the block asks for none.
__device__ __forceinline__ Adapter likely_adapter(const DeltaParams& p, const DeltaSite& site, uint32_t block, uint32_t blocks, uint32_t share) {
    if ((p.flags & kFlagSpread) == 0 || block >= blocks || block % share != 0 || 2 * uint64_t(p.rows) < p.slots) return Adapter{nullptr, 0};
    return adapter_of<Factor::kA>(p, site, block * max(p.slots / blocks, 1u));
}

// Asks for a k block of 16 ranks of A, a line a thread.
__device__ __forceinline__ void prefetch_a(const DeltaParams& p, const Adapter& adapter, const ShrinkWork& work) {
    constexpr uint32_t kLines = kBlockK * 2 / kLineBytes;
    static_assert(kShrinkThreads == kRankGranule * kLines);
    const uint32_t row = work.first_rank + threadIdx.x / kLines;
    const uint32_t at = work.k_block * kBlockK + threadIdx.x % kLines * (kLineBytes / 2);
    if (row < adapter.rank && at < p.k_in) prefetch_l2(adapter.matrix + uint64_t(row) * p.k_in + at);
}

// A warp's chunk sums of 8 rows and 16 ranks, for the other warps.
__device__ __forceinline__ void put_chunk_sums(float* exchange, const float (&sum)[4], const Lane& lane) {
    float* mine = exchange + (lane.warp * kSmallTileRows + 2 * lane.quarter) * kExchangePitch + lane.group;
    mine[0] = sum[0];
    mine[kExchangePitch] = sum[1];
    mine[8] = sum[2];
    mine[kExchangePitch + 8] = sum[3];
}

// The chunk sums of a row and a rank added in order.
__device__ __forceinline__ float chunk_total(const float* exchange, uint32_t row, uint32_t rank, uint32_t chunks) {
    const float* from = exchange + row * kExchangePitch + rank;
    float sums[kChunksPerBlock];
#pragma unroll
    for (int chunk = 0; chunk < kChunksPerBlock; ++chunk) sums[chunk] = from[chunk * kSmallTileRows * kExchangePitch];
    float total = sums[0];
#pragma unroll
    for (int chunk = 1; chunk < kChunksPerBlock; ++chunk) {
        if (chunk < chunks) total += sums[chunk];
    }
    return total;
}

// Adds the warps' chunk sums in order and writes the block's sums of up to 8 rows.
__device__ __forceinline__ void exchange_and_store(const DeltaParams& p, const DeltaSite& site, const ShrinkWork& work,
                                                   uint32_t first_position, uint32_t rows, const float (&sum)[4],
                                                   float* exchange, const Lane& lane) {
    put_chunk_sums(exchange, sum, lane);
    __syncthreads();
    const uint32_t row = threadIdx.x / kRankGranule;
    const uint32_t rank = threadIdx.x % kRankGranule;
    if (row < rows) {
        partials_at(p, site, work.k_block, first_position + row)[work.first_rank + rank] =
            chunk_total(exchange, row, rank, chunks_of_block(p, work.k_block));
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
        a.multiply(sum, x);
        exchange_and_store(p, site, work, tile.first + first, min(tile.count - first, uint32_t(kSmallTileRows)), sum,
                           exchange, lane);
        if (kSmall) break;
    }
}

// Tiles of up to 8 rows at one site: k block; site and ranks; tile. A block takes `groups` groups of 16 ranks in turn, one without `kSeveral`; past the true rank it
// does nothing. The next group's A is asked for as soon as the last one's is multiplied.
template <bool kSeveral>
__device__ __forceinline__ void shrink_small(const DeltaParams& p, const SiteEnds& block_ends, uint32_t groups) {
    __shared__ float exchange[kExchangeFloats];
    const uint32_t site_index = site_of(block_ends, blockIdx.y);
    const uint32_t ranks = kRankGranule * (kSeveral ? groups : 1);
    const uint32_t first_rank = (blockIdx.y - site_start(block_ends, site_index)) * ranks;
    const DeltaSite& site = p.sites[site_index];
    // The first half of the blocks run at once, whether or not all do.
    begin(p, [&] { prefetch_a(p, likely_adapter(p, site, blockIdx.z, gridDim.z / 2, kLikelyShare), ShrinkWork{blockIdx.x, first_rank, site_index}); });
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
                    a.multiply(sum, x);
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

