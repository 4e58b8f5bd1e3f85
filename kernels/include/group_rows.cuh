// Grouping of a step's rows by table entry: a stable counting sort and the tile list, in one block.
//
// Every warp takes a run of consecutive rows: it counts them by entry, and once the counts of all warps are summed up, entries first and then warps in
// order, it knows where each of its rows goes. No atomics, so the result is the same every time.
#pragma once

#include "params.cuh"
#include "primitives.cuh"

constexpr int kMaxGroupThreads = 1024;
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

// Visits the warp's rows in order, 32 at a time; four loads are in flight. `visit(row, entry, peers)` runs in the lanes whose row has an entry;
// `peers` are the lanes with the same one.
template <typename Visit>
__device__ __forceinline__ void for_rows_of_warp(const GroupParams& p, Visit visit) {
    constexpr int kAhead = 4;
    const int32_t* entry_of_row = reinterpret_cast<const int32_t*>(p.seq_slot);
    const uint32_t warps = blockDim.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t run = ((p.rows + warps - 1) / warps + 31) / 32 * 32;
    const uint32_t begin = threadIdx.x / 32 * run;
    const uint32_t end = min(begin + run, p.rows);
    for (uint32_t first = begin; first < end; first += 32 * kAhead) {
        uint32_t entries[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const uint32_t row = first + i * 32 + lane;
            entries[i] = row < end ? static_cast<uint32_t>(__ldcg(entry_of_row + row)) : kNoEntry;
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const bool grouped = entries[i] < p.slots;
            const uint32_t lanes = __ballot_sync(0xffffffffu, grouped);
            if (grouped) visit(first + i * 32 + lane, entries[i], __match_any_sync(lanes, entries[i]));
            __syncwarp();
        }
    }
}

__device__ __forceinline__ void group_rows(const GroupParams& p) {
    extern __shared__ uint32_t counts[];  // [warps][entries]: rows, then the next position
    __shared__ uint32_t warp_sums[33];
    uint4* tiles = reinterpret_cast<uint4*>(p.tiles);
    uint32_t* perm = reinterpret_cast<uint32_t*>(p.perm);
    const uint32_t warps = blockDim.x / 32;
    const uint32_t lanes_before = (1u << threadIdx.x % 32) - 1;
    uint32_t* mine = counts + threadIdx.x / 32 * p.slots;

    for (uint32_t i = threadIdx.x; i < warps * p.slots; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    wait_for_predecessor();
    for_rows_of_warp(p, [&](uint32_t, uint32_t entry, uint32_t peers) {
        if ((peers & lanes_before) == 0) mine[entry] += __popc(peers);
    });
    __syncthreads();

    uint32_t positions = 0;
    uint32_t tile_count = 0;
    for (uint32_t first = 0; first < p.slots; first += blockDim.x) {
        const uint32_t entry = first + threadIdx.x;
        uint32_t rows = 0;
        if (entry < p.slots) {
            for (uint32_t warp = 0; warp < warps; ++warp) rows += counts[warp * p.slots + entry];
        }
        const uint32_t tile_rows = rows <= p.small_max ? kSmallTileRows : kLargeTileRows;
        const uint32_t own_tiles = (rows + tile_rows - 1) / tile_rows;
        uint32_t total_rows, total_tiles;
        const uint32_t position = positions + block_exclusive_scan(rows, warp_sums, total_rows);
        const uint32_t tile = tile_count + block_exclusive_scan(own_tiles, warp_sums, total_tiles);
        for (uint32_t i = 0; i < own_tiles && tile + i < p.max_tiles; ++i) {
            const uint32_t done = i * tile_rows;
            tiles[tile + i] = make_uint4(entry, position + done, min(tile_rows, rows - done), 0);
        }
        if (entry < p.slots) {
            uint32_t next = position;
            for (uint32_t warp = 0; warp < warps; ++warp) {
                const uint32_t count = counts[warp * p.slots + entry];
                counts[warp * p.slots + entry] = next;
                next += count;
            }
        }
        positions += total_rows;
        tile_count += total_tiles;
    }
    if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(p.tile_count) = min(tile_count, p.max_tiles);
    __syncthreads();

    for_rows_of_warp(p, [&](uint32_t row, uint32_t entry, uint32_t peers) {
        const uint32_t start = mine[entry];
        __syncwarp(peers);
        if ((peers & lanes_before) == 0) mine[entry] = start + __popc(peers);
        perm[start + __popc(peers & lanes_before)] = row;
    });
}
