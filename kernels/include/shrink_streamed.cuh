// Shrink of rows that are spread over many entries, so that tiles are seldom full.
//
// A block keeps up to 32 ranks of A, of one site or of two that read the same x, in registers while a tile's rows go by, 8 at a time: no row is read or multiplied
// that is not there, and x is read once for both. It takes tile after tile; the addresses of the next one arrive meanwhile. Partial sums are left to the expand kernel.
#pragma once

#include "shrink.cuh"

// A chunk of 16 rows of A in the order in which MMAs take it.
struct OrderedChunk {
    uint4 first[kChunkSteps];
    uint4 second[kChunkSteps];

    __device__ __forceinline__ void take(const WeightChunk<true>& from) {
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) {
            first[step] = in_mma_order(from.low[step].x, from.high[step].x, from.low[step].y, from.high[step].y);
            second[step] = in_mma_order(from.low[step].z, from.high[step].z, from.low[step].w, from.high[step].w);
        }
    }
};

constexpr uint32_t kChunkPieces = kChunkK * 2 / 16;

// x of 8 rows of a block's k, of which each warp has its chunk. A ring of them is in flight.
constexpr int kSlotBytes = kSmallTileRows * kBlockK * 2;

// The x rows of a tile, 8 at a time, on their way into a ring in shared memory. A warp copies and reads its own chunk alone, so that no barrier of the block
// stands between; it asks for whole lines, two rows at a time.
struct XStream {
    char* ring;   // the warp's part of the first slot
    uint32_t k;   // of the lane's piece; 0 where that is past a row's end
    bool inside;  // of the row

    __device__ __forceinline__ XStream(const DeltaParams& p, char* shared, uint32_t k_block, const Lane& lane)
        : ring(shared + lane.warp * (kSlotBytes / kShrinkWarps)) {
        k = k_block * kBlockK + lane.warp * kChunkK + threadIdx.x % kChunkPieces * 8;
        inside = k < p.k_in;
        if (!inside) k = 0;
    }

    // Rows of slot `slot`, where the tile has that many: its `count` x rows are `rows`, the last one again up to a multiple of 8.
    __device__ __forceinline__ void ask(const __nv_bfloat16* const* rows, uint32_t slot, uint32_t count) const {
        if (slot * kSmallTileRows < count) copy(rows + slot * kSmallTileRows, slot);
        copy_async_commit();
    }

    __device__ __forceinline__ void copy(const __nv_bfloat16* const* rows, uint32_t slot) const {
        const uint32_t first = threadIdx.x % 32 / kChunkPieces;
        char* to = ring + slot % kStreamSlots * kSlotBytes;
        const __nv_bfloat16* row[kSmallTileRows / 2];
#pragma unroll
        for (int pair = 0; pair < kSmallTileRows / 2; ++pair) row[pair] = rows[2 * pair + first];
#pragma unroll
        for (int pair = 0; pair < kSmallTileRows / 2; ++pair) {
            copy_async16(to + stage_offset<kChunkK * 2>(2 * pair + first, threadIdx.x % kChunkPieces), row[pair] + k, inside);
        }
    }

    // The lane's part of a slot, which is then free.
    __device__ __forceinline__ void take(uint4 (&x)[kChunkSteps], uint32_t slot, const Lane& lane) const {
        copy_async_wait<kStreamSlots - 1>();
        __syncwarp();
        const char* at = ring + slot % kStreamSlots * kSlotBytes;
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) x[step] = *reinterpret_cast<const uint4*>(at + stage_offset<kChunkK * 2>(lane.group, step * 4 + lane.quarter));
        __syncwarp();
    }
};

// A share of a tile, and what the tables say of a set of groups of 16 ranks (rows of many entries are routed). Loads are issued without a branch, and what they
// bring is looked at no earlier than they are settled.
template <int kGroups>
struct StreamedTile {
    Tile tile;
    uint64_t address[kGroups];
    uint32_t rank[kGroups];
    uint32_t out;  // row of the thread's

    __device__ __forceinline__ void ask(const DeltaParams& p, uint32_t index, uint32_t shares, uint32_t total) {
        tile = tile_at(p, min(index, total - 1) / shares);
    }

    // From here on `first` and `count` are the share's.
    __device__ __forceinline__ void settle_tile(const DeltaParams& p, uint32_t index, uint32_t shares, uint32_t total) {
        const uint32_t share_rows = ((tile.count + 7) / 8 + shares - 1) / shares * 8;
        const uint32_t before = min(index % shares * share_rows, tile.count);
        const bool here = index < total && tile_in_pass(p, tile);
        tile.count = here ? min(share_rows, tile.count - before) : 0;
        tile.first += before;
    }

    __device__ __forceinline__ void ask_for_adapters(const DeltaParams& p, const ShrinkWork (&work)[kGroups]) {
        const uint32_t entry = min(tile.entry, p.slots - 1);
        out = out_row(p, tile.first + min(threadIdx.x, max(tile.count, 1u) - 1));
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const DeltaSite& site = p.sites[work[group].site];
            address[group] = load_u64(reinterpret_cast<const uint64_t*>(site.a_table) + entry);
            rank[group] = load_u32(reinterpret_cast<const uint32_t*>(site.rank_table) + entry);
        }
    }

    // Rank 0 where there is nothing to do for a group.
    __device__ __forceinline__ void settle_adapters(const DeltaParams& p, const ShrinkWork (&work)[kGroups]) {
        uint32_t any = 0;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            rank[group] = min(rank[group], p.sites[work[group].site].max_rank);
            if (address[group] == 0 || tile.entry >= p.slots || rank[group] <= work[group].first_rank) rank[group] = 0;
            any |= rank[group];
        }
        if (any == 0) tile.count = 0;
    }
};

// What a thread adds up: the chunk sums of one row of every 8 and one rank.
struct ThreadSum {
    uint32_t group;  // of 16 ranks; there may be fewer
    uint32_t row;
    uint32_t rank;  // of the group

    __device__ __forceinline__ ThreadSum()
        : group(threadIdx.x / (kSmallTileRows * kRankGranule)), row(threadIdx.x / kRankGranule % kSmallTileRows), rank(threadIdx.x % kRankGranule) {}

    template <int kGroups>
    __device__ __forceinline__ float total(const float (&exchange)[kGroups][kExchangeFloats], uint32_t chunks) const {
        return chunk_total(exchange[group], row, rank, chunks);
    }
};

// The same, and where it is stored.
struct BlockSum : ThreadSum {
    uint32_t chunks;
    uint32_t stride;  // from one position to the next
    float* to;        // the sum of the pass's first position

    __device__ __forceinline__ BlockSum(const DeltaParams& p, uint32_t k_block, uint32_t first_group, uint32_t groups) : chunks(chunks_of_block(p, k_block)) {
        const ShrinkWork work = shrink_work(p, k_block, first_group + min(group, groups - 1));
        stride = p.sites[work.site].max_rank;
        to = partials_at(p, p.sites[work.site], k_block, p.pass_first) + work.first_rank + rank;
    }

    // `position`: of the first of the 8 rows, in the pass.
    template <int kGroups>
    __device__ __forceinline__ void store(const float (&exchange)[kGroups][kExchangeFloats], uint32_t position) const {
        to[uint64_t(position + row) * stride] = total(exchange, chunks);
    }
};

template <int kGroups>
__device__ __forceinline__ void multiply_chunk(float (&sum)[kGroups][4], const OrderedChunk (&a)[kGroups], const uint4 (&x)[kChunkSteps]) {
#pragma unroll
    for (int step = 0; step < kChunkSteps; ++step) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) mma_16x8x16(sum[group], a[group].first[step], x[step].x, x[step].y);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) mma_16x8x16(sum[group], a[group].second[step], x[step].z, x[step].w);
    }
}

// `count` rows, whose x rows are `rows`, pass by `a`. `store` is called by all threads with the chunk sums of 8 rows and the first of them; before the block's next
// call, a barrier. `kBuffers`: 2 where there is room, for one barrier less every 8 rows.
template <int kBuffers, int kGroups, typename Store>
__device__ __forceinline__ void stream_rows(uint32_t count, const OrderedChunk (&a)[kGroups], const XStream& x, const __nv_bfloat16* const* rows, const Store& store) {
    __shared__ float exchange[kBuffers][kGroups][kExchangeFloats];
    const Lane lane = lane_of_thread();
#pragma unroll 1
    for (uint32_t first = 0; first < count; first += kSmallTileRows) {
        const uint32_t slot = first / kSmallTileRows;
        uint4 chunk[kChunkSteps];
        x.take(chunk, slot, lane);
        x.ask(rows, slot + kStreamSlots, count);
        float sum[kGroups][4] = {};
        multiply_chunk(sum, a, chunk);
        // Of two buffers in turn: who writes one again has passed the barrier that all its readers have come to.
        float(&buffer)[kGroups][kExchangeFloats] = exchange[slot % kBuffers];
        if (kBuffers == 1 && first > 0) __syncthreads();
#pragma unroll
        for (int group = 0; group < kGroups; ++group) put_chunk_sums(buffer[group], sum[group], lane);
        __syncthreads();
        store(buffer, first);
    }
}

// Tiles of both kinds, up to `kGroups` groups of 16 ranks a block, one of a tile's `shares` equal shares at a time. k blocks; sets of groups; shares of tiles.
template <int kGroups>
__device__ __forceinline__ void shrink_streamed(const DeltaParams& p, uint32_t shares) {
    static_assert(kGroups * kSmallTileRows * kRankGranule <= kShrinkThreads);
    extern __shared__ __align__(128) char ring[];
    __shared__ const __nv_bfloat16* rows[2][kLargeTileRows];
    const Lane lane = lane_of_thread();
    const uint32_t k_block = blockIdx.x;
    ShrinkWork work[kGroups];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) work[group] = shrink_work(p, k_block, blockIdx.y * kGroups + group);
    begin_late(p, [&] {
        if (blockIdx.z % shares != 0) return;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            prefetch_a(p, likely_adapter(p, p.sites[work[group].site], blockIdx.z / shares, gridDim.z / shares, kLikelyShare), work[group]);
        }
    });
    const uint32_t total = tile_total(p) * shares;
    if (blockIdx.z >= total) return wait_late();

    const XStream x(p, ring, k_block, lane);
    const BlockSum block_sum(p, k_block, blockIdx.y * kGroups, kGroups);
    const auto put_rows = [&](const StreamedTile<kGroups>& of, uint32_t turn) {
        if (threadIdx.x >= kLargeTileRows) return;
        rows[turn % 2][threadIdx.x] = x_row_start(p, of.out);
    };
    StreamedTile<kGroups> own, next;
    own.ask(p, blockIdx.z, shares, total);
    next.ask(p, blockIdx.z + gridDim.z, shares, total);
    own.settle_tile(p, blockIdx.z, shares, total);
    own.ask_for_adapters(p, work);
    put_rows(own, 0);
    own.settle_adapters(p, work);
    next.settle_tile(p, blockIdx.z + gridDim.z, shares, total);
    __syncthreads();
    uint32_t turn = 0;
#pragma unroll 1
    for (uint32_t index = blockIdx.z; index < total; index += gridDim.z, ++turn) {
        WeightChunk<true> loaded[kGroups];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const Adapter adapter{reinterpret_cast<const __nv_bfloat16*>(own.address[group]), own.rank[group]};
            const uint32_t k_in = own.rank[group] > 0 ? p.k_in : 0;  // a row of no elements: nothing is loaded
            loaded[group].load(adapter, work[group].first_rank, k_block * kBlockK + lane.warp * kChunkK, k_in, lane);
        }
        if (turn == 0) wait_late();
#pragma unroll
        for (int slot = 0; slot < kStreamSlots; ++slot) x.ask(rows[turn % 2], slot, own.tile.count);
        next.ask_for_adapters(p, work);
        const Tile after = tile_at(p, min(index + 2 * gridDim.z, total - 1) / shares);
        OrderedChunk a[kGroups];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) a[group].take(loaded[group]);
        bool sums = false;  // the thread's group has a delta
#pragma unroll
        for (int group = 0; group < kGroups; ++group) sums |= group == block_sum.group && own.rank[group] > 0;
        const uint32_t last = sums ? own.tile.count : 0;
        stream_rows<2>(own.tile.count, a, x, rows[turn % 2], [&](const float(&buffer)[kGroups][kExchangeFloats], uint32_t first) {
            if (first + block_sum.row < last) block_sum.store(buffer, own.tile.first - p.pass_first + first);
        });
        put_rows(next, turn + 1);
        next.settle_adapters(p, work);
        own = next;
        next.tile = after;
        next.settle_tile(p, index + 2 * gridDim.z, shares, total);
        __syncthreads();
    }
}
