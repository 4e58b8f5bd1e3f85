// Grouping of a step's rows by table entry: a stable counting sort and the tile list, in one block.
//
// Counts are integers, so the order in which atomics land does not matter. Each warp places the rows of every 32nd entry in row
// order, so that the permutation is stable without a barrier for each group of rows.
#pragma once

#include "params.cuh"

constexpr int kGroupThreads = 1024;
constexpr int kGroupWarps = kGroupThreads / 32;

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
        const uint32_t mine = warp_sums[threadIdx.x];
        uint32_t sum = mine;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const uint32_t before = __shfl_up_sync(0xffffffffu, sum, distance);
            if (lane >= distance) sum += before;
        }
        warp_sums[threadIdx.x] = sum - mine;
        if (threadIdx.x == 31) warp_sums[kGroupWarps] = sum;
    }
    __syncthreads();
    total = warp_sums[kGroupWarps];
    const uint32_t result = warp_sums[threadIdx.x / 32] + inclusive - value;
    __syncthreads();
    return result;
}

__device__ __forceinline__ void group_rows(const GroupParams& p) {
    extern __shared__ uint32_t counts[];  // rows of each entry, then the next position of each
    __shared__ uint32_t warp_sums[kGroupWarps + 1];
    const int32_t* entry_of_row = reinterpret_cast<const int32_t*>(p.seq_slot);
    uint4* tiles = reinterpret_cast<uint4*>(p.tiles);
    uint32_t* perm = reinterpret_cast<uint32_t*>(p.perm);

    for (uint32_t entry = threadIdx.x; entry < p.slots; entry += kGroupThreads) counts[entry] = 0;
    __syncthreads();
    wait_for_predecessor();
    for (uint32_t row = threadIdx.x; row < p.rows; row += kGroupThreads) {
        const uint32_t entry = static_cast<uint32_t>(__ldcg(entry_of_row + row));
        if (entry < p.slots) atomicAdd(counts + entry, 1u);
    }
    __syncthreads();

    uint32_t positions = 0;
    uint32_t tile_count = 0;
    for (uint32_t first = 0; first < p.slots; first += kGroupThreads) {
        const uint32_t entry = first + threadIdx.x;
        const uint32_t rows = entry < p.slots ? counts[entry] : 0;
        const uint32_t tile_rows = rows <= p.small_max ? kSmallTileRows : kLargeTileRows;
        const uint32_t own_tiles = (rows + tile_rows - 1) / tile_rows;
        uint32_t total_rows, total_tiles;
        const uint32_t position = positions + block_exclusive_scan(rows, warp_sums, total_rows);
        const uint32_t tile = tile_count + block_exclusive_scan(own_tiles, warp_sums, total_tiles);
        for (uint32_t i = 0; i < own_tiles; ++i) {
            const uint32_t done = i * tile_rows;
            if (tile + i < p.max_tiles) {
                tiles[tile + i] = make_uint4(entry, position + done, min(tile_rows, rows - done), 0);
            }
        }
        if (entry < p.slots) counts[entry] = position;
        positions += total_rows;
        tile_count += total_tiles;
    }
    if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(p.tile_count) = min(tile_count, p.max_tiles);
    __syncthreads();

    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t first = 0; first < p.rows; first += 32) {
        const uint32_t row = first + lane;
        const uint32_t entry = row < p.rows ? static_cast<uint32_t>(__ldcg(entry_of_row + row)) : ~0u;
        const bool mine = entry < p.slots && entry % kGroupWarps == warp;
        const uint32_t takers = __ballot_sync(0xffffffffu, mine);
        if (takers == 0) continue;
        if (mine) {
            const uint32_t peers = __match_any_sync(takers, entry);
            const uint32_t before = __popc(peers & ((1u << lane) - 1));
            const uint32_t start = counts[entry];
            __syncwarp(peers);
            if (before == 0) counts[entry] = start + __popc(peers);
            perm[start + before] = row;
        }
        __syncwarp();
    }
}
