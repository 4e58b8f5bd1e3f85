// Expand and fold: `out = bf16(out + scale * bf16(xa @ B^T))` with `xa = bf16(sum of partials)`.
//
// Block sums are added in order. The contraction over the rank, padded to 16, runs in blocks of 32 (two MMAs) and at the end one of 16 where
// the padded rank is an odd multiple of 16: what a row gets depends on its adapter's true rank alone, never on the pool's. Inside a block of 32
// lane quarter t takes ranks 8t..8t+7, inside one of 16 ranks 4t..4t+3.
//
// A warp makes 64 outputs of 8 rows at a time with four MMAs whose 16 rows are interleaved: rows g and g + 8 of MMA i are outputs 8g + 2i and
// 8g + 2i + 1. So a thread owns 8 adjacent outputs of two rows, which it loads and stores as 16 bytes. The B fragments and the first base
// rows are loaded before the wait for the shrink kernel.
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

// The 8 rows of B that a thread feeds to four MMAs, in up to `kBlocks` blocks of 32 ranks from `first` on.
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
                row[block][i] = make_uint4(0, 0, 0, 0);
                if (n + i >= n_out || rank >= padded_rank) continue;
                const __nv_bfloat16* from = b + (n + i) * stride + rank;
                if (padded_rank - rank >= 32) {
                    row[block][i] = load_weights16(from + quarter * 8);
                } else {
                    const uint2 v = load_weights8(from + quarter * 4);
                    row[block][i].x = v.x;
                    row[block][i].y = v.y;
                }
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
        if (whole) return __ldcg(reinterpret_cast<const uint4*>(at));
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

// Leaves xa of a tile's rows in shared memory.
__device__ __forceinline__ void load_xa(const DeltaParams& p, const DeltaSite& site, const Tile& tile,
                                        uint32_t padded_rank, char* xa, uint32_t pitch) {
    const uint32_t quads = padded_rank / 4;
    for (uint32_t item = threadIdx.x; item < tile.count * quads; item += kExpandThreads) {
        const uint32_t position = tile.first + item / quads;
        const uint32_t quad = item % quads;
        const uint2 v = tile.count <= kSmallTileRows
                            ? finish_xa(p, site, position, quad * 4)
                            : __ldcg(reinterpret_cast<const uint2*>(xa_at(p, site, position)) + quad);
        *reinterpret_cast<uint2*>(xa + item / quads * pitch + quad * 8) = v;
    }
}

struct ExpandTile {
    const DeltaParams& p;
    const DeltaSite& site;
    const Tile& tile;
    Lane lane;
    bool vector;

    // The lane's outputs of row 2 * quarter + `odd` of the 8 rows from `first` on.
    __device__ __forceinline__ OutputRun run(uint32_t first, uint32_t odd, uint32_t n) const {
        const uint32_t index = first + 2 * lane.quarter + odd;
        if (index >= tile.count || n >= site.n_out) return OutputRun{nullptr, 0, false};
        __nv_bfloat16* row = reinterpret_cast<__nv_bfloat16*>(site.out) + out_row(p, tile.first + index) * site.out_stride;
        const uint32_t count = min(8u, site.n_out - n);
        return OutputRun{row + n, count, vector && count == 8};
    }
};

__device__ __forceinline__ void fold_and_store(const OutputRun (&runs)[2], const uint4 (&base)[2], float scale,
                                               const float (&sum)[4][4]) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        if (runs[odd].count == 0) continue;
        uint4 v;
        v.x = fold(base[odd].x, scale, sum[0][odd], sum[0][odd + 2]);
        v.y = fold(base[odd].y, scale, sum[1][odd], sum[1][odd + 2]);
        v.z = fold(base[odd].z, scale, sum[2][odd], sum[2][odd + 2]);
        v.w = fold(base[odd].w, scale, sum[3][odd], sum[3][odd + 2]);
        runs[odd].store(v);
    }
}

// `kBlocks` blocks of 32 ranks stay in registers; a longer contraction (`kLong`) reads them again for every 8 rows.
template <int kBlocks, bool kLong>
__device__ __forceinline__ void expand(const DeltaParams& p, uint32_t steps) {
    extern __shared__ __align__(128) char xa[];
    const ExpandWork work = expand_work(p, steps);
    const DeltaSite& site = p.sites[work.site];
    const Lane lane = lane_of_thread();
    const uint32_t pitch = xa_pitch(site.max_rank);
    const bool vector = site.out % 16 == 0 && site.out_stride % 8 == 0;
    const uint32_t total = tile_total(p);
    bool waited = false;
    for (uint32_t index = blockIdx.y; index < total; index += gridDim.y) {
        const Tile tile = tile_at(p, index);
        const Adapter adapter = adapter_of<Factor::kB>(p, site, tile.entry);
        if (!tile_in_pass(p, tile) || adapter.rank == 0) continue;
        const float scale = scale_of(site, tile.entry);
        const uint32_t padded_rank = (adapter.rank + kRankGranule - 1) / kRankGranule * kRankGranule;
        const ExpandTile rows{p, site, tile, lane, vector};
        uint32_t n = work.first_output + lane.warp * kWarpOutputs + lane.group * 8;

        OutputWeights<kBlocks> b;
        if (!kLong) b.load(adapter.matrix, site.max_rank, n, site.n_out, 0, padded_rank, lane.quarter);
        OutputRun runs[2] = {rows.run(0, 0, n), rows.run(0, 1, n)};
        uint4 base[2] = {runs[0].load(), runs[1].load()};
        if (!waited) {
            wait_for_predecessor();
            let_dependents_start();
            waited = true;
        } else {
            __syncthreads();
        }
        load_xa(p, site, tile, padded_rank, xa, pitch);
        __syncthreads();

        for (uint32_t step = 0; step < steps; ++step, n += kBlockOutputs) {
            if (n - lane.group * 8 >= site.n_out) break;
            if (step > 0) {
                if (!kLong) b.load(adapter.matrix, site.max_rank, n, site.n_out, 0, padded_rank, lane.quarter);
                for (int odd = 0; odd < 2; ++odd) {
                    runs[odd] = rows.run(0, odd, n);
                    base[odd] = runs[odd].load();
                }
            }
            for (uint32_t first = 0; first < tile.count; first += 8) {
                const OutputRun next[2] = {rows.run(first + 8, 0, n), rows.run(first + 8, 1, n)};
                const uint4 next_base[2] = {next[0].load(), next[1].load()};
                const char* xa_row = xa + (first + lane.group) * pitch;
                float sum[4][4] = {};
                if (kLong) {
                    for (uint32_t rank = 0; rank < padded_rank; rank += kBlocks * 32) {
                        b.load(adapter.matrix, site.max_rank, n, site.n_out, rank, padded_rank, lane.quarter);
                        b.multiply(sum, xa_row, rank, padded_rank, lane.quarter);
                    }
                } else {
                    b.multiply(sum, xa_row, 0, padded_rank, lane.quarter);
                }
                fold_and_store(runs, base, scale, sum);
                for (int odd = 0; odd < 2; ++odd) {
                    runs[odd] = next[odd];
                    base[odd] = next_base[odd];
                }
            }
        }
    }
    if (!waited) {
        wait_for_predecessor();
        let_dependents_start();
    }
}
