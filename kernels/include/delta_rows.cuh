// A whole delta in one launch: tiles of some rows each, of many entries.
//
// A block has a tile at a site and up to `outputs` of its outputs. It has the rows pass by A as `shrink_streamed` does and then makes the outputs as `expand_spread`
// does. So some blocks ask for A while others move out, where of two launches all do the one and then all the other, and end and start in between.
#pragma once

#include "delta_spread.cuh"
#include "expand_spread.cuh"
#include "shrink_streamed.cuh"

// What a block has of shared memory one after the other: x on its way, base elements on theirs.
constexpr int kDeltaRingBytes = kStreamSlots * kSlotBytes;
static_assert(kDeltaRingBytes >= kBaseRingBytes<kShrinkThreads>);

// A chunk of 16 rows of A on its way. The 8 lanes of two adjacent rows ask for whole lines, of the one row and then of the other: the L2 serves fewer requests so.
// What a lane has of the wrong row is what the lane 4 from it wants.
struct ChunkLines {
    static constexpr int kLines = kChunkSteps / 2;
    static constexpr int kLineElements = kLineBytes / 2;
    uint4 row[4][kLines];  // the two of the lower 8 rows, the two of the upper

    // From row `first_rank` on, at `k`. Past the true rank the last row is repeated: it makes sums that meet B's zeros. Whole chunks take loads without a predicate,
    // which are quicker.
    __device__ __forceinline__ void load(const Adapter& adapter, uint32_t first_rank, uint32_t k, uint32_t k_in, const Lane& lane) {
        const uint32_t at = k + (lane.group % 2 * 4 + lane.quarter) * 8;
        const int left = int(k_in - at);
        const __nv_bfloat16* from[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t rank = first_rank + i / 2 * 8 + lane.group / 2 * 2 + i % 2;
            from[i] = adapter.matrix + uint64_t(min(rank, adapter.rank - 1)) * k_in + at;
        }
        if (left > kLineElements) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                row[i][0] = load_weights16<0>(from[i]);
                row[i][1] = load_weights16<kLineBytes>(from[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                row[i][0] = load_weights16_if<0>(left > 0, from[i]);
                row[i][1] = make_uint4(0, 0, 0, 0);
            }
        }
    }

    // What the lane has of a line of its own one of two rows: both steps.
    __device__ __forceinline__ static void own_steps(uint4& first, uint4& second, const uint4& even, const uint4& odd) {
        const bool is_odd = lane_of_thread().group % 2 == 1;
        const uint4 other = is_odd ? even : odd;
        const uint4 got = make_uint4(__shfl_xor_sync(0xffffffffu, other.x, 4), __shfl_xor_sync(0xffffffffu, other.y, 4), __shfl_xor_sync(0xffffffffu, other.z, 4),
                                     __shfl_xor_sync(0xffffffffu, other.w, 4));
        first = is_odd ? got : even;
        second = is_odd ? odd : got;
    }

    __device__ __forceinline__ WeightChunk<true> settled() const {
        WeightChunk<true> own;
#pragma unroll
        for (int line = 0; line < kLines; ++line) {
            own_steps(own.low[2 * line], own.low[2 * line + 1], row[0][line], row[1][line]);
            own_steps(own.high[2 * line], own.high[2 * line + 1], row[2][line], row[3][line]);
        }
        return own;
    }
};

// xa of a block's rows: `kGroups` groups of 16 ranks and `kBlocks` k blocks.
template <int kGroups, int kBlocks>
struct DeltaXa {
    static constexpr int kRanks = kGroups * kRankGranule;

    char* xa;
    float* first;  // sums of the first k block, where there are two: [kLargeTileRows][kRanks]
    uint32_t pitch;

    __device__ __forceinline__ explicit DeltaXa(char* shared)
        : xa(shared), first(reinterpret_cast<float*>(shared + kLargeTileRows * xa_pitch(kRanks))), pitch(xa_pitch(kRanks)) {}

    // By all threads, with the chunk sums of 8 rows from `row` on. A thread adds up the same row and rank of every k block.
    __device__ __forceinline__ void put(const DeltaParams& p, const float (&exchange)[kGroups][kExchangeFloats], uint32_t row, uint32_t block) const {
        const ThreadSum own;
        if (own.group >= kGroups) return;
        float sum = own.total(exchange, chunks_of_block(p, block));
        const uint32_t at = own.group * kRankGranule + own.rank;
        float& before = first[(row + own.row) * kRanks + at];
        if (block > 0) sum = before + sum;
        if (block + 1 < kBlocks) {
            before = sum;
        } else {
            *reinterpret_cast<__nv_bfloat16*>(xa + (row + own.row) * pitch + at * 2) = __float2bfloat16_rn(sum);
        }
    }
};

// Where the rows of a tile are.
struct TileRows {
    const __nv_bfloat16* x[kLargeTileRows];
    alignas(16) char* out[kLargeTileRows];

    // By each thread, with the out row of its own.
    __device__ __forceinline__ void put(const DeltaParams& p, const DeltaSite& site, uint32_t row) {
        if (threadIdx.x >= kLargeTileRows) return;
        x[threadIdx.x] = x_row_start(p, row);
        out[threadIdx.x] = reinterpret_cast<char*>(site.out) + row * site.out_stride * 2;
    }
};

// The rows of a tile, or a share of them, which pass by A a k block at a time; `x` are their x rows.
struct PassingRows {
    const DeltaParams& p;
    char* ring;
    const __nv_bfloat16* const* x;
    uint32_t count;

    // Asks for the first of them.
    __device__ __forceinline__ XStream ask(uint32_t k_block) const {
        const XStream stream(p, ring, k_block, lane_of_thread());
#pragma unroll
        for (int slot = 0; slot < kStreamSlots; ++slot) stream.ask(x, slot, count);
        return stream;
    }

    // `loaded` is the k block's of A. `put` is called as `store` of `stream_rows` is.
    template <int kGroups, typename Put>
    __device__ __forceinline__ void pass(const XStream& stream, const ChunkLines (&loaded)[kGroups], const Put& put) const {
        OrderedChunk ordered[kGroups];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) ordered[group].take(loaded[group].settled());
        stream_rows<1>(count, ordered, stream, x, put);
    }
};

// 16 ranks of a k block, of an adapter whose rank may be lower than theirs.
__device__ __forceinline__ void load_ranks(ChunkLines& a, const DeltaParams& p, const Adapter& adapter, const ShrinkWork& work) {
    const Lane lane = lane_of_thread();
    const uint32_t k_in = work.first_rank < adapter.rank ? p.k_in : 0;  // a row of no elements: nothing is loaded
    a.load(adapter, work.first_rank, work.k_block * kBlockK + lane.warp * kChunkK, k_in, lane);
}

template <int kGroups>
__device__ __forceinline__ void load_block(ChunkLines (&a)[kGroups], const DeltaParams& p, const Adapter& adapter, uint32_t k_block) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) load_ranks(a[group], p, adapter, ShrinkWork{k_block, uint32_t(group * kRankGranule), 0});
}

// Asks for a k block of A of an entry that is likely to have rows, while rows are grouped: `kGroups` groups of 16 ranks.
template <int kGroups>
__device__ __forceinline__ void prefetch_likely(const DeltaParams& p, uint32_t site, uint32_t k_block) {
    const uint32_t at_once = max(kDeltaBlocks * multiprocessors() / gridDim.x, 1u);
    const Adapter likely = likely_adapter(p, p.sites[site], blockIdx.y, at_once, kLikelyShare);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) prefetch_a(p, likely, ShrinkWork{k_block, uint32_t(group * kRankGranule), site});
}

// The outputs that a block makes of a site: up to `outputs` from `first` on.
struct OwnOutputs {
    uint32_t end;
    uint32_t warp_n;  // the warp's first
    uint32_t n;       // the thread's first

    __device__ __forceinline__ OwnOutputs(const DeltaSite& site, uint32_t first, uint32_t outputs) {
        const Lane lane = lane_of_thread();
        end = min(first + outputs, site.n_out);
        warp_n = first + lane.warp * kWarpOutputs;
        n = warp_n + lane.group * 8;
    }

    __device__ __forceinline__ uint32_t runs() const { return SpreadBase<kShrinkThreads>::runs(warp_n, end); }
};

// Up to `kGroups` groups of 16 ranks, `kBlocks` k blocks, routed sites, out in whole runs of 8 outputs. Sites and outputs; tiles.
template <int kGroups, int kBlocks, typename W>
__device__ __forceinline__ void delta_rows(const DeltaParams& p, const SiteEnds& ends, uint32_t outputs) {
    extern __shared__ __align__(128) char shared[];
    __shared__ TileRows rows;
    const uint32_t site_index = site_of(ends, blockIdx.x);
    const DeltaSite& site = p.sites[site_index];
    const uint32_t first_output = (blockIdx.x - site_start(ends, site_index)) * outputs;
    begin(p, [&] {
        if (first_output == 0) prefetch_likely<kGroups>(p, site_index, 0);
    });
    const Tile tile = tile_at(p, blockIdx.y);  // not after the count: one latency less
    if (blockIdx.y >= tile_total(p) || !tile_in_pass(p, tile)) return wait_for_predecessor();
    const uint32_t row = out_row_of(p, tile, threadIdx.x);  // on its way with the addresses of A and B
    const Pair pair(p, site, tile.entry);
    if (pair.a.rank == 0) return wait_for_predecessor();
    rows.put(p, site, row);
    const ExpandTile t(p, site, tile, pair.b);
    const OwnOutputs outs(site, first_output, outputs);
    // 16 ranks leave registers for B while rows pass by A.
    constexpr bool kEarlyB = kGroups == 1;
    W coming;
    if (kEarlyB) t.load_weights(coming, outs.n, 0);
    ChunkLines loaded[kGroups];
    load_block(loaded, p, pair.a, 0);
    __syncthreads();
    wait_for_predecessor();
    const DeltaXa<kGroups, kBlocks> xa(shared + kDeltaRingBytes);
    const PassingRows passing{p, shared, rows.x, tile.count};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        passing.pass(passing.ask(block), loaded, [&](const float(&sums)[kGroups][kExchangeFloats], uint32_t first) { xa.put(p, sums, first, block); });
        if (block + 1 < kBlocks) {
            load_block(loaded, p, pair.a, block + 1);
            __syncthreads();
        }
    }
    if (!kEarlyB) t.load_weights(coming, outs.n, 0);
    __syncthreads();
    SpreadBase<kShrinkThreads> base(shared, rows.out, tile.count, t.lane, outs.n, outs.end);
    base.ask_for_first();
    make_runs(t, base, coming, xa.xa + t.lane.group * xa.pitch, xa.pitch, outs.n, outs.runs());
}
