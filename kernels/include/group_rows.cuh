// Grouping of a step's rows by table entry: a stable sort of the rows, and the tile list.
//
// Which entry a row takes is said by a source: the row's slot, or (adapter of its token, its expert). Three ways to sort, which give the same lists:
// - few rows, or many entries: one block sorts (entry, row) keys;
// - up to 1024 rows of entries that shared memory has a count of for every warp: one block tallies each warp's rows;
// - more rows: several blocks count them by entry, none of which waits for another. Each counts all rows, those before its own slice apart, so that it
//   knows where its slice's rows go.
// Integer atomics only add counts up, and a row's place among its entry's rows follows from its number, so the result is the same every time.
#pragma once

#include "block_scan.cuh"
#include "params.cuh"
#include "primitives.cuh"

constexpr uint32_t kNoEntry = ~0u;

// Keys of the sort: the entry above the row. MAX_ENTRIES of 2^21 leaves the largest key below `kNoEntry`.
constexpr uint32_t kRowBits = 10;
static_assert(kMaxGroupThreads == 1 << kRowBits);
constexpr uint32_t kRowMask = kMaxGroupThreads - 1;

// A row's entry is its slot.
struct SlotSource {
    const int32_t* slots;

    __device__ __forceinline__ void prefetch(uint32_t) const {}
    __device__ __forceinline__ void prepare() {}
    __device__ __forceinline__ uint32_t entry_of(uint32_t row) const { return static_cast<uint32_t>(__ldcg(slots + row)); }
};

__device__ __forceinline__ uint32_t lanes_before() { return (1u << threadIdx.x % 32) - 1; }

__device__ __forceinline__ uint32_t tile_rows_of(const GroupParams& p, uint32_t rows) {
    return rows <= p.small_max ? kSmallTileRows : kLargeTileRows;
}

// Ascending order over the block, a key a thread; the block's threads are a power of two.
__device__ __forceinline__ uint32_t sorted_key(uint32_t key, uint32_t (&exchange)[2][kMaxGroupThreads]) {
    uint32_t buffer = 0;
    for (uint32_t run = 2; run <= blockDim.x; run *= 2) {
        const bool ascending = (threadIdx.x & run) == 0;
        for (uint32_t distance = run / 2; distance > 0; distance /= 2) {
            uint32_t other;
            if (distance < 32) {
                other = __shfl_xor_sync(kAllLanes, key, distance);
            } else {
                // Two buffers in turn: who writes one again has passed the barrier that all its readers have come to.
                exchange[buffer][threadIdx.x] = key;
                __syncthreads();
                other = exchange[buffer][threadIdx.x ^ distance];
                buffer ^= 1;
            }
            const bool lower = (threadIdx.x & distance) == 0;
            key = lower == ascending ? min(key, other) : max(key, other);
        }
    }
    return key;
}

// One bit a thread of the block, a word a warp.
struct BlockMarks {
    uint32_t own;   // of this warp
    uint32_t lane;  // of warp `lane`
    uint32_t warp;

    __device__ __forceinline__ BlockMarks(const uint32_t* words, uint32_t warps)
        : own(words[threadIdx.x / 32]),
          lane(threadIdx.x % 32 < warps ? words[threadIdx.x % 32] : 0),
          warp(threadIdx.x / 32) {}

    // The last mark at or before the thread; there is one.
    __device__ __forceinline__ uint32_t last_until() const {
        const uint32_t before = __ballot_sync(kAllLanes, lane != 0) & ((1u << warp) - 1);
        const uint32_t other = before == 0 ? 0 : 31 - __clz(before);
        const uint32_t word = __shfl_sync(kAllLanes, lane, other);
        const uint32_t here = own & (lanes_before() * 2 + 1);
        return here != 0 ? warp * 32 + 31 - __clz(here) : other * 32 + 31 - __clz(word);
    }

    // The first mark after the thread, `none` where there is none.
    __device__ __forceinline__ uint32_t first_after(uint32_t none) const {
        const uint32_t after = __ballot_sync(kAllLanes, lane != 0) & ~((2u << warp) - 1);
        const uint32_t other = after == 0 ? 0 : __ffs(after) - 1;
        const uint32_t word = __shfl_sync(kAllLanes, lane, other);
        const uint32_t here = own & ~(lanes_before() * 2 + 1);
        if (here != 0) return warp * 32 + __ffs(here) - 1;
        return after != 0 ? other * 32 + __ffs(word) - 1 : none;
    }

    // Marks before the thread's warp.
    __device__ __forceinline__ uint32_t before_warp() const {
        return __reduce_add_sync(kAllLanes, threadIdx.x % 32 < warp ? __popc(lane) : 0);
    }

    __device__ __forceinline__ uint32_t total() const { return __reduce_add_sync(kAllLanes, __popc(lane)); }
};

// A thread a row.
template <typename Source>
__device__ __forceinline__ void group_sorted(const GroupParams& p, Source& source) {
    __shared__ uint32_t exchange[2][kMaxGroupThreads];
    __shared__ uint32_t last_key[32], starts[32], tile_starts[32];
    wait_for_predecessor();
    source.prepare();
    const uint32_t at = threadIdx.x;
    const uint32_t warps = blockDim.x / 32;
    const uint32_t entry = at < p.rows ? source.entry_of(at) : kNoEntry;
    const uint32_t key = sorted_key(entry < p.slots ? entry << kRowBits | at : kNoEntry, exchange);
    const bool routed = key != kNoEntry;

    if (at % 32 == 31) last_key[at / 32] = key;
    const uint32_t total = __syncthreads_count(routed);
    uint32_t previous = __shfl_up_sync(kAllLanes, key, 1);
    if (at % 32 == 0 && at > 0) previous = last_key[at / 32 - 1];
    const bool starts_group = routed && (at == 0 || previous >> kRowBits != key >> kRowBits);
    const uint32_t start_word = __ballot_sync(kAllLanes, starts_group);
    if (at % 32 == 0) starts[at / 32] = start_word;
    __syncthreads();
    const BlockMarks groups(starts, warps);
    const uint32_t start = groups.last_until();
    const uint32_t end = groups.first_after(total);
    const uint32_t tile_rows = tile_rows_of(p, end - start);
    const bool starts_tile = routed && (at - start) % tile_rows == 0;
    const uint32_t tile_word = __ballot_sync(kAllLanes, starts_tile);
    if (at % 32 == 0) tile_starts[at / 32] = tile_word;
    __syncthreads();
    const BlockMarks tiles(tile_starts, warps);
    const uint32_t tile = tiles.before_warp() + __popc(tile_word & lanes_before());
    const uint32_t tile_count = tiles.total();
    if (starts_tile && tile < p.max_tiles) {
        reinterpret_cast<uint4*>(p.tiles)[tile] = make_uint4(key >> kRowBits, at, min(tile_rows, end - at), 0);
    }
    if (routed) reinterpret_cast<uint32_t*>(p.perm)[at] = key & kRowMask;
    if (at == 0) *reinterpret_cast<uint32_t*>(p.tile_count) = min(tile_count, p.max_tiles);
}

// Two values that are summed up together.
struct Taken {
    uint32_t positions;
    uint32_t tiles;
};

__device__ __forceinline__ Taken operator+(Taken a, Taken b) { return Taken{a.positions + b.positions, a.tiles + b.tiles}; }
__device__ __forceinline__ Taken operator-(Taken a, Taken b) { return Taken{a.positions - b.positions, a.tiles - b.tiles}; }

__device__ __forceinline__ Taken lane_up(Taken value, uint32_t distance) {
    return Taken{lane_up(value.positions, distance), lane_up(value.tiles, distance)};
}

// The tiles of an entry's rows, from place `start` of the permutation and of the tile list on.
__device__ __forceinline__ void write_tiles(const GroupParams& p, uint32_t entry, Taken start, uint32_t rows) {
    const uint32_t tile_rows = tile_rows_of(p, rows);
    for (uint32_t done = 0; done < rows && start.tiles < p.max_tiles; done += tile_rows, ++start.tiles) {
        const uint4 tile = make_uint4(entry, start.positions + done, min(tile_rows, rows - done), 0);
        reinterpret_cast<uint4*>(p.tiles)[start.tiles] = tile;
    }
}

// A thread a row, which has been counted among its warp's rows: `capacity` is at least the entries.
template <typename Source>
__device__ __forceinline__ void group_tallied(const GroupParams& p, Source& source) {
    extern __shared__ uint32_t counts[];  // u16 [warps][entries]: a warp's rows of an entry, then the place of the first of them
    __shared__ Taken warp_sums[33];
    uint16_t* tallies = reinterpret_cast<uint16_t*>(counts);
    const uint32_t warps = blockDim.x / 32;
    for (uint32_t i = threadIdx.x; i < (warps * p.slots + 1) / 2; i += blockDim.x) counts[i] = 0;
    wait_for_predecessor();
    source.prepare();
    const uint32_t at = threadIdx.x;
    const uint32_t entry = source.entry_of(min(at, p.rows - 1));
    const bool routed = at < p.rows && entry < p.slots;
    const uint32_t lanes = __ballot_sync(kAllLanes, routed);
    const uint32_t peers = routed ? __match_any_sync(lanes, entry) : 0;
    const uint32_t earlier = __popc(peers & lanes_before());
    uint16_t* mine = tallies + at / 32 * p.slots + entry;
    __syncthreads();
    if (routed && earlier == 0) *mine = __popc(peers);
    __syncthreads();
    Taken taken{0, 0};
    for (uint32_t first = 0; first < p.slots; first += blockDim.x) {
        const uint32_t index = first + at;
        uint32_t rows = 0;
        if (index < p.slots) {
#pragma unroll 4
            for (uint32_t warp = 0; warp < warps; ++warp) rows += tallies[warp * p.slots + index];
        }
        const uint32_t tile_rows = tile_rows_of(p, rows);
        const uint32_t own_tiles = (rows + tile_rows - 1) / tile_rows;
        Taken total;
        const Taken start = taken + block_exclusive_scan(Taken{rows, own_tiles}, warp_sums, total);
        write_tiles(p, index, start, rows);
        uint32_t place = start.positions;
        for (uint32_t warp = 0; warp < warps && rows > 0; ++warp) {
            const uint32_t count = tallies[warp * p.slots + index];
            tallies[warp * p.slots + index] = place;
            place += count;
        }
        taken = taken + total;
    }
    __syncthreads();
    if (routed) reinterpret_cast<uint32_t*>(p.perm)[*mine + earlier] = at;
    if (at == 0) *reinterpret_cast<uint32_t*>(p.tile_count) = min(taken.tiles, p.max_tiles);
}

// A range of entries, and how many rows each has: before the block's slice, and from there on.
struct EntryRange {
    uint32_t first;
    uint32_t entries;
    uint32_t* before;
    uint32_t* after;
};

// Counts all rows of the batch; eight loads are in flight.
template <typename Source>
__device__ __forceinline__ void count_rows(const GroupParams& p, const Source& source, const EntryRange& range, uint32_t slice_begin) {
    constexpr int kAhead = 8;
    for (uint32_t first = threadIdx.x; first < p.rows; first += blockDim.x * kAhead) {
        uint32_t index[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const uint32_t row = first + i * blockDim.x;
            const uint32_t entry = source.entry_of(min(row, p.rows - 1));
            index[i] = (row < p.rows ? entry : kNoEntry) - range.first;
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            uint32_t* counts = first + i * blockDim.x < slice_begin ? range.before : range.after;
            if (index[i] < range.entries) atomicAdd(counts + index[i], 1);
        }
    }
}

// Writes the tiles of the range, each entry's by one of the blocks. On return `before` holds where the slice's first row of each entry goes.
__device__ __forceinline__ Taken make_tiles(const GroupParams& p, const EntryRange& range, Taken* warp_sums, Taken taken) {
    for (uint32_t first = 0; first < range.entries; first += blockDim.x) {
        const uint32_t index = first + threadIdx.x;
        const bool here = index < range.entries;
        const uint32_t before = here ? range.before[index] : 0;
        const uint32_t rows = here ? before + range.after[index] : 0;
        const uint32_t tile_rows = tile_rows_of(p, rows);
        const uint32_t own_tiles = (rows + tile_rows - 1) / tile_rows;
        Taken total;
        const Taken at = taken + block_exclusive_scan(Taken{rows, own_tiles}, warp_sums, total);
        if (here) range.before[index] = at.positions + before;
        if (index % gridDim.x == blockIdx.x) write_tiles(p, range.first + index, at, rows);
        taken = taken + total;
    }
    return taken;
}

// Writes where the slice's rows go. Warps take turns, 32 rows each, so that rows of an entry stay in order.
template <typename Source>
__device__ __forceinline__ void place_rows(const GroupParams& p, const Source& source, const EntryRange& range, uint32_t begin,
                                           uint32_t end) {
    uint32_t* perm = reinterpret_cast<uint32_t*>(p.perm);
    for (uint32_t first = begin; first < end; first += blockDim.x) {
        const uint32_t row = first + threadIdx.x;
        const uint32_t index = (row < end ? source.entry_of(row) : kNoEntry) - range.first;
        const bool here = index < range.entries;
        const uint32_t lanes = __ballot_sync(kAllLanes, here);
        const uint32_t peers = here ? __match_any_sync(lanes, index) : 0;
        const uint32_t turns = min(blockDim.x, end - first + 31) / 32;
        uint32_t position = 0;
        for (uint32_t turn = 0; turn < turns; ++turn) {
            if (turn == threadIdx.x / 32 && here) {
                const uint32_t start = range.before[index];
                __syncwarp(lanes);
                if ((peers & lanes_before()) == 0) range.before[index] = start + __popc(peers);
                position = start + __popc(peers & lanes_before());
            }
            __syncthreads();
        }
        if (here) perm[position] = row;
    }
}

// `capacity`: entries that shared memory has two counts for; more entries take more passes over the rows.
template <typename Source>
__device__ __forceinline__ void group_counted(const GroupParams& p, Source& source, uint32_t capacity) {
    extern __shared__ uint32_t counts[];
    __shared__ Taken warp_sums[33];
    wait_for_predecessor();
    source.prepare();
    const uint32_t slice = (p.rows + gridDim.x - 1) / gridDim.x;
    const uint32_t begin = min(blockIdx.x * slice, p.rows);
    const uint32_t end = min(begin + slice, p.rows);
    Taken taken{0, 0};
    for (uint32_t first_entry = 0; first_entry < p.slots; first_entry += capacity) {
        const uint32_t entries = min(capacity, p.slots - first_entry);
        const EntryRange range{first_entry, entries, counts, counts + entries};
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < 2 * entries; i += blockDim.x) counts[i] = 0;
        __syncthreads();
        count_rows(p, source, range, begin);
        __syncthreads();
        taken = make_tiles(p, range, warp_sums, taken);
        __syncthreads();
        place_rows(p, source, range, begin, end);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *reinterpret_cast<uint32_t*>(p.tile_count) = min(taken.tiles, p.max_tiles);
}

// `capacity` 0: the keys of rows are sorted.
template <typename Source>
__device__ __forceinline__ void group_rows(const GroupParams& p, Source source, uint32_t capacity) {
    let_dependents_start();
    source.prefetch(p.rows);
    if (capacity == 0) {
        group_sorted(p, source);
    } else if (p.rows <= kMaxGroupThreads) {
        group_tallied(p, source);
    } else {
        group_counted(p, source, capacity);
    }
}
