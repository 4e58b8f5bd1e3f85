// Expand and fold: `out = bf16(out + scale * bf16(xa @ B^T))` with `xa = bf16(sum of partials)`.
//
// Block sums are added in order. The contraction over the rank, padded to 16, runs in blocks of 32 (two MMAs) and at the end one of 16 where
// the padded rank is an odd multiple of 16: what a row gets depends on its adapter's true rank alone, never on the pool's. Inside a block of 32
// lane quarter t takes ranks 8t..8t+7, inside one of 16 ranks 4t..4t+3.
//
// A warp makes 64 outputs of 8 rows at a time with four MMAs whose 16 rows are interleaved: rows g and g + 8 of MMA i are outputs 8g + 2i and
// 8g + 2i + 1. So a thread owns 8 adjacent outputs of two rows, which it loads and stores as 16 bytes.
//
// The work is moving B and the outputs, so as much of both as possible is asked for before anything is used. Shared memory serves as a deeper
// register file: a thread copies the very fragments of B and the very base elements that it will use to places of its own, so no
// barrier stands between the copies and the arithmetic. B does not depend on earlier launches and is asked for before the wait for them.
#pragma once

#include "primitives.cuh"
#include "shrink.cuh"
#include "tile.cuh"

constexpr int kExpandThreads = 128;
constexpr int kExpandWarps = kExpandThreads / 32;
constexpr int kWarpOutputs = 64;
constexpr int kBlockOutputs = kExpandWarps * kWarpOutputs;

// Bytes from one row of xa in shared memory to the next: 16 ranks are read 8 bytes a lane, more are read 16 bytes a lane.
__device__ __forceinline__ uint32_t xa_pitch(uint32_t max_rank) {
    return max_rank <= kRankGranule ? kRankGranule * 2 : (max_rank * 2 + 127) / 128 * 128 + 64;
}

// The 8 rows of B that a thread feeds to four MMAs, in up to `kBlocks` blocks of 32 ranks from `first` on, in registers.
template <int kBlocks>
struct OutputWeights {
    uint4 row[kBlocks][8];

    __device__ __forceinline__ void load(const __nv_bfloat16* b, uint64_t stride, uint32_t n, uint32_t n_out,
                                         uint32_t first, uint32_t padded_rank, uint32_t quarter) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const uint32_t rank = first + block * 32;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const __nv_bfloat16* from = b + (n + i) * stride + rank;
                row[block][i] = load_weights16_if(n + i < n_out && rank + 32 <= padded_rank, from + quarter * 8);
            }
            if (rank + 16 != padded_rank) continue;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint2 v = load_weights8_if(n + i < n_out, b + (n + i) * stride + rank + quarter * 4);
                row[block][i] = make_uint4(v.x, v.y, 0, 0);
            }
        }
    }

    // Adds this part of the contraction to the sums of 8 rows; `xa` is the row of the lane's group.
    __device__ __forceinline__ void multiply(float (&sum)[4][4], const char* xa, uint32_t first, uint32_t padded_rank,
                                             uint32_t quarter) const {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const uint32_t rank = first + block * 32;
            if (rank >= padded_rank) break;
            if (padded_rank - rank >= 32) {
                const uint4 x = *reinterpret_cast<const uint4*>(xa + rank * 2 + quarter * 16);
#pragma unroll
                for (int i = 0; i < 4; ++i) mma_pair(sum[i], row[block][2 * i], row[block][2 * i + 1], x);
            } else {
                const uint2 x = *reinterpret_cast<const uint2*>(xa + rank * 2 + quarter * 8);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    mma_16x8x16(sum[i], row[block][2 * i].x, row[block][2 * i + 1].x, row[block][2 * i].y,
                                row[block][2 * i + 1].y, x.x, x.y);
                }
            }
        }
    }
};

// 8 adjacent outputs of one row. `whole`: they can be moved as 16 aligned bytes.
struct OutputRun {
    __nv_bfloat16* at;
    uint32_t count;
    bool whole;

    __device__ __forceinline__ uint4 load() const {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (whole) return load16_if(true, at);
        uint32_t* words = reinterpret_cast<uint32_t*>(&v);
        const uint16_t* bits = reinterpret_cast<const uint16_t*>(at);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < count) words[i / 2] |= uint32_t(__ldcg(bits + i)) << (i % 2 * 16);
        }
        return v;
    }

    __device__ __forceinline__ void store(const uint4& v) const {
        if (whole) {
            *reinterpret_cast<uint4*>(at) = v;
            return;
        }
        const uint32_t* words = reinterpret_cast<const uint32_t*>(&v);
        uint16_t* bits = reinterpret_cast<uint16_t*>(at);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < count) bits[i] = uint16_t(words[i / 2] >> (i % 2 * 16));
        }
    }
};

__device__ __forceinline__ uint32_t fold(uint32_t base, float scale, float even, float odd) {
    const float d0 = __bfloat162float(__float2bfloat16_rn(even));
    const float d1 = __bfloat162float(__float2bfloat16_rn(odd));
    const uint32_t low = float_to_bf16_bits(fmaf(scale, d0, __uint_as_float(base << 16)));
    const uint32_t high = float_to_bf16_bits(fmaf(scale, d1, __uint_as_float(base & 0xffff0000u)));
    return low | high << 16;
}

// What a block of the grid works on: `steps` runs of `kBlockOutputs` outputs of one site.
struct ExpandWork {
    uint32_t site;
    uint32_t first_output;
};

__device__ __forceinline__ ExpandWork expand_work(const DeltaParams& p, uint32_t steps) {
    uint32_t rest = blockIdx.x;
    uint32_t site = 0;
    const uint32_t outputs = steps * kBlockOutputs;
    while (site + 1 < p.site_count) {
        const uint32_t blocks = (p.sites[site].n_out + outputs - 1) / outputs;
        if (rest < blocks) break;
        rest -= blocks;
        ++site;
    }
    return ExpandWork{site, rest * outputs};
}

// Shared memory as places of 16 bytes, one of each number for every thread.
constexpr int kPlaceBytes = kExpandThreads * 16;
constexpr int kMaxRuns = 4;

// Places that B takes for a run of outputs at a padded rank of up to 64.
__device__ __forceinline__ uint32_t weight_places(uint32_t padded_rank) { return padded_rank / 4; }

// One tile at one site, as a thread sees it.
struct ExpandTile {
    const DeltaParams& p;
    const DeltaSite& site;
    Tile tile;
    Adapter b;
    float scale;
    uint32_t padded_rank;
    Lane lane;
    bool vector;  // runs of 8 outputs are 16 aligned bytes

    __device__ __forceinline__ ExpandTile(const DeltaParams& p, const DeltaSite& site, const Tile& tile, const Adapter& b)
        : p(p),
          site(site),
          tile(tile),
          b(b),
          scale(scale_of(site, tile.entry)),
          padded_rank((b.rank + kRankGranule - 1) / kRankGranule * kRankGranule),
          lane(lane_of_thread()),
          vector(site.out % 16 == 0 && site.out_stride % 8 == 0) {}

    // Start of the `index`th of the tile's rows; null past the last one.
    __device__ __forceinline__ __nv_bfloat16* row(uint32_t index) const {
        if (index >= tile.count) return nullptr;
        return reinterpret_cast<__nv_bfloat16*>(site.out) + out_row(p, tile.first + index) * site.out_stride;
    }

    // The thread's outputs from `n` on of a row.
    __device__ __forceinline__ OutputRun run(__nv_bfloat16* row, uint32_t n) const {
        if (row == nullptr || n >= site.n_out) return OutputRun{nullptr, 0, false};
        const uint32_t count = min(8u, site.n_out - n);
        return OutputRun{row + n, count, vector && count == 8};
    }

    // Asks for the thread's 8 rows of B from output `n` on, all ranks (64 at most), to `weight_places` places from `to` on: 16 bytes a row
    // and block of 32 ranks, 8 bytes a row of a last block of 16.
    __device__ __forceinline__ void ask_for_weights(char* to, uint32_t n) const {
        if (n >= site.n_out) return;
        const uint32_t rows_left = site.n_out - n;
        const __nv_bfloat16* from = b.matrix + uint64_t(n) * site.max_rank;
        const uint32_t stride = site.max_rank;
        uint32_t rank = 0;
        for (; rank + 32 <= padded_rank; rank += 32) {
            const __nv_bfloat16* at = from + rank + lane.quarter * 8;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                copy_async16(to, i < rows_left ? at : from, i < rows_left);
                at += stride;
                to += kPlaceBytes;
            }
        }
        if (rank == padded_rank) return;
        const __nv_bfloat16* at = from + rank + lane.quarter * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            copy_async8(to + i % 2 * 8, i < rows_left ? at : from, i < rows_left);
            at += stride;
            to += i % 2 * kPlaceBytes;
        }
    }

    // `xa @ B^T` of 8 rows, the lane's group's at `x_row`.
    __device__ __forceinline__ void multiply(float (&sum)[4][4], const char* from, const char* x_row) const {
        uint32_t rank = 0;
        for (; rank + 32 <= padded_rank; rank += 32) {
            const uint4 x = *reinterpret_cast<const uint4*>(x_row + rank * 2 + lane.quarter * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 low = *reinterpret_cast<const uint4*>(from);
                const uint4 high = *reinterpret_cast<const uint4*>(from + kPlaceBytes);
                mma_pair(sum[i], low, high, x);
                from += 2 * kPlaceBytes;
            }
        }
        if (rank == padded_rank) return;
        const uint2 x = *reinterpret_cast<const uint2*>(x_row + rank * 2 + lane.quarter * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 both = *reinterpret_cast<const uint4*>(from);
            mma_16x8x16(sum[i], both.x, both.z, both.y, both.w, x.x, x.y);
            from += kPlaceBytes;
        }
    }

    __device__ __forceinline__ void fold_and_store(const OutputRun& run, const uint4& base, int odd,
                                                   const float (&sum)[4][4]) const {
        if (run.count == 0) return;
        uint4 v;
        v.x = fold(base.x, scale, sum[0][odd], sum[0][odd + 2]);
        v.y = fold(base.y, scale, sum[1][odd], sum[1][odd + 2]);
        v.z = fold(base.z, scale, sum[2][odd], sum[2][odd + 2]);
        v.w = fold(base.w, scale, sum[3][odd], sum[3][odd + 2]);
        run.store(v);
    }
};

// xa of a small tile: the block sums of its rows, added in order.
__device__ __forceinline__ void load_small_xa(const ExpandTile& t, char* xa, uint32_t pitch) {
    const uint32_t quads = t.padded_rank / 4;
    for (uint32_t item = threadIdx.x; item < t.tile.count * quads; item += kExpandThreads) {
        const uint32_t row = item / quads;
        const uint32_t quad = item - row * quads;
        *reinterpret_cast<uint2*>(xa + row * pitch + quad * 8) = finish_xa<8>(t.p, t.site, t.tile.first + row, quad * 4);
    }
}

// xa of a large tile, as the shrink kernel finished it.
__device__ __forceinline__ void load_large_xa(const ExpandTile& t, char* xa, uint32_t pitch) {
    const uint32_t quads = t.padded_rank / 4;
    const uint32_t items = t.tile.count * quads;
    constexpr int kAhead = 4;
    for (uint32_t first = threadIdx.x; first < items; first += kAhead * kExpandThreads) {
        uint2 v[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const uint32_t item = min(first + i * kExpandThreads, items - 1);
            const uint32_t row = item / quads;
            v[i] = __ldcg(reinterpret_cast<const uint2*>(xa_at(t.p, t.site, t.tile.first + row)) + (item - row * quads));
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const uint32_t item = min(first + i * kExpandThreads, items - 1);
            const uint32_t row = item / quads;
            *reinterpret_cast<uint2*>(xa + row * pitch + (item - row * quads) * 8) = v[i];
        }
    }
}

__device__ __forceinline__ void load_xa(const ExpandTile& t, char* xa, uint32_t pitch) {
    if (t.tile.count <= kSmallTileRows) {
        load_small_xa(t, xa, pitch);
    } else {
        load_large_xa(t, xa, pitch);
    }
}

// A small tile and up to 64 ranks: everything is asked for at once.
__device__ __forceinline__ void expand_small_tile(const ExpandTile& t, uint32_t first_output, uint32_t runs, char* shared,
                                                  bool waited) {
    const uint32_t places = weight_places(t.padded_rank);
    const uint32_t pitch = xa_pitch(t.site.max_rank);
    char* xa = shared + runs * (weight_places(t.site.max_rank) + 2) * kPlaceBytes;
    char* weights = shared + threadIdx.x * 16;
    char* base = weights + runs * places * kPlaceBytes;
    const uint32_t n = first_output + t.lane.warp * kWarpOutputs + t.lane.group * 8;
    for (uint32_t i = 0; i < runs; ++i) t.ask_for_weights(weights + i * places * kPlaceBytes, n + i * kBlockOutputs);
    __nv_bfloat16* const rows[2] = {t.row(2 * t.lane.quarter), t.row(2 * t.lane.quarter + 1)};
    if (!waited) wait_for_predecessor();
    for (uint32_t i = 0; i < runs; ++i) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const OutputRun run = t.run(rows[odd], n + i * kBlockOutputs);
            if (run.whole) copy_async16(base + (2 * i + odd) * kPlaceBytes, run.at, true);
        }
    }
    copy_async_commit();
    load_small_xa(t, xa, pitch);
    copy_async_wait<0>();
    __syncthreads();
    for (uint32_t i = 0; i < runs; ++i) {
        const uint32_t at = n + i * kBlockOutputs;
        if (at - t.lane.group * 8 >= t.site.n_out) break;
        float sum[4][4] = {};
        t.multiply(sum, weights + i * places * kPlaceBytes, xa + t.lane.group * pitch);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const OutputRun run = t.run(rows[odd], at);
            const uint4 v = run.whole ? *reinterpret_cast<const uint4*>(base + (2 * i + odd) * kPlaceBytes) : run.load();
            t.fold_and_store(run, v, odd, sum);
        }
    }
}

// Small tiles, up to 64 ranks; a block takes `runs` runs of outputs of one tile.
__device__ __forceinline__ void expand_small(const DeltaParams& p, uint32_t runs) {
    extern __shared__ __align__(128) char shared[];
    const ExpandWork work = expand_work(p, runs);
    const DeltaSite& site = p.sites[work.site];
    const bool waited = begin(p);
    const uint32_t index = blockIdx.z * gridDim.y + blockIdx.y;
    const Tile tile = tile_at(p, min(index, p.max_tiles - 1));  // not after the count: one latency less
    Adapter adapter{nullptr, 0};
    if (index < tile_total(p) && tile_in_pass(p, tile)) adapter = adapter_of<Factor::kB>(p, site, tile.entry);
    if (adapter.rank == 0) {
        if (!waited) wait_for_predecessor();
        return;
    }
    expand_small_tile(ExpandTile(p, site, tile, adapter), work.first_output, runs, shared, waited);
}

// Tiles of both kinds, `kBlocks` blocks of 32 ranks of B in registers: that many ranks stay there for all of a tile's rows, more (`kLong`) are read again for
// every `kRowGroups` times 8 rows. The base rows are asked for `kAhead - 1` times 8 rows ahead.
constexpr int kAhead = 4;

template <int kBlocks, bool kLong>
__device__ __forceinline__ void expand_mixed(const DeltaParams& p, uint32_t runs) {
    constexpr int kRowGroups = kLong ? 4 : 1;
    extern __shared__ __align__(128) char shared[];
    __shared__ uint32_t out_rows[kLargeTileRows];
    const ExpandWork work = expand_work(p, runs);
    const DeltaSite& site = p.sites[work.site];
    const uint32_t pitch = xa_pitch(site.max_rank);
    char* base = shared + threadIdx.x * 16;
    char* xa = shared + 2 * kAhead * kPlaceBytes;
    bool waited = begin(p);
    const uint32_t total = tile_total(p);
    for (uint32_t index = blockIdx.y; index < total; index += gridDim.y) {
        const Tile tile = tile_at(p, index);
        const Adapter adapter = adapter_of<Factor::kB>(p, site, tile.entry);
        if (!tile_in_pass(p, tile) || adapter.rank == 0) continue;
        const ExpandTile t(p, site, tile, adapter);
        __syncthreads();
        if (threadIdx.x < tile.count) out_rows[threadIdx.x] = out_row(p, tile.first + threadIdx.x);
        if (!waited) wait_for_predecessor();
        waited = true;
        load_xa(t, xa, pitch);
        __syncthreads();

        const auto run_of = [&](uint32_t group, int odd, uint32_t n) {
            const uint32_t row = group * 8 + 2 * t.lane.quarter + odd;
            if (row >= tile.count) return OutputRun{nullptr, 0, false};
            return t.run(reinterpret_cast<__nv_bfloat16*>(site.out) + out_rows[row] * site.out_stride, n);
        };
        const auto ask_for_base = [&](uint32_t group, uint32_t n) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const OutputRun run = run_of(group, odd, n);
                if (run.whole) copy_async16(base + (group % kAhead * 2 + odd) * kPlaceBytes, run.at, true);
            }
            copy_async_commit();
        };
        const uint32_t groups = (tile.count + 7) / 8;
        uint32_t n = work.first_output + t.lane.warp * kWarpOutputs + t.lane.group * 8;
        for (uint32_t i = 0; i < runs; ++i, n += kBlockOutputs) {
            if (n - t.lane.group * 8 >= site.n_out) break;
            OutputWeights<kBlocks> b;
            if (!kLong) b.load(adapter.matrix, site.max_rank, n, site.n_out, 0, t.padded_rank, t.lane.quarter);
#pragma unroll
            for (int group = 0; group < kAhead - 1; ++group) ask_for_base(group, n);
            for (uint32_t first = 0; first < groups; first += kRowGroups) {
                float sum[kRowGroups][4][4] = {};
                for (uint32_t rank = 0; rank < t.padded_rank; rank += kBlocks * 32) {
                    if (kLong) b.load(adapter.matrix, site.max_rank, n, site.n_out, rank, t.padded_rank, t.lane.quarter);
#pragma unroll
                    for (int j = 0; j < kRowGroups; ++j) {
                        if (kLong && first + j >= groups) break;
                        const char* x_row = xa + ((first + j) * 8 + t.lane.group) * pitch;
                        b.multiply(sum[j], x_row, rank, t.padded_rank, t.lane.quarter);
                    }
                }
#pragma unroll
                for (int j = 0; j < kRowGroups; ++j) {
                    if (kLong && first + j >= groups) break;
                    ask_for_base(first + j + kAhead - 1, n);
                    copy_async_wait<kAhead - 1>();
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd) {
                        const OutputRun run = run_of(first + j, odd, n);
                        const char* place = base + ((first + j) % kAhead * 2 + odd) * kPlaceBytes;
                        t.fold_and_store(run, run.whole ? *reinterpret_cast<const uint4*>(place) : run.load(), odd, sum[j]);
                    }
                }
            }
        }
    }
    if (!waited) wait_for_predecessor();
}
