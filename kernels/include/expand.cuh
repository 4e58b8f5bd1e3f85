// Expand and fold: `out = bf16(out + scale * bf16(xa @ B^T))` with `xa = bf16(sum of partials)`.
//
// Block sums are added in order. The contraction over the rank runs in groups of 16, one MMA each, in order; groups past the true rank would add zeros
// and are skipped. Inside a group each lane quarter takes 4 adjacent ranks.
//
// A warp makes 64 outputs of 8 rows of a small tile at a time, or of 16 rows of a large one. B lies in registers so that a thread owns 8 adjacent outputs of a
// row, which it loads and stores as 16 bytes: see weights.cuh.
//
// The work is moving B and the outputs. B does not depend on earlier launches and is asked for before the wait for them. Of a large tile the
// base rows are asked for some way ahead, into shared memory that serves a warp as a deeper register file, so that no barrier stands between; and B stays in L2
// for the tiles of its adapter that are to come, whatever of out passes.
#pragma once

#include "primitives.cuh"
#include "tile.cuh"
#include "weights.cuh"

constexpr int kExpandWarps = kExpandThreads / 32;
constexpr int kBlockOutputs = kExpandWarps * kWarpOutputs;

// Bytes from one row of xa in shared memory to the next: an odd multiple of 32, so that the 16 lanes of a phase, 8 bytes each of 4 rows, are on
// different banks.
__device__ __forceinline__ uint32_t xa_pitch(uint32_t max_rank) { return (max_rank / kRankGranule | 1) * kRankGranule * 2; }

// What a block of the grid works on: runs of `kBlockOutputs` outputs of one site. `ends`: the sites' last blocks plus one.
struct ExpandWork {
    uint32_t site;
    uint32_t first_output;
};

__device__ __forceinline__ ExpandWork expand_work(const SiteEnds& ends, uint32_t runs) {
    const uint32_t site = site_of(ends, blockIdx.x);
    return ExpandWork{site, (blockIdx.x - site_start(ends, site)) * runs * kBlockOutputs};
}

// One tile at one site, as a thread sees it.
struct ExpandTile {
    const DeltaParams& p;
    const DeltaSite& site;
    Tile tile;
    const __nv_bfloat16* b;
    uint32_t b_stride;
    float scale;
    uint32_t ranks;  // padded to 16
    Lane lane;
    bool vector;     // 8 outputs are 16 aligned bytes

    __device__ __forceinline__ ExpandTile(const DeltaParams& p, const DeltaSite& site, const Tile& tile, const Adapter& adapter)
        : p(p),
          site(site),
          tile(tile),
          b(adapter.matrix),
          b_stride(site.a_table == 0 ? site.max_rank : padded_rank(adapter.rank)),
          scale(scale_of(site, tile.entry)),
          ranks(padded_rank(adapter.rank)),
          lane(lane_of_thread()),
          vector(site.out % 16 == 0 && site.out_stride % 8 == 0) {}

    __device__ __forceinline__ __nv_bfloat16* row_start(uint32_t row) const {
        return reinterpret_cast<__nv_bfloat16*>(site.out) + row * site.out_stride;
    }

    // Start of out row `row`, which is that of the `index`th of the tile's rows; null past the last one.
    __device__ __forceinline__ __nv_bfloat16* row_start(uint32_t index, uint32_t row) const {
        return index < tile.count ? row_start(row) : nullptr;
    }

    template <typename W, typename Reads = ReadOnce>
    __device__ __forceinline__ void load_weights(W& weights, uint32_t n, uint32_t first_rank, const Reads& reads = {}) const {
        const uint32_t first = min(n, site.n_out - 1);
        weights.load(b + uint64_t(first) * b_stride + first_rank, b_stride, site.n_out - first, ranks - first_rank, lane.quarter, reads);
    }

    // Base elements of the thread's two rows of a small tile, 8 outputs from `at` on, where there are such a row and such outputs; out is in whole runs of 8.
    __device__ __forceinline__ void ask_for_base(uint4 (&to)[2], __nv_bfloat16* const (&rows)[2], uint32_t at) const {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) to[odd] = load16_if(at < site.n_out && rows[odd] != nullptr, rows[odd] + at);
    }

    // Folds what four MMAs have of those outputs into them.
    __device__ __forceinline__ void fold_rows(__nv_bfloat16* const (&rows)[2], uint32_t at, const uint4 (&base)[2], const float (&sum)[4][4]) const {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            if (rows[odd] == nullptr || at >= site.n_out) continue;
            *reinterpret_cast<uint4*>(rows[odd] + at) = folded<2>(base[odd], odd, sum);
        }
    }

    // Folds `count` outputs one at a time, in order: a rare path that must not cost the others registers.
    __device__ __forceinline__ void fold_pieces(__nv_bfloat16* at, uint32_t count, int odd, const float (&sum)[4][4]) const {
        uint16_t* bits = reinterpret_cast<uint16_t*>(at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (2 * i < count) bits[2 * i] = uint16_t(fold(load_u16(bits + 2 * i), scale, sum[i][odd], 0));
            if (2 * i + 1 < count) bits[2 * i + 1] = uint16_t(fold(load_u16(bits + 2 * i + 1), scale, sum[i][odd + 2], 0));
        }
    }

    // 8 adjacent outputs of a row, of which each of four MMAs has two: `at` and `at + kNext` of the thread's sums.
    template <int kNext>
    __device__ __forceinline__ uint4 folded(const uint4& base, int at, const float (&sum)[4][4]) const {
        return make_uint4(fold(base.x, scale, sum[0][at], sum[0][at + kNext]), fold(base.y, scale, sum[1][at], sum[1][at + kNext]),
                          fold(base.z, scale, sum[2][at], sum[2][at + kNext]), fold(base.w, scale, sum[3][at], sum[3][at + kNext]));
    }

    __device__ __forceinline__ static uint32_t fold(uint32_t base, float scale, float even, float odd) {
        const uint32_t d = pack_bf16(even, odd);
        return pack_bf16(fmaf(scale, bf16_low(d), bf16_low(base)), fmaf(scale, bf16_high(d), bf16_high(base)));
    }
};

// xa of a small tile: the block sums of its rows, added in order, `kAhead` of them asked for at a time. 16 threads a row, 4 ranks a thread.
template <int kAhead>
__device__ __forceinline__ void load_small_xa(const ExpandTile& t, char* xa, uint32_t pitch) {
    static_assert(kExpandThreads == kSmallTileRows * 16 && kExpandThreads == kLargeTileRows);
    const uint32_t row = threadIdx.x / 16;
    if (row >= t.tile.count) return;
    for (uint32_t rank = threadIdx.x % 16 * 4; rank < t.ranks; rank += kRanksABlock) {
        XaSum<kAhead> sum;
        sum.ask(t.p, t.site, t.tile.first + row, rank, true);
        *reinterpret_cast<uint2*>(xa + row * pitch + rank * 2) = sum.finish(t.p);
    }
}

// xa of `count` rows of a large tile from `first` on, whose block sums are still to be added: 4 ranks a thread, as few idle as there can be.
__device__ __forceinline__ void load_open_xa(const ExpandTile& t, uint32_t first, uint32_t count, char* xa, uint32_t pitch) {
    const uint32_t quads = t.ranks / 4;
#pragma unroll 2
    for (uint32_t item = threadIdx.x; item < count * quads; item += kExpandThreads) {
        const uint32_t row = item / quads;
        const uint32_t rank = item % quads * 4;
        XaSum<4> sum;
        sum.ask(t.p, t.site, t.tile.first + first + row, rank, true);
        *reinterpret_cast<uint2*>(xa + row * pitch + rank * 2) = sum.finish(t.p);
    }
}

// The same of a tile whose sums are finished, asked for into shared memory. 8 threads a row, 8 ranks a thread.
__device__ __forceinline__ void ask_for_finished_xa(const ExpandTile& t, uint32_t first, uint32_t count, char* xa, uint32_t pitch) {
    for (uint32_t rank = threadIdx.x % 8 * 8; rank < t.ranks; rank += kRanksABlock) {
        for (uint32_t row = threadIdx.x / 8; row < count; row += kExpandThreads / 8) {
            copy_async16(xa + row * pitch + rank * 2, xa_at(t.p, t.site, t.tile.first + first + row) + rank, true);
        }
    }
    copy_async_commit();
}

// xa of `count` rows of a tile from `first` on.
__device__ __forceinline__ void load_xa(const ExpandTile& t, uint32_t first, uint32_t count, char* xa, uint32_t pitch) {
    if (t.tile.count <= kSmallTileRows) {
        load_small_xa<4>(t, xa, pitch);
    } else if ((t.p.flags & kFlagOpenSums) != 0) {
        load_open_xa(t, first, count, xa, pitch);
    } else {
        ask_for_finished_xa(t, first, count, xa, pitch);
        copy_async_wait<0>();
    }
}

// `runs` runs of outputs of a small tile, B of the next `kBuffers` of them in registers of type `W`, `kAhead` block sums asked for at a time. All that can be is
// asked for before the wait: what arrives while the block sums are handed over costs no time.
template <typename W, int kBuffers, int kAhead>
__device__ __forceinline__ void expand_small_tile(const ExpandTile& t, uint32_t first_output, uint32_t runs, char* xa,
                                                  bool waited) {
    const uint32_t pitch = xa_pitch(t.site.max_rank);
    const uint32_t warp_n = first_output + t.lane.warp * kWarpOutputs;
    const uint32_t n = warp_n + t.lane.group * 8;
    const uint32_t left = warp_n < t.site.n_out ? (t.site.n_out - warp_n + kBlockOutputs - 1) / kBlockOutputs : 0;
    // 32 ranks and more have no register left to know it with.
    const uint32_t here = W::kRanks == kRankGranule ? warp_uniform(min(runs, left)) : min(runs, left);
    W weights[kBuffers];
    uint4 base[kBuffers][2];
#pragma unroll
    for (int run = 0; run < kBuffers; ++run) {
        if (run < max(here, 1u)) t.load_weights(weights[run], n + run * kBlockOutputs, 0);
    }
    const uint32_t even = out_row_of(t.p, t.tile, 2 * t.lane.quarter);
    const uint32_t odd = out_row_of(t.p, t.tile, 2 * t.lane.quarter + 1);
    __nv_bfloat16* const rows[2] = {t.row_start(2 * t.lane.quarter, even), t.row_start(2 * t.lane.quarter + 1, odd)};
    if (!waited) wait_for_predecessor();
    t.ask_for_base(base[0], rows, n);
    load_small_xa<kAhead>(t, xa, pitch);
    __syncthreads();
    for (uint32_t first = 0; first < here; first += kBuffers) {
#pragma unroll
        for (int buffer = 0; buffer < kBuffers; ++buffer) {
            const uint32_t run = first + buffer;
            if (run >= here) break;
            const uint32_t at = n + run * kBlockOutputs;
            float sum[4][4] = {};
            weights[buffer].settle(t.ranks, t.lane.quarter);
            weights[buffer].multiply(sum, xa + t.lane.group * pitch, t.ranks, t.lane.quarter);
            if (kBuffers > 1 && run + 1 < here) t.ask_for_base(base[(buffer + 1) % kBuffers], rows, at + kBlockOutputs);
            t.fold_rows(rows, at, base[buffer], sum);
            if (run + kBuffers < here) t.load_weights(weights[buffer], at + kBuffers * kBlockOutputs, 0);
            if (kBuffers == 1 && run + 1 < here) t.ask_for_base(base[0], rows, at + kBlockOutputs);
        }
    }
}

// Small tiles, up to `kRanks` ranks (16, 32 or 64), out in whole runs of 8 outputs; a block takes `runs` runs of outputs of one tile. `kSpread`:
// rows of many entries whose out is not wide, so that a block has little to do: it leaves registers for other blocks rather than have more on its way itself.
template <int kRanks, bool kSpread = false>
__device__ __forceinline__ void expand_small(const DeltaParams& p, const SiteEnds& ends, uint32_t runs) {
    extern __shared__ __align__(128) char xa[];
    const ExpandWork work = expand_work(ends, runs);
    const DeltaSite& site = p.sites[work.site];
    const bool waited = begin(p);
    const Tile tile = tile_at(p, blockIdx.y);  // not after the count: one latency less
    Adapter adapter{nullptr, 0};
    if (blockIdx.y < tile_total(p) && tile_in_pass(p, tile)) adapter = adapter_of<Factor::kB>(p, site, tile.entry);
    if (adapter.rank == 0) {
        if (!waited) wait_for_predecessor();
        return;
    }
    const ExpandTile t(p, site, tile, adapter);
    constexpr int kAhead = kSpread ? 2 : 4;
    if (kRanks == 16 || (kRanks == 64 && t.ranks == 16)) {
        // 16 ranks are few bytes a run: two runs at a time.
        expand_small_tile<Weights16<>, kSpread ? 1 : 2, kAhead>(t, work.first_output, runs, xa, waited);
    } else if (kRanks == 32) {
        expand_small_tile<Weights<1>, 1, kAhead>(t, work.first_output, runs, xa, waited);
    } else {
        expand_small_tile<Weights<kRanksABlock / 32>, 1, kAhead>(t, work.first_output, runs, xa, waited);
    }
}

// What a warp makes at a time of a large tile: 64 outputs of 16 rows.
constexpr int kPieceBytes = kWarpOutputs * 2;
constexpr int kUnitBytes = kExpandUnitRows * kPieceBytes;

// Bytes of a row's address in the list of a tile's out rows.
constexpr int kAddressBytes = 8;

// Up to 16 or 64 ranks: a warp's B stays in registers while the tile's rows go by, 16 at a time. Base elements are asked for `kAhead - 1` units ahead, the
// first of them before the wait for the launch that this one follows, which does not write them.
template <int kRanks, int kAhead>
struct HeldExpand {
    using W = std::conditional_t<kRanks == kRankGranule, Weights16<InterleavedOutputs>, Weights<kRanks / 32, InterleavedOutputs>>;
    static constexpr int kGroups = kRanks / kRankGranule;
    static constexpr int kRingBytes = kExpandWarps * kAhead * kUnitBytes;

    const ExpandTile& t;
    char* ring;
    __nv_bfloat16* const* rows;  // past the tile's last one that one again
    char* xa;
    uint32_t warp_n;
    ReadAgain reads;

    // What the MMA takes of 16 rows of xa, of which `from` is the lane's place in the first 8.
    __device__ __forceinline__ void load_x(uint4 (&x)[kGroups], SharedAddress from, uint32_t pitch) const {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            if (group > 0 && group * kRankGranule >= t.ranks) break;
            const uint2 low = load_shared8(from + group * kRankGranule * 2);
            const uint2 high = load_shared8(from + 8 * pitch + group * kRankGranule * 2);
            x[group] = in_mma_order(low.x, high.x, low.y, high.y);
        }
    }

    __device__ __forceinline__ void run() const {
        const uint32_t units = (t.tile.count + kExpandUnitRows - 1) / kExpandUnitRows;
        W weights;
        t.load_weights(weights, warp_n + InterleavedOutputs::first(t.lane), 0, reads);

        const SharedAddress own_ring = shared_address(ring) + t.lane.warp * kAhead * kUnitBytes;
        const SharedAddress row_list = shared_address(rows);
        const uint32_t piece = threadIdx.x % 8;
        const uint32_t asked_n = warp_n + piece * 8;
        const SharedAddress ask_to = own_ring + stage_offset<kPieceBytes>(t.lane.group / 2, piece);
        SharedAddress ask_row = row_list + t.lane.group / 2 * kAddressBytes;
        const SharedAddress ask_end = asked_n < t.site.n_out ? row_list + units * kExpandUnitRows * kAddressBytes : 0;
        const auto ask_next = [&](int slot) {
            if (ask_row < ask_end) {
#pragma unroll
                for (int i = 0; i < kExpandUnitRows / 4; ++i) {
                    copy_async16(ask_to + slot * kUnitBytes + i * 4 * kPieceBytes, load_shared_u64(ask_row + i * 4 * kAddressBytes) + asked_n * 2);
                }
            }
            copy_async_commit();
            ask_row += kExpandUnitRows * kAddressBytes;
        };
#pragma unroll
        for (int slot = 0; slot < kAhead - 1; ++slot) ask_next(slot);

        const uint32_t pitch = xa_pitch(t.site.max_rank);
        wait_for_predecessor();
        load_xa(t, 0, t.tile.count, xa, pitch);
        __syncthreads();
        weights.settle(t.ranks, t.lane.quarter);

        SharedAddress x_row = shared_address(xa) + t.lane.group * pitch + first_of_quarter(t.lane.quarter) * 2;
        SharedAddress row = row_list + t.lane.group * kAddressBytes;
        const SharedAddress own_place = own_ring + stage_offset<kPieceBytes>(t.lane.group, t.lane.quarter);
        const uint32_t own_n = warp_n + t.lane.quarter * 8;
        const bool inside[2] = {own_n < t.site.n_out, own_n + 32 < t.site.n_out};
#pragma unroll 1
        for (uint32_t first = 0; first < units; first += kAhead) {
#pragma unroll
            for (int slot = 0; slot < kAhead; ++slot) {
                if (slot > 0 && first + slot >= units) break;
                uint4 x[kGroups];
                load_x(x, x_row, pitch);
                x_row += kExpandUnitRows * pitch;
                __syncwarp();
                ask_next((slot + kAhead - 1) % kAhead);
                const uint64_t out[2] = {load_shared_u64(row), load_shared_u64(row + 8 * kAddressBytes)};
                copy_async_wait<kAhead - 1>();
                __syncwarp();
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t n = own_n + half * 32;
                    float sum[4][4] = {};
                    weights.multiply_half(sum, half, x, t.ranks);
#pragma unroll
                    for (int high = 0; high < 2; ++high) {
                        const uint4 base = load_shared16((own_place ^ half * 64) + slot * kUnitBytes + high * 8 * kPieceBytes);
                        const uint4 v = t.folded<1>(base, 2 * high, sum);
                        if (!inside[half] || (first + slot) * kExpandUnitRows + t.lane.group + high * 8 >= t.tile.count) continue;
                        store16(out[high] + n * 2, v);
                    }
                }
                row += kExpandUnitRows * kAddressBytes;
            }
        }
    }
};

// Rows of a large tile whose xa a block has room for where there may be 512 ranks.
constexpr int kAnyRows = kLargeTileRows / 2;

// Any rank and any alignment of out: B is read again, 64 ranks at a time, for every four times 8 rows. `first` is a multiple of 8, the first of up to
// `kAnyRows` rows whose xa is there.
__device__ __forceinline__ void expand_any(const ExpandTile& t, __nv_bfloat16* const* rows, uint32_t first_row, uint32_t n, const char* xa) {
    constexpr int kRowGroups = 4;
    const uint32_t pitch = xa_pitch(t.site.max_rank);
    const uint32_t groups = (min(t.tile.count - first_row, uint32_t(kAnyRows)) + 7) / 8;
    const uint32_t count = n < t.site.n_out ? min(8u, t.site.n_out - n) : 0;
    for (uint32_t first = 0; first < groups; first += kRowGroups) {
        float sum[kRowGroups][4][4] = {};
        for (uint32_t rank = 0; rank < t.ranks; rank += kRanksABlock) {
            Weights<kRanksABlock / 32> weights;
            t.load_weights(weights, n, rank);
            weights.settle(t.ranks - rank, t.lane.quarter);
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j) {
                if (first + j >= groups) break;
                const char* x_row = xa + ((first + j) * 8 + t.lane.group) * pitch + rank * 2;
                weights.multiply(sum[j], x_row, t.ranks - rank, t.lane.quarter);
            }
        }
#pragma unroll
        for (int j = 0; j < kRowGroups; ++j) {
            if (first + j >= groups) break;
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const uint32_t index = first_row + (first + j) * 8 + 2 * t.lane.quarter + odd;
                if (index >= t.tile.count || count == 0) continue;
                __nv_bfloat16* row = rows[index];
                if (t.vector && count == 8) {
                    *reinterpret_cast<uint4*>(row + n) = t.folded<2>(load16<0>(row + n), odd, sum[j]);
                } else {
                    t.fold_pieces(row + n, count, odd, sum[j]);
                }
            }
        }
    }
}

// Tiles of both kinds. `kRanks`: the largest padded rank, 16 or 64 where out takes whole runs of 8 outputs, 512 for whatever else.
template <int kRanks>
__device__ __forceinline__ void expand_mixed(const DeltaParams& p, const SiteEnds& ends) {
    constexpr bool kAny = kRanks > kRanksABlock;
    using Held = HeldExpand<kAny ? kRanksABlock : kRanks, kRanks == kRankGranule ? kExpandAhead16 : kExpandAhead64>;
    extern __shared__ __align__(128) char shared[];
    __shared__ __nv_bfloat16* rows[kLargeTileRows];
    const ExpandWork work = expand_work(ends, 1);
    const DeltaSite& site = p.sites[work.site];
    char* xa = kAny ? shared : shared + Held::kRingBytes;
    begin(p);
    for (uint32_t index = blockIdx.y; index < tile_total(p); index += gridDim.y) {
        const Tile tile = tile_at(p, index);
        const bool b_serves_next = !kAny && entry_goes_on(p, index, tile);
        const Adapter adapter = adapter_of<Factor::kB>(p, site, tile.entry);
        if (!tile_in_pass(p, tile) || adapter.rank == 0) continue;
        const ExpandTile t(p, site, tile, adapter);
        __syncthreads();
        rows[threadIdx.x] = t.row_start(out_row_of(t.p, t.tile, threadIdx.x));
        __syncthreads();
        const uint32_t warp_n = work.first_output + t.lane.warp * kWarpOutputs;
        if constexpr (kAny) {
            const uint32_t n = warp_n + AdjacentOutputs::first(t.lane);
            wait_for_predecessor();
            for (uint32_t first = 0; first < tile.count; first += kAnyRows) {
                if (first > 0) __syncthreads();
                const uint32_t pitch = xa_pitch(site.max_rank);
                load_xa(t, first, min(tile.count - first, uint32_t(kAnyRows)), xa, pitch);
                __syncthreads();
                expand_any(t, rows, first, n, xa);
            }
        } else {
            Held{t, shared, rows, xa, warp_n, ReadAgain(b_serves_next)}.run();
        }
    }
    wait_for_predecessor();
}
