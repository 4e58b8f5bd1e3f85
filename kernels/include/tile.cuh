// Which rows and which adapter a block works on.
#pragma once

#include <cuda_bf16.h>

#include "params.cuh"
#include "primitives.cuh"

// Lets the next launch start, and waits for the previous one where it may have written the tiles; `meanwhile` is called before. True where it has waited.
template <typename Meanwhile>
__device__ __forceinline__ bool begin(const DeltaParams& p, const Meanwhile& meanwhile) {
    const bool wait = (p.flags & kFlagTilesReady) == 0;
    if (wait) {
        meanwhile();
        wait_for_predecessor();
    }
    let_dependents_start();
    return wait;
}

__device__ __forceinline__ bool begin(const DeltaParams& p) {
    return begin(p, [] {});
}

// The same for a launch whose successor may use, before it waits itself, what earlier launches than this one wrote: it may start once every block
// has waited. A second wait is over at once, so a block need not remember the first.
__device__ __forceinline__ void wait_late() {
    wait_for_predecessor();
    let_dependents_start();
}

template <typename Meanwhile>
__device__ __forceinline__ void begin_late(const DeltaParams& p, const Meanwhile& meanwhile) {
    if ((p.flags & kFlagTilesReady) != 0) return;
    meanwhile();
    wait_late();
}

__device__ __forceinline__ void begin_late(const DeltaParams& p) {
    begin_late(p, [] {});
}

__device__ __forceinline__ uint32_t tile_total(const DeltaParams& p) {
    if (p.tiles == 0) return p.max_tiles;
    return min(load_u32(reinterpret_cast<const uint32_t*>(p.tile_count)), p.max_tiles);
}

__device__ __forceinline__ Tile tile_at(const DeltaParams& p, uint32_t index) {
    if (p.tiles == 0) {
        uint32_t first = index * p.tile_rows;
        return Tile{0, first, min(p.tile_rows, p.rows - first), 0};
    }
    const uint4 v = load16<0>(reinterpret_cast<const uint4*>(p.tiles) + index);
    return Tile{v.x, v.y, v.z, v.w};
}

// Whether the tile after the `index`th, which is `tile`, is of the same entry.
__device__ __forceinline__ bool entry_goes_on(const DeltaParams& p, uint32_t index, const Tile& tile) {
    const uint32_t next = min(index + 1, tile_total(p) - 1);
    const Tile after = tile_at(p, next);  // not after the comparison: one latency less
    return next > index && after.entry == tile.entry;
}

__device__ __forceinline__ bool tile_in_pass(const DeltaParams& p, const Tile& tile) {
    return tile.first - p.pass_first < p.pass_rows;
}

__device__ __forceinline__ uint32_t out_row(const DeltaParams& p, uint32_t position) {
    return p.perm == 0 ? position : reinterpret_cast<const uint32_t*>(p.perm)[position];
}

// Out row of the `index`th of a tile's rows, of the last one past it.
__device__ __forceinline__ uint32_t out_row_of(const DeltaParams& p, const Tile& tile, uint32_t index) {
    return out_row(p, tile.first + min(index, tile.count - 1));
}

__device__ __forceinline__ uint32_t x_row(const DeltaParams& p, uint32_t out_row) {
    if (p.x_rows != 0) return reinterpret_cast<const uint32_t*>(p.x_rows)[out_row];
    return p.x_div == 1 ? out_row : out_row / p.x_div;
}

// Start of the x row of an out row; of the last one where a map goes past it.
__device__ __forceinline__ const __nv_bfloat16* x_row_start(const DeltaParams& p, uint32_t out_row) {
    return reinterpret_cast<const __nv_bfloat16*>(p.x) + uint64_t(min(x_row(p, out_row), p.x_row_count - 1)) * p.x_stride;
}

__device__ __forceinline__ uint32_t site_of(const SiteEnds& ends, uint32_t index) {
    static_assert(kMaxSites == 4);
    return (index >= ends.end[0]) + (index >= ends.end[1]) + (index >= ends.end[2]);
}

__device__ __forceinline__ uint32_t site_start(const SiteEnds& ends, uint32_t site) {
    return site == 0 ? 0 : site == 1 ? ends.end[0] : site == 2 ? ends.end[1] : ends.end[2];
}

__device__ __forceinline__ uint32_t padded_rank(uint32_t rank) { return (rank + kRankGranule - 1) / kRankGranule * kRankGranule; }

// The adapter of a tile at a site; `rank` 0 where there is no delta.
struct Adapter {
    const __nv_bfloat16* matrix;
    uint32_t rank;
};

enum class Factor { kA, kB };

template <Factor kFactor>
__device__ __forceinline__ Adapter adapter_of(const DeltaParams& p, const DeltaSite& site, uint32_t entry) {
    if (site.a_table == 0) {
        return Adapter{reinterpret_cast<const __nv_bfloat16*>(kFactor == Factor::kA ? site.a : site.b), site.rank};
    }
    if (entry >= p.slots) return Adapter{nullptr, 0};
    const uint64_t table = kFactor == Factor::kA ? site.a_table : site.b_table;
    const uint64_t address = load_u64(reinterpret_cast<const uint64_t*>(table) + entry);
    const uint32_t rank = load_u32(reinterpret_cast<const uint32_t*>(site.rank_table) + entry);
    const uint32_t present = (address != 0) & (rank != 0);  // not `&&`: both loads at once
    return Adapter{reinterpret_cast<const __nv_bfloat16*>(address), present * min(rank, site.max_rank)};
}

__device__ __forceinline__ float scale_of(const DeltaSite& site, uint32_t entry) {
    return site.a_table == 0 ? site.scale : reinterpret_cast<const float*>(site.scale_table)[entry];
}

// Partial sums of position `position` in k block `block`: `max_rank` floats.
__device__ __forceinline__ float* partials_at(const DeltaParams& p, const DeltaSite& site, uint32_t block,
                                              uint32_t position) {
    const uint64_t room = uint64_t(p.pass_rows) + kLargeTileRows;
    const uint64_t row = uint64_t(block) * room + (position - p.pass_first);
    return reinterpret_cast<float*>(site.partials) + row * site.max_rank;
}

// BF16 `x @ A^T` of position `position`, kept for large tiles: `max_rank` elements.
__device__ __forceinline__ __nv_bfloat16* xa_at(const DeltaParams& p, const DeltaSite& site, uint32_t position) {
    const uint64_t room = uint64_t(p.pass_rows) + kLargeTileRows;
    float* after = reinterpret_cast<float*>(site.partials) + p.k_blocks * room * site.max_rank;
    return reinterpret_cast<__nv_bfloat16*>(after) + uint64_t(position - p.pass_first) * site.max_rank;
}

__device__ __forceinline__ uint32_t add_bits(uint32_t a, uint32_t b) {
    return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
}

// Sums of 4 ranks of one position over the k blocks, in order, as BF16. `kAhead` loads are in flight; those of several positions may be asked for
// before the first is finished.
template <int kAhead>
struct XaSum {
    uint4 v[kAhead];
    const float* from;
    uint64_t block_stride;
    bool present;

    __device__ __forceinline__ void ask(const DeltaParams& p, const DeltaSite& site, uint32_t position, uint32_t rank, bool wanted) {
        from = partials_at(p, site, 0, position) + rank;
        block_stride = (uint64_t(p.pass_rows) + kLargeTileRows) * site.max_rank;
        present = wanted;
        ask_from(p, 0);
    }

    __device__ __forceinline__ void ask_from(const DeltaParams& p, uint32_t first) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) v[i] = load16_if(present && first + i < p.k_blocks, from + (first + i) * block_stride);
    }

    // Drops the lines that what was asked for begins: nobody reads the block sums again.
    __device__ __forceinline__ void drop(const DeltaParams& p) const {
        for (uint32_t i = 0; i < p.k_blocks; ++i) drop_line(from + i * block_stride);
    }

    __device__ __forceinline__ uint2 finish(const DeltaParams& p) {
        uint4 total = v[0];
        for (uint32_t first = 0; first < p.k_blocks; first += kAhead) {
            if (first > 0) ask_from(p, first);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (first + i >= p.k_blocks) break;
                if (first + i == 0) continue;
                total.x = add_bits(total.x, v[i].x);
                total.y = add_bits(total.y, v[i].y);
                total.z = add_bits(total.z, v[i].z);
                total.w = add_bits(total.w, v[i].w);
            }
        }
        return make_uint2(pack_bf16(__uint_as_float(total.x), __uint_as_float(total.y)),
                          pack_bf16(__uint_as_float(total.z), __uint_as_float(total.w)));
    }
};
