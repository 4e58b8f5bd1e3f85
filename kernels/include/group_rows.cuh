// Grouping of a step's rows by table entry: a stable counting sort and the tile list, in one block.
//
// Every warp takes a run of consecutive rows: it counts them by entry, and once the counts of all warps are summed up, entries first and then warps in
// order, it knows where each of its rows goes. No atomics, so the result is the same every time.
#pragma once

#include "params.cuh"
#include "primitives.cuh"

constexpr uint32_t kNoEntry = ~0u;

// Exclusive prefix sums over the block of one value a thread; `total` is the sum.
__device__ __forceinline__ uint32_t block_exclusive_scan(uint32_t value, uint32_t* warp_sums, uint32_t& total) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t inclusive = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t before = __shfl_up_sync(0xffffffffu, inclusive, distance);
        if (lane >= distance) inclusive += before;
    }
    if (lane == 31) warp_sums[threadIdx.x / 32] = inclusive;
    __syncthreads();
    if (threadIdx.x < 32) {
        const uint32_t mine = lane < blockDim.x / 32 ? warp_sums[lane] : 0;
        uint32_t sum = mine;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const uint32_t before = __shfl_up_sync(0xffffffffu, sum, distance);
            if (lane >= distance) sum += before;
        }
        warp_sums[lane] = sum - mine;
        if (lane == 31) warp_sums[32] = sum;
    }
    __syncthreads();
    total = warp_sums[32];
    const uint32_t result = warp_sums[threadIdx.x / 32] + inclusive - value;
    __syncthreads();
    return result;
}

// Visits the warp's rows in order, 32 at a time; four loads are in flight. `visit(row, index, peers)` runs in the lanes whose row's entry is the
// `index`th of the `entries` from `first_entry` on; `peers` are the lanes with the same one.
template <typename Visit>
__device__ __forceinline__ void for_rows_of_warp(const GroupParams& p, uint32_t first_entry, uint32_t entries, Visit visit) {
    constexpr int kAhead = 4;
    const int32_t* entry_of_row = reinterpret_cast<const int32_t*>(p.seq_slot);
    const uint32_t warps = blockDim.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t run = ((p.rows + warps - 1) / warps + 31) / 32 * 32;
    const uint32_t begin = threadIdx.x / 32 * run;
    const uint32_t end = min(begin + run, p.rows);
    for (uint32_t first = begin; first < end; first += 32 * kAhead) {
        uint32_t index[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const uint32_t row = first + i * 32 + lane;
            const uint32_t entry = row < end ? static_cast<uint32_t>(__ldcg(entry_of_row + row)) : kNoEntry;
            index[i] = entry >= p.slots ? kNoEntry : entry - first_entry;
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const bool here = index[i] < entries;
            const uint32_t lanes = __ballot_sync(0xffffffffu, here);
            if (here) visit(first + i * 32 + lane, index[i], __match_any_sync(lanes, index[i]));
            __syncwarp();
        }
    }
}

// What earlier ranges of entries have taken of the permutation and of the tile list.
struct Taken {
    uint32_t positions;
    uint32_t tiles;
};

// Tiles of `entries` entries from `first_entry` on. On return `counts` holds the next position of every warp and entry.
__device__ __forceinline__ Taken make_tiles(const GroupParams& p, uint32_t first_entry, uint32_t entries, uint32_t* counts,
                                            uint32_t* warp_sums, Taken taken) {
    uint4* tiles = reinterpret_cast<uint4*>(p.tiles);
    const uint32_t warps = blockDim.x / 32;
    for (uint32_t first = 0; first < entries; first += blockDim.x) {
        const uint32_t index = first + threadIdx.x;
        uint32_t rows = 0;
        if (index < entries) {
            for (uint32_t warp = 0; warp < warps; ++warp) rows += counts[warp * entries + index];
        }
        const uint32_t tile_rows = rows <= p.small_max ? kSmallTileRows : kLargeTileRows;
        const uint32_t own_tiles = (rows + tile_rows - 1) / tile_rows;
        uint32_t total_rows, total_tiles;
        const uint32_t position = taken.positions + block_exclusive_scan(rows, warp_sums, total_rows);
        const uint32_t tile = taken.tiles + block_exclusive_scan(own_tiles, warp_sums, total_tiles);
        for (uint32_t i = 0; i < own_tiles && tile + i < p.max_tiles; ++i) {
            const uint32_t done = i * tile_rows;
            tiles[tile + i] = make_uint4(first_entry + index, position + done, min(tile_rows, rows - done), 0);
        }
        if (index < entries) {
            uint32_t next = position;
            for (uint32_t warp = 0; warp < warps; ++warp) {
                const uint32_t count = counts[warp * entries + index];
                counts[warp * entries + index] = next;
                next += count;
            }
        }
        taken.positions += total_rows;
        taken.tiles += total_tiles;
    }
    return taken;
}

// `capacity`: entries that shared memory has counts for, for every warp. More entries take more passes over the rows.
__device__ __forceinline__ void group_rows(const GroupParams& p, uint32_t capacity) {
    extern __shared__ uint32_t counts[];  // [warps][entries]: rows, then the next position
    __shared__ uint32_t warp_sums[33];
    uint32_t* perm = reinterpret_cast<uint32_t*>(p.perm);
    const uint32_t lanes_before = (1u << threadIdx.x % 32) - 1;
    Taken taken{0, 0};
    wait_for_predecessor();
    for (uint32_t first_entry = 0; first_entry < p.slots; first_entry += capacity) {
        const uint32_t entries = min(capacity, p.slots - first_entry);
        uint32_t* mine = counts + threadIdx.x / 32 * entries;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < blockDim.x / 32 * entries; i += blockDim.x) counts[i] = 0;
        __syncthreads();
        for_rows_of_warp(p, first_entry, entries, [&](uint32_t, uint32_t index, uint32_t peers) {
            if ((peers & lanes_before) == 0) mine[index] += __popc(peers);
        });
        __syncthreads();
        taken = make_tiles(p, first_entry, entries, counts, warp_sums, taken);
        __syncthreads();
        for_rows_of_warp(p, first_entry, entries, [&](uint32_t row, uint32_t index, uint32_t peers) {
            const uint32_t start = mine[index];
            __syncwarp(peers);
            if ((peers & lanes_before) == 0) mine[index] = start + __popc(peers);
            perm[start + __popc(peers & lanes_before)] = row;
        });
    }
    if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(p.tile_count) = min(taken.tiles, p.max_tiles);
}
