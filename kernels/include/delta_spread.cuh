// A whole delta in one launch: few tiles of up to 8 rows that are spread over many entries, whose pairs are small.
//
// A block has a tile at a site and up to `outputs` of its outputs. It asks for everything that its pair has at once, A in registers as `shrink_small` has it and B
// in shared memory, so that B's latency passes behind A's, adds the chunk sums up in the canonical order in shared memory, and expands. So there are no partial
// sums to hand over, and half as many launches to start and end. Blocks of a tile that share it by outputs each compute all of its xa, which costs A's way from
// the L2 again.
#pragma once

#include "expand.cuh"
#include "shrink.cuh"

// Outputs that a block makes at a time.
constexpr uint32_t kSpreadRunOutputs = kShrinkWarps * kWarpOutputs;

// What the tables say of an entry, all of it asked for at once; rank 0 where there is no delta. Rows of many entries are routed.
struct Pair {
    Adapter a;
    Adapter b;

    __device__ __forceinline__ Pair(const DeltaParams& p, const DeltaSite& site, uint32_t entry) {
        const uint32_t at = min(entry, p.slots - 1);
        const uint64_t a_address = load_u64(reinterpret_cast<const uint64_t*>(site.a_table) + at);
        const uint64_t b_address = load_u64(reinterpret_cast<const uint64_t*>(site.b_table) + at);
        uint32_t rank = load_u32(reinterpret_cast<const uint32_t*>(site.rank_table) + at);
        rank = entry < p.slots && a_address != 0 ? min(rank, site.max_rank) : 0;
        a = Adapter{reinterpret_cast<const __nv_bfloat16*>(a_address), rank};
        b = Adapter{reinterpret_cast<const __nv_bfloat16*>(b_address), rank};
    }
};

// xa of a tile's 8 rows and 16 ranks: block sums added in order, as BF16. A thread a row and rank.
template <int kBlocks>
__device__ __forceinline__ void put_xa(const DeltaParams& p, char* xa, const float (&exchange)[kBlocks][kExchangeFloats]) {
    if (threadIdx.x >= kSmallTileRows * kRankGranule) return;
    const uint32_t row = threadIdx.x / kRankGranule;
    const uint32_t rank = threadIdx.x % kRankGranule;
    float sum = chunk_total(exchange[0], row, rank, chunks_of_block(p, 0));
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) sum += chunk_total(exchange[block], row, rank, chunks_of_block(p, block));
    *reinterpret_cast<__nv_bfloat16*>(xa + row * xa_pitch(kRankGranule) + rank * 2) = __float2bfloat16_rn(sum);
}

// `kBlocks` k blocks, up to 16 ranks, routed sites, out in whole runs of 8 outputs. Sites and outputs; tiles.
template <int kBlocks>
__device__ __forceinline__ void delta_spread(const DeltaParams& p, const SiteEnds& ends, uint32_t outputs) {
    extern __shared__ __align__(128) char shared[];
    __shared__ float exchange[kBlocks][kExchangeFloats];
    __shared__ __align__(16) char xa[kSmallTileRows * kRankGranule * 2];
    const uint32_t site_index = site_of(ends, blockIdx.x);
    const DeltaSite& site = p.sites[site_index];
    const uint32_t first_output = (blockIdx.x - site_start(ends, site_index)) * outputs;
    const Lane lane = lane_of_thread();
    const bool waited = begin(p, [&] {
        if (first_output > 0) return;
        const Adapter likely = likely_adapter(p, site, blockIdx.y, gridDim.y, 2 * kLikelyShare);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) prefetch_a(p, likely, ShrinkWork{uint32_t(block), 0, site_index});
    });
    const Tile tile = tile_at(p, blockIdx.y);  // not after the count: one latency less
    const uint32_t total = tile_total(p);
    if (blockIdx.y >= total || !tile_in_pass(p, tile)) {
        if (!waited) wait_for_predecessor();
        return;
    }
    const Pair pair(p, site, tile.entry);
    // The rows' numbers arrive together with the addresses of A and B.
    const uint32_t* const perm = reinterpret_cast<const uint32_t*>(p.perm) + tile.first;
    const uint32_t x_from = load_u32(perm + min(lane.group, tile.count - 1));
    const uint32_t out_rows[2] = {load_u32(perm + min(2 * lane.quarter, tile.count - 1)), load_u32(perm + min(2 * lane.quarter + 1, tile.count - 1))};
    if (pair.a.rank == 0) {
        if (!waited) wait_for_predecessor();
        return;
    }
    const ExpandTile t(p, site, tile, pair.b);
    const uint32_t end = min(first_output + outputs, site.n_out);
    WeightChunk<true> a[kBlocks];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) a[block].load(pair.a, 0, block * kBlockK + lane.warp * kChunkK, p.k_in, lane);
    ask_for_shared_rows<kShrinkThreads>(shared_address(shared), t.b + uint64_t(first_output) * kRankGranule, end - first_output);
    const __nv_bfloat16* const x_row_at = x_row_start(p, x_from);
    __nv_bfloat16* const rows[2] = {t.row_start(2 * lane.quarter, out_rows[0]), t.row_start(2 * lane.quarter + 1, out_rows[1])};
    if (!waited) wait_for_predecessor();
    uint4 x[kBlocks][kChunkSteps];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) load_x(p, x_row_at, block * kBlockK + lane.warp * kChunkK, lane, x[block]);
    const uint32_t warp_n = lane.warp * kWarpOutputs;
    const uint32_t n = first_output + warp_n + lane.group * 8;
    uint4 base[2][2];
    t.ask_for_base(base[0], rows, n);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        float sum[4] = {};
        a[block].multiply(sum, x[block]);
        put_chunk_sums(exchange[block], sum, lane);
    }
    __syncthreads();
    put_xa(p, xa, exchange);
    copy_async_wait<0>();
    __syncthreads();
    const uint32_t runs = first_output + warp_n < end ? (end - first_output - warp_n + kSpreadRunOutputs - 1) / kSpreadRunOutputs : 0;
    for (uint32_t first = 0; first < runs; first += 2) {
#pragma unroll
        for (int buffer = 0; buffer < 2; ++buffer) {
            const uint32_t run = first + buffer;
            if (run >= runs) break;
            const uint32_t at = n + run * kSpreadRunOutputs;
            if (run + 1 < runs) t.ask_for_base(base[1 - buffer], rows, at + kSpreadRunOutputs);
            float sum[4][4] = {};
            Weights16<> weights;
            weights.take(shared_address(shared), at - first_output, lane.quarter);
            weights.multiply(sum, xa + lane.group * xa_pitch(kRankGranule), t.ranks, lane.quarter);
            t.fold_rows(rows, at, base[buffer], sum);
        }
    }
}
