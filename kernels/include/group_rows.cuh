// Grouping of a step's rows by table entry: a stable sort of the rows, and the tile list.
//
// Which entry a row takes is said by a source: the row's slot, or (adapter of its token, its expert). Three ways to sort, which give the same lists:
// - few rows, or many entries: one block sorts (entry, row) keys;
// - up to 1024 rows of entries that shared memory has a count of for every warp: one block tallies each warp's rows;
// - more rows: the blocks of a cluster count a slice of them each by entry, and learn from each other's counts where their slice's rows go.
// Integer atomics only add counts up, and a row's place among its entry's rows follows from its number, so the result is the same every time.
#pragma once

#include "barrier.cuh"
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

    struct Asked {
        uint32_t row;
        uint32_t slot;
    };

    __device__ __forceinline__ void prefetch(uint32_t) const {}
    __device__ __forceinline__ void prepare() {}
    __device__ __forceinline__ void settle() {}
    __device__ __forceinline__ Asked find(uint32_t row) const { return Asked{row, 0}; }
    __device__ __forceinline__ void ask(Asked& asked) const { asked.slot = static_cast<uint32_t>(__ldcg(slots + asked.row)); }
    __device__ __forceinline__ void follow(Asked&) const {}
    __device__ __forceinline__ uint32_t entry_of(const Asked& asked) const { return asked.slot; }
};

__device__ __forceinline__ uint32_t lanes_before() { return (1u << threadIdx.x % 32) - 1; }

__device__ __forceinline__ uint32_t tile_rows_of(const GroupParams& p, uint32_t rows) {
    return rows <= p.small_max ? kSmallTileRows : kLargeTileRows;
}

// For each of a lane's values, which lanes have the same as their first, their second and so on, where both are there. Values are below `limit`. A vote a bit:
// several times as quick as a match of lanes that are mostly different.
template <int kValues>
struct LanesAlike {
    uint32_t alike[kValues][kValues];

    __device__ __forceinline__ LanesAlike(const uint32_t (&values)[kValues], const bool (&present)[kValues], uint32_t limit) {
#pragma unroll
        for (int other = 0; other < kValues; ++other) {
            const uint32_t there = __ballot_sync(kAllLanes, present[other]);
#pragma unroll
            for (int own = 0; own < kValues; ++own) alike[own][other] = present[own] ? there : 0;
        }
        for (uint32_t bit = 1; bit < limit; bit *= 2) {
            uint32_t votes[kValues], inverted[kValues];
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                votes[i] = __ballot_sync(kAllLanes, (values[i] & bit) != 0);
                inverted[i] = (values[i] & bit) != 0 ? 0 : ~0u;
            }
#pragma unroll
            for (int own = 0; own < kValues; ++own) {
#pragma unroll
                for (int other = 0; other < kValues; ++other) alike[own][other] &= votes[other] ^ inverted[own];
            }
        }
    }

    // How many of the warp's values are the lane's `own`th.
    __device__ __forceinline__ uint32_t count(int own) const {
        uint32_t sum = 0;
#pragma unroll
        for (int other = 0; other < kValues; ++other) sum += __popc(alike[own][other]);
        return sum;
    }

    // How many of them come before it: all lanes' first values come before their second.
    __device__ __forceinline__ uint32_t earlier(int own) const {
        uint32_t sum = __popc(alike[own][own] & lanes_before());
#pragma unroll
        for (int other = 0; other < own; ++other) sum += __popc(alike[own][other]);
        return sum;
    }
};

// Rows whose entries a thread finds together: all loads of one kind are in flight at once.
template <typename Source, int kRows>
struct AskedRows {
    typename Source::Asked asked[kRows];
    bool present[kRows];

    // Rows from `end` on are not there; the last one before it, which exists, is asked for in their place.
    __device__ __forceinline__ AskedRows(const Source& source, const uint32_t (&rows)[kRows], uint32_t end) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            present[i] = rows[i] < end;
            asked[i] = source.find(min(rows[i], end - 1));
        }
    }

    __device__ __forceinline__ void ask(const Source& source) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) source.ask(asked[i]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) source.follow(asked[i]);
    }

    // `kNoEntry` for rows that are not there or have none.
    __device__ __forceinline__ void take(const GroupParams& p, const Source& source, uint32_t (&entries)[kRows]) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const uint32_t entry = source.entry_of(asked[i]);
            entries[i] = present[i] && entry < p.slots ? entry : kNoEntry;
        }
    }
};

// Their entries, where what says them has been written.
template <typename Source, int kRows>
__device__ __forceinline__ void find_entries(const GroupParams& p, const Source& source, const uint32_t (&rows)[kRows], uint32_t end, uint32_t (&entries)[kRows]) {
    AskedRows<Source, kRows> asked(source, rows, end);
    asked.ask(source);
    asked.take(p, source, entries);
}

// The entries of the block's first rows, some a thread, once earlier launches have written what says them.
template <typename Source, int kRows>
__device__ __forceinline__ void wait_for_entries(const GroupParams& p, Source& source, const uint32_t (&rows)[kRows], uint32_t end,
                                                 uint32_t (&entries)[kRows]) {
    AskedRows<Source, kRows> asked(source, rows, end);
    wait_for_predecessor();
    source.prepare();
    asked.ask(source);
    source.settle();
    asked.take(p, source, entries);
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
    const uint32_t at = threadIdx.x;
    const uint32_t warps = blockDim.x / 32;
    uint32_t entry[1];
    wait_for_entries(p, source, {at}, p.rows, entry);
    const uint32_t key = sorted_key(entry[0] != kNoEntry ? entry[0] << kRowBits | at : kNoEntry, exchange);
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

__device__ __forceinline__ Taken lane_sum(Taken value) { return Taken{lane_sum(value.positions), lane_sum(value.tiles)}; }

__device__ __forceinline__ Taken lane_up(Taken value, uint32_t distance) {
    return Taken{lane_up(value.positions, distance), lane_up(value.tiles, distance)};
}

__device__ __forceinline__ uint32_t tiles_of(const GroupParams& p, uint32_t rows) {
    return rows <= p.small_max ? (rows + kSmallTileRows - 1) / kSmallTileRows : (rows + kLargeTileRows - 1) / kLargeTileRows;
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
    __shared__ Taken warp_sums[32];
    uint16_t* tallies = reinterpret_cast<uint16_t*>(counts);
    const uint32_t warps = blockDim.x / 32;
    for (uint32_t i = threadIdx.x; i < (warps * p.slots + 1) / 2; i += blockDim.x) counts[i] = 0;
    const uint32_t at = threadIdx.x;
    uint32_t entry[1];
    wait_for_entries(p, source, {at}, p.rows, entry);
    const bool routed = entry[0] != kNoEntry;
    const LanesAlike<1> peers(entry, {routed}, p.slots);
    const uint32_t earlier = peers.earlier(0);
    uint16_t* mine = tallies + at / 32 * p.slots + entry[0];
    __syncthreads();
    if (routed && earlier == 0) *mine = peers.count(0);
    __syncthreads();
    Taken taken{0, 0};
    for (uint32_t first = 0; first < p.slots; first += blockDim.x) {
        const uint32_t index = first + at;
        uint32_t rows = 0;
        if (index < p.slots) {
#pragma unroll 4
            for (uint32_t warp = 0; warp < warps; ++warp) rows += tallies[warp * p.slots + index];
        }
        Taken total;
        const Taken start = taken + block_exclusive_scan(Taken{rows, tiles_of(p, rows)}, warp_sums, total);
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

// Rows that a block of the cluster places at a time: some a thread, those of a warp one after the other.
constexpr int kRowsAThread = kMaxGroupThreads / kGroupThreads;
constexpr uint32_t kRoundRows = kGroupThreads * kRowsAThread;
constexpr uint32_t kWarpRows = 32 * kRowsAThread;

// Adds a word's bytes up.
__device__ __forceinline__ uint32_t add_bytes(uint32_t bytes, uint32_t sum) { return __dp4a(bytes, 0x01010101u, sum); }

// A range of entries that shared memory has counts of.
struct EntryRange {
    // Words of an entry's tallies: a byte for each warp's rows, of which there are at most `kWarpRows`.
    static constexpr int kTallyWords = kGroupThreads / 32 / 4;
    static_assert(kWarpRows < 256);

    uint32_t first;
    uint32_t entries;
    uint32_t capacity;
    uint32_t* counts;   // rows of each in each block's slice, those of a block together
    uint32_t* places;   // where the slice's next row of each goes; before that is known, rows of each that are past the first round
    uint32_t* tallies;  // of the rows that are being placed, each warp's of each; an entry's words are `capacity` apart, which spreads entries over the banks

    __device__ __forceinline__ EntryRange(uint32_t* shared, uint32_t first, uint32_t slots, uint32_t capacity)
        : first(first),
          entries(min(capacity, slots - first)),
          capacity(capacity),
          counts(shared),
          places(shared + kGroupBlocks * capacity),
          tallies(shared + (kGroupBlocks + 1) * capacity) {}

    // Of which four at a time are counted and sent.
    __device__ __forceinline__ uint32_t padded_entries() const { return (entries + 3) / 4 * 4; }

    __device__ __forceinline__ void clear() const {
        for (uint32_t index = threadIdx.x; index < padded_entries(); index += kGroupThreads) {
            places[index] = 0;
            clear_tallies(index);
        }
    }

    __device__ __forceinline__ void clear_tallies(uint32_t index) const {
#pragma unroll
        for (int word = 0; word < kTallyWords; ++word) tallies[word * capacity + index] = 0;
    }

    __device__ __forceinline__ uint8_t* tally(uint32_t index, uint32_t warp) const {
        return reinterpret_cast<uint8_t*>(tallies + warp / 4 * capacity + index) + warp % 4;
    }

    // Rows that the first `warps` warps have of an entry.
    __device__ __forceinline__ uint32_t tallied(uint32_t index, uint32_t warps) const {
        uint32_t sum = 0;
#pragma unroll
        for (int word = 0; word < kTallyWords; ++word) {
            if (warps <= word * 4) break;
            const uint32_t bytes = tallies[word * capacity + index];
            const uint32_t wanted = warps >= word * 4 + 4 ? ~0u : (1u << 8 * (warps - word * 4)) - 1;
            sum = add_bytes(bytes & wanted, sum);
        }
        return sum;
    }

    __device__ __forceinline__ uint32_t tallied(uint32_t index) const { return tallied(index, kGroupThreads / 32); }
};

// Counts rows `begin` to `end` of the slice, several loads in flight.
template <typename Source>
__device__ __forceinline__ void count_rows(const GroupParams& p, const Source& source, const EntryRange& range, uint32_t begin, uint32_t end) {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (uint32_t first = begin + threadIdx.x; first < end; first += kGroupThreads * kAhead) {
        uint32_t rows[kAhead], entries[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) rows[i] = first + i * kGroupThreads;
        find_entries(p, source, rows, end, entries);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const uint32_t index = entries[i] - range.first;
            if (index < range.entries) atomicAdd(range.places + index, 1);
        }
    }
}

// Adds the first round's rows to those that are counted, and sends the slice's to all blocks. `barrier` counts what comes from them.
__device__ __forceinline__ void send_counts(const EntryRange& range, SharedAddress barrier) {
    const uint32_t entries = range.padded_entries();
    if (threadIdx.x == 0) barrier_expect(barrier, kGroupBlocks * entries * sizeof(uint32_t));
    const uint32_t* own_counts = range.counts + cluster_rank() * range.capacity;
    for (uint32_t index = threadIdx.x * 4; index < entries; index += kGroupThreads * 4) {
        uint4 sum = *reinterpret_cast<const uint4*>(range.places + index);
#pragma unroll
        for (int word = 0; word < EntryRange::kTallyWords; ++word) {
            const uint4 bytes = *reinterpret_cast<const uint4*>(range.tallies + word * range.capacity + index);
            sum = make_uint4(add_bytes(bytes.x, sum.x), add_bytes(bytes.y, sum.y), add_bytes(bytes.z, sum.z), add_bytes(bytes.w, sum.w));
        }
#pragma unroll 4
        for (int block = 0; block < kGroupBlocks; ++block) {
            store_async16(address_in_cluster(shared_address(own_counts + index), block), address_in_cluster(barrier, block), sum);
        }
    }
}

// Writes the tiles of the range, each entry's by one of the blocks, and says where the slice's first row of each entry goes.
__device__ __forceinline__ Taken make_tiles(const GroupParams& p, const EntryRange& range, Taken* warp_sums, Taken taken) {
    const uint32_t own_block = cluster_rank();
    for (uint32_t first = 0; first < range.entries; first += kGroupThreads) {
        const uint32_t index = first + threadIdx.x;
        const bool here = index < range.entries;
        uint32_t before = 0;
        uint32_t rows = 0;
#pragma unroll
        for (int block = 0; block < kGroupBlocks; ++block) {
            const uint32_t count = here ? range.counts[block * range.capacity + index] : 0;
            before += block < own_block ? count : 0;
            rows += count;
        }
        Taken total;
        const Taken at = taken + block_exclusive_scan(Taken{rows, tiles_of(p, rows)}, warp_sums, total);
        if (here) range.places[index] = at.positions + before;
        if (index / 32 % kGroupBlocks == own_block) write_tiles(p, range.first + index, at, rows);
        taken = taken + total;
    }
    return taken;
}

// Rows that are being placed, a thread's: rows of an entry stay in order.
struct PlacedRows {
    uint32_t index[kRowsAThread];    // of a row's entry in the range
    uint32_t earlier[kRowsAThread];  // rows of the same entry that come before it in its warp
    bool here[kRowsAThread];         // in the range

    // The thread's rows of the round that starts with row `first`.
    __device__ __forceinline__ static void rows(uint32_t first, uint32_t (&rows)[kRowsAThread]) {
#pragma unroll
        for (int i = 0; i < kRowsAThread; ++i) rows[i] = first + threadIdx.x / 32 * kWarpRows + i * 32 + threadIdx.x % 32;
    }

    // Adds the rows to the tallies, which are cleared and have no other rows than those of the round.
    __device__ __forceinline__ void tally(const EntryRange& range, const uint32_t (&entries)[kRowsAThread]) {
#pragma unroll
        for (int i = 0; i < kRowsAThread; ++i) {
            index[i] = entries[i] - range.first;
            here[i] = index[i] < range.entries;
        }
        const LanesAlike<kRowsAThread> peers(index, here, range.entries);
#pragma unroll
        for (int i = 0; i < kRowsAThread; ++i) {
            earlier[i] = peers.earlier(i);
            if (here[i] && earlier[i] == 0) *range.tally(index[i], threadIdx.x / 32) = peers.count(i);
        }
    }

    __device__ __forceinline__ void store(const GroupParams& p, const EntryRange& range, uint32_t first) const {
        uint32_t rows[kRowsAThread], place[kRowsAThread];
        PlacedRows::rows(first, rows);
#pragma unroll
        for (int i = 0; i < kRowsAThread; ++i) {
            const uint32_t at = here[i] ? index[i] : 0;
            place[i] = range.places[at] + range.tallied(at, threadIdx.x / 32) + earlier[i];
        }
#pragma unroll
        for (int i = 0; i < kRowsAThread; ++i) {
            if (here[i]) reinterpret_cast<uint32_t*>(p.perm)[place[i]] = rows[i];
        }
    }
};

// Writes where the slice's rows go, a round at a time. Those of the first round, `placed`, are tallied.
template <typename Source>
__device__ __forceinline__ void place_rows(const GroupParams& p, const Source& source, const EntryRange& range, uint32_t begin, uint32_t end,
                                           PlacedRows placed) {
    __syncthreads();
    placed.store(p, range, begin);
    for (uint32_t first = begin + kRoundRows; first < end; first += kRoundRows) {
        __syncthreads();
        for (uint32_t index = threadIdx.x; index < range.entries; index += kGroupThreads) {
            range.places[index] += range.tallied(index);
            range.clear_tallies(index);
        }
        __syncthreads();
        uint32_t rows[kRowsAThread], entries[kRowsAThread];
        PlacedRows::rows(first, rows);
        find_entries(p, source, rows, end, entries);
        placed.tally(range, entries);
        __syncthreads();
        placed.store(p, range, first);
    }
}

// A cluster shares the rows, a slice a block, whose counts are sent to all its blocks. `capacity`, a multiple of 4: entries that shared memory has room for;
// more entries take more passes over the rows.
template <typename Source>
__device__ __forceinline__ void group_counted(const GroupParams& p, Source& source, uint32_t capacity) {
    extern __shared__ __align__(16) uint32_t counts[];
    __shared__ Taken warp_sums[32];
    __shared__ uint64_t all_counts;
    const SharedAddress barrier = shared_address(&all_counts);
    if (threadIdx.x == 0) barrier_init(barrier, 1);
    fence_barrier_init();
    cluster_arrive();
    EntryRange range(counts, 0, p.slots, capacity);
    range.clear();
    const uint32_t slice = (p.rows + kGroupBlocks - 1) / kGroupBlocks;
    const uint32_t begin = min(cluster_rank() * slice, p.rows);
    const uint32_t end = min(begin + slice, p.rows);
    uint32_t rows[kRowsAThread], entries[kRowsAThread];
    PlacedRows::rows(begin, rows);
    wait_for_entries(p, source, rows, end, entries);
    Taken taken{0, 0};
    for (uint32_t pass = 0;; ++pass) {
        __syncthreads();
        PlacedRows placed;
        placed.tally(range, entries);
        count_rows(p, source, range, begin + kRoundRows, end);
        __syncthreads();
        cluster_wait();  // all blocks have their barriers, and have read the counts of the pass before
        send_counts(range, barrier);
        barrier_wait(barrier, pass & 1);
        taken = make_tiles(p, range, warp_sums, taken);
        const uint32_t next = range.first + capacity;
        if (next < p.slots) cluster_arrive_release();
        place_rows(p, source, range, begin, end, placed);
        if (next >= p.slots) break;
        __syncthreads();
        range = EntryRange(counts, next, p.slots, capacity);
        range.clear();
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
