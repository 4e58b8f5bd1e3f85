// Expand and fold of rows that are spread over many entries, so that tiles are seldom full and what a block does once a tile counts as much as what it does for its
// rows. A block makes several runs of outputs of a tile; while it works on one, B of the next is on its way. B is moved into the MMA's order once a run, not for
// every 8 rows.
#pragma once

#include "expand.cuh"

// B of a run of outputs, `kRankGroups` groups of 16 ranks, in the order in which MMAs take it.
template <int kRankGroups>
struct OrderedWeights {
    uint4 quad[kRankGroups][4];

    __device__ __forceinline__ void take(const Weights16<>& from) {
        static_assert(kRankGroups == 1);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4& v = from.pair[i];
            quad[0][i] = in_mma_order(v.x, v.z, v.y, v.w);
        }
    }

    __device__ __forceinline__ void take(const Weights<1>& from) {
        static_assert(kRankGroups == 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 low = from.row[0][2 * i];
            const uint4 high = from.row[0][2 * i + 1];
            quad[0][i] = in_mma_order(low.x, high.x, low.y, high.y);
            quad[1][i] = in_mma_order(low.z, high.z, low.w, high.w);
        }
    }

    __device__ __forceinline__ void multiply(float (&sum)[4][4], const char* xa, uint32_t ranks, uint32_t quarter) const {
#pragma unroll
        for (int group = 0; group < kRankGroups; ++group) {
            if (group * kRankGranule >= ranks) break;
            const uint2 x = *reinterpret_cast<const uint2*>(xa + (group * kRankGranule + first_of_quarter(quarter)) * 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) mma_16x8x16(sum[i], quad[group][i], x.x, x.y);
        }
    }
};

// The ring of base elements of a block.
template <int kThreads>
constexpr int kBaseRingBytes = 2 * kSpreadAhead * kThreads * 16;

// Place of a thread among its warp's: the 8 lanes of a row are neighbours as they arrive, and the 8 lanes of a phase of reads are on different banks.
__device__ __forceinline__ uint32_t base_place(const Lane& lane) {
    return lane.warp * 32 + lane.quarter * 8 + (lane.group ^ 2 * lane.quarter);
}

// The thread's base elements of a tile: two rows of every 8, 8 outputs of every run. They are asked for into a ring in shared memory, `kSpreadAhead - 1` times 8 rows
// ahead of their use: all rows of a run of outputs, then those of the next.
template <int kThreads>
struct SpreadBase {
    static constexpr int kPlaceBytes = kThreads * 16;
    static constexpr int kRunOutputs = kThreads / 32 * kWarpOutputs;

    char* places;             // the thread's first
    const ulonglong2* pairs;  // addresses of its two out rows of the first 8
    uint32_t groups;          // of 8 rows
    uint32_t left[2];         // of the tile's rows, from the thread's first and second one on
    uint32_t end;             // of the block's outputs
    uint32_t asked;           // times 8 rows
    uint32_t group;           // the next to be asked for
    uint32_t n;               // its output

    __device__ __forceinline__ SpreadBase(char* ring, char* const* rows, uint32_t count, const Lane& lane, uint32_t n, uint32_t end)
        : places(ring + base_place(lane) * 16),
          pairs(reinterpret_cast<const ulonglong2*>(rows) + lane.quarter),
          groups((count + 7) / 8),
          left{count - min(count, 2 * lane.quarter), count - min(count, 2 * lane.quarter + 1)},
          end(end),
          asked(0),
          group(0),
          n(n) {}

    // Of a warp whose first outputs are those from `first` on, where the block's end at `end`.
    __device__ __forceinline__ static uint32_t runs(uint32_t first, uint32_t end) { return first < end ? (end - first + kRunOutputs - 1) / kRunOutputs : 0; }

    __device__ __forceinline__ char* place(uint32_t unit) const { return places + unit % kSpreadAhead * 2 * kPlaceBytes; }

    __device__ __forceinline__ void ask() {
        char* to = place(asked);
        const ulonglong2 pair = pairs[group * 4];
        if (n < end && group * 8 < left[0]) copy_async16(to, reinterpret_cast<const char*>(pair.x) + n * 2, true);
        if (n < end && group * 8 < left[1]) copy_async16(to + kPlaceBytes, reinterpret_cast<const char*>(pair.y) + n * 2, true);
        copy_async_commit();
        ++asked;
        if (++group == groups) {
            group = 0;
            n += kRunOutputs;
        }
    }

    __device__ __forceinline__ void ask_for_first() {
#pragma unroll 1
        for (int i = 0; i < kSpreadAhead - 1; ++i) ask();
    }

    // Folds what was asked for as the `unit`th: the `group`th 8 rows, outputs from `at` on.
    __device__ __forceinline__ void fold(const ExpandTile& t, uint32_t unit, uint32_t group, uint32_t at, const float (&sum)[4][4]) const {
        copy_async_wait<kSpreadAhead - 1>();
        const char* from = place(unit);
        const ulonglong2 pair = pairs[group * 4];
        if (at < end && group * 8 < left[0]) {
            *reinterpret_cast<uint4*>(pair.x + at * 2) = t.folded<2>(*reinterpret_cast<const uint4*>(from), 0, sum);
        }
        if (at < end && group * 8 < left[1]) {
            *reinterpret_cast<uint4*>(pair.y + at * 2) = t.folded<2>(*reinterpret_cast<const uint4*>(from + kPlaceBytes), 1, sum);
        }
    }
};

// A warp's runs of outputs of a tile, the first from `n` on. `coming` is B of that one; `xa` is the lane's row of the first 8, `pitch` bytes from the next; the first
// of the base elements are asked for.
template <int kThreads, typename W>
__device__ __forceinline__ void make_runs(const ExpandTile& t, SpreadBase<kThreads>& base, W& coming, const char* xa, uint32_t pitch, uint32_t n, uint32_t runs) {
    constexpr int kRunOutputs = SpreadBase<kThreads>::kRunOutputs;
    runs = warp_uniform(runs);
    uint32_t unit = 0;
#pragma unroll 1
    for (uint32_t run = 0; run < runs; ++run, n += kRunOutputs) {
        OrderedWeights<W::kRanks / kRankGranule> weights;
        coming.settle(t.ranks, t.lane.quarter);
        weights.take(coming);
        if (run + 1 < runs) t.load_weights(coming, n + kRunOutputs, 0);
        const char* x_row = xa;
#pragma unroll 1
        for (uint32_t group = 0; group < base.groups; ++group, ++unit, x_row += 8 * pitch) {
            float sum[4][4] = {};
            weights.multiply(sum, x_row, t.ranks, t.lane.quarter);
            base.ask();
            base.fold(t, unit, group, n, sum);
        }
    }
}

// xa of a tile's rows, whose block sums are still to be added: 4 ranks a thread, of up to `kRanks`.
template <int kRanks>
__device__ __forceinline__ void load_spread_xa(const ExpandTile& t, char* xa, uint32_t pitch) {
    constexpr uint32_t kQuads = kRanks / 4;
    const uint32_t rank = threadIdx.x % kQuads * 4;
    if (rank >= t.ranks) return;
#pragma unroll 2
    for (uint32_t row = threadIdx.x / kQuads; row < t.tile.count; row += kExpandThreads / kQuads) {
        XaSum<2> sum;
        sum.ask(t.p, t.site, t.tile.first + row, rank, true);
        *reinterpret_cast<uint2*>(xa + row * pitch + rank * 2) = sum.finish(t.p);
    }
}

// Up to `W::kRanks` ranks, out in whole runs of 8 outputs, sums of all tiles open; a block takes `runs` runs of outputs of a tile.
template <typename W>
__device__ __forceinline__ void expand_spread(const DeltaParams& p, const SiteEnds& ends, uint32_t runs) {
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(16) char* rows[kLargeTileRows];
    const ExpandWork work = expand_work(ends, runs);
    const DeltaSite& site = p.sites[work.site];
    const bool waited = begin(p);
    Tile tile = tile_at(p, blockIdx.y);  // not after the count: one latency less
    const uint32_t total = tile_total(p);
    const Lane lane = lane_of_thread();
    const uint32_t pitch = xa_pitch(site.max_rank);
    char* const xa = shared + kBaseRingBytes<kExpandThreads>;
    const uint32_t end = min(work.first_output + runs * kBlockOutputs, site.n_out);
    const uint32_t warp_n = work.first_output + lane.warp * kWarpOutputs;
    const uint32_t own_runs = SpreadBase<kExpandThreads>::runs(warp_n, end);
    const uint32_t first_n = warp_n + lane.group * 8;
    for (uint32_t index = blockIdx.y; index < total; index += gridDim.y) {
        if (index != blockIdx.y) tile = tile_at(p, index);
        if (!tile_in_pass(p, tile)) continue;
        const uint32_t row = out_row_of(p, tile, threadIdx.x);  // on its way with the addresses of B
        const Adapter adapter = adapter_of<Factor::kB>(p, site, tile.entry);
        if (adapter.rank == 0) continue;
        const ExpandTile t(p, site, tile, adapter);
        __syncthreads();
        rows[threadIdx.x] = reinterpret_cast<char*>(site.out) + row * site.out_stride * 2;
        __syncthreads();
        W coming;
        t.load_weights(coming, first_n, 0);
        SpreadBase<kExpandThreads> base(shared, rows, tile.count, lane, first_n, end);
        base.ask_for_first();
        wait_for_predecessor();
        load_spread_xa<W::kRanks>(t, xa, pitch);
        __syncthreads();
        make_runs(t, base, coming, xa + lane.group * pitch, pitch, first_n, own_runs);
    }
    if (!waited) wait_for_predecessor();
}
