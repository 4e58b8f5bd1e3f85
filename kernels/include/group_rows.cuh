// Grouping of a step's rows by table entry: a stable sort of the rows, and the tile list.
//
// Which entry a row takes is said by a source: the row's slot, or (adapter of its token, its expert). Three ways to sort, which give the same lists:
// - few rows, or many entries: one block sorts (entry, row) keys;
// - up to 1024 rows of entries that shared memory has a count of for every warp: one block tallies each warp's rows;
// - more rows: the blocks of a cluster count a slice of them each by entry, and learn from each other's counts where their slice's rows go.
// Integer atomics only add counts up, and a row's place among its entry's rows follows from its number, so the result is the same every time.
#pragma once

#include "block_scan.cuh"
#include "cluster.cuh"
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

    using Asked = uint32_t;

    __device__ __forceinline__ void prefetch(uint32_t) const {}
    __device__ __forceinline__ void prepare() {}
    __device__ __forceinline__ void settle() {}
    __device__ __forceinline__ Asked ask(uint32_t row) const { return static_cast<uint32_t>(__ldcg(slots + row)); }
    __device__ __forceinline__ uint32_t entry_of(Asked asked, uint32_t) const { return asked; }
};

__device__ __forceinline__ uint32_t lanes_before() { return (1u << threadIdx.x % 32) - 1; }

__device__ __forceinline__ uint32_t tile_rows_of(const GroupParams& p, uint32_t rows) {
    return rows <= p.small_max ? kSmallTileRows : kLargeTileRows;
}

// The lanes whose value, below `limit`, is this lane's, of those that are `present`; none for the others. A vote a bit: several times as quick as a match of lanes
// that are mostly different.
__device__ __forceinline__ uint32_t lanes_alike(uint32_t value, bool present, uint32_t limit) {
    uint32_t alike = __ballot_sync(kAllLanes, present);
    for (uint32_t bit = 1; bit < limit; bit *= 2) {
        const bool set = (value & bit) != 0;
        const uint32_t votes = __ballot_sync(kAllLanes, set);
        alike &= set ? votes : ~votes;
    }
    return present ? alike : 0;
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
    const auto asked = source.ask(min(at, p.rows - 1));
    source.settle();
    const uint32_t entry = source.entry_of(asked, min(at, p.rows - 1));
    const uint32_t key = sorted_key(at < p.rows && entry < p.slots ? entry << kRowBits | at : kNoEntry, exchange);
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
    const auto asked = source.ask(min(at, p.rows - 1));
    source.settle();
    const uint32_t entry = source.entry_of(asked, min(at, p.rows - 1));
    const bool routed = at < p.rows && entry < p.slots;
    const uint32_t peers = lanes_alike(entry, routed, p.slots);
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

// A range of entries that shared memory has counts of.
struct EntryRange {
    uint32_t first;
    uint32_t entries;
    uint32_t* counts;    // the slice's rows of each
    uint32_t* places;    // where its next row of each goes
    uint4 (*tallies)[2]; // of the rows that are being placed, each warp's of each: a byte a warp

    __device__ __forceinline__ void clear_tallies(uint32_t index) const { tallies[index][0] = tallies[index][1] = make_uint4(0, 0, 0, 0); }
};

// A warp's rows are at most 32, so that a byte has room for their number.
__device__ __forceinline__ uint32_t add_bytes(uint32_t bytes, uint32_t sum) { return __dp4a(bytes, 0x01010101u, sum); }

__device__ __forceinline__ uint32_t tallied(const uint4 (&tallies)[2]) {
    uint32_t sum = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum = add_bytes(tallies[half].x, add_bytes(tallies[half].y, add_bytes(tallies[half].z, add_bytes(tallies[half].w, sum))));
    }
    return sum;
}

__device__ __forceinline__ uint32_t tallied_before(const uint4 (&tallies)[2], uint32_t warp) {
    const auto kept = [&](uint32_t bytes, uint32_t first) {
        const uint32_t wanted = warp <= first ? 0 : min(warp - first, 4u);
        return wanted == 4 ? bytes : bytes & ((1u << 8 * wanted) - 1);
    };
    uint4 before[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 v = tallies[half];
        before[half] = make_uint4(kept(v.x, half * 16), kept(v.y, half * 16 + 4), kept(v.z, half * 16 + 8), kept(v.w, half * 16 + 12));
    }
    return tallied(before);
}

// Counts the slice's rows, of which the thread's first one takes `own_entry`; several loads are in flight.
template <typename Source>
__device__ __forceinline__ void count_rows(const GroupParams& p, const Source& source, const EntryRange& range, uint32_t own_entry, uint32_t begin,
                                           uint32_t end) {
    constexpr int kAhead = 2;
    const auto count = [&](bool present, uint32_t entry) {
        const uint32_t index = entry - range.first;
        if (present && index < range.entries) atomicAdd(range.counts + index, 1);
    };
    count(begin + threadIdx.x < end, own_entry);
    for (uint32_t first = begin + threadIdx.x + blockDim.x; first < end; first += blockDim.x * kAhead) {
        typename Source::Asked asked[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) asked[i] = source.ask(min(first + i * blockDim.x, end - 1));
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const uint32_t row = first + i * blockDim.x;
            count(row < end, source.entry_of(asked[i], min(row, end - 1)));
        }
    }
}

// Writes the tiles of the range, each entry's by one of the blocks, and says where the slice's first row of each entry goes.
__device__ __forceinline__ Taken make_tiles(const GroupParams& p, const EntryRange& range, Taken* warp_sums, Taken taken) {
    const uint32_t own_block = cluster_rank();
    for (uint32_t first = 0; first < range.entries; first += blockDim.x) {
        const uint32_t index = first + threadIdx.x;
        const bool here = index < range.entries;
        uint32_t before = 0;
        uint32_t rows = 0;
        if (here) {
            uint32_t counts[kGroupBlocks];
#pragma unroll
            for (int block = 0; block < kGroupBlocks; ++block) counts[block] = load_of_cluster(range.counts + index, block);
#pragma unroll
            for (int block = 0; block < kGroupBlocks; ++block) {
                before += block < own_block ? counts[block] : 0;
                rows += counts[block];
            }
        }
        const uint32_t tile_rows = tile_rows_of(p, rows);
        const uint32_t own_tiles = (rows + tile_rows - 1) / tile_rows;
        Taken total;
        const Taken at = taken + block_exclusive_scan(Taken{rows, own_tiles}, warp_sums, total);
        if (here) range.places[index] = at.positions + before;
        if (index % kGroupBlocks == own_block) write_tiles(p, range.first + index, at, rows);
        taken = taken + total;
    }
    return taken;
}

// A row that is being placed, a thread's: rows of an entry stay in order, those of earlier warps and lanes first.
struct PlacedRow {
    uint32_t index;    // of its entry in the range
    uint32_t earlier;  // rows of the same entry in earlier lanes
    bool here;         // in the range

    // Adds the row to the tallies, which are cleared and have no other rows than those of the block's threads.
    __device__ __forceinline__ void tally(const EntryRange& range, uint32_t entry) {
        index = entry - range.first;
        here = index < range.entries;
        const uint32_t peers = lanes_alike(index, here, range.entries);
        earlier = __popc(peers & lanes_before());
        if (here && earlier == 0) reinterpret_cast<uint8_t*>(range.tallies[index])[threadIdx.x / 32] = __popc(peers);
    }

    __device__ __forceinline__ void store(const GroupParams& p, const EntryRange& range, uint32_t row) const {
        if (!here) return;
        const uint32_t before = tallied_before(range.tallies[index], threadIdx.x / 32) + earlier;
        reinterpret_cast<uint32_t*>(p.perm)[range.places[index] + before] = row;
    }
};

// Writes where the slice's rows go, as many at a time as there are threads. The first of them, `placed`, are tallied.
template <typename Source>
__device__ __forceinline__ void place_rows(const GroupParams& p, const Source& source, const EntryRange& range, uint32_t begin,
                                           uint32_t end, PlacedRow placed) {
    __syncthreads();
    placed.store(p, range, begin + threadIdx.x);
    for (uint32_t first = begin + blockDim.x; first < end; first += blockDim.x) {
        __syncthreads();
        for (uint32_t index = threadIdx.x; index < range.entries; index += blockDim.x) {
            range.places[index] += tallied(range.tallies[index]);
            range.clear_tallies(index);
        }
        __syncthreads();
        const uint32_t row = first + threadIdx.x;
        placed.tally(range, row < end ? source.entry_of(source.ask(row), row) : kNoEntry);
        __syncthreads();
        placed.store(p, range, row);
    }
}

// A cluster shares the rows, a slice a block, and reads the counts of its blocks from each other's shared memory. `capacity`: entries that shared memory has room
// for; more entries take more passes over the rows.
template <typename Source>
__device__ __forceinline__ void group_counted(const GroupParams& p, Source& source, uint32_t capacity) {
    extern __shared__ uint4 ranges[];
    __shared__ Taken warp_sums[33];
    const auto range_from = [&](uint32_t first) {
        uint32_t* counts = reinterpret_cast<uint32_t*>(ranges + 2 * capacity);
        const EntryRange range{first, min(capacity, p.slots - first), counts, counts + capacity, reinterpret_cast<uint4(*)[2]>(ranges)};
        for (uint32_t i = threadIdx.x; i < range.entries; i += blockDim.x) {
            range.counts[i] = 0;
            range.clear_tallies(i);
        }
        return range;
    };
    EntryRange range = range_from(0);
    wait_for_predecessor();
    source.prepare();
    const uint32_t slice = (p.rows + kGroupBlocks - 1) / kGroupBlocks;
    const uint32_t begin = min(cluster_rank() * slice, p.rows);
    const uint32_t end = min(begin + slice, p.rows);
    const uint32_t own_row = min(begin + threadIdx.x, p.rows - 1);
    const auto asked = source.ask(own_row);
    source.settle();
    const uint32_t own_entry = begin + threadIdx.x < end ? source.entry_of(asked, own_row) : kNoEntry;
    Taken taken{0, 0};
    for (uint32_t first_entry = 0; first_entry < p.slots; first_entry += capacity) {
        if (first_entry > 0) {
            __syncthreads();
            range = range_from(first_entry);
        }
        __syncthreads();
        count_rows(p, source, range, own_entry, begin, end);
        PlacedRow placed;
        placed.tally(range, own_entry);
        cluster_arrive_release();
        cluster_wait();
        taken = make_tiles(p, range, warp_sums, taken);
        __syncwarp();
        cluster_arrive_release();
        place_rows(p, source, range, begin, end, placed);
        cluster_wait();  // no block clears its counts, or leaves, while another reads them
    }
    if (cluster_rank() == 0 && threadIdx.x == 0) *reinterpret_cast<uint32_t*>(p.tile_count) = min(taken.tiles, p.max_tiles);
}

// Up to 1024 rows, in one block. `capacity` 0: the keys of rows are sorted.
template <typename Source>
__device__ __forceinline__ void group_rows(const GroupParams& p, Source source, uint32_t capacity) {
    let_dependents_start();
    source.prefetch(p.rows);
    if (capacity == 0) {
        group_sorted(p, source);
    } else {
        group_tallied(p, source);
    }
}

// More rows, in a cluster.
template <typename Source>
__device__ __forceinline__ void group_many_rows(const GroupParams& p, Source source, uint32_t capacity) {
    let_dependents_start();
    source.prefetch(p.rows);
    group_counted(p, source, capacity);
}
