// Shrink over large tiles where warpgroups multiply: a block takes up to 128 rows of x, up to 192 ranks, of several sites where they have fewer, and some of the
// k blocks.
//
// Two warpgroups copy and two multiply, 64 rows each. Asynchronous copies keep a warp waiting while as many as a multiprocessor can have are under way; warps
// that multiplied too would do so only in between. x goes to the MMAs through registers, A straight from shared memory, so that of x each element is read
// from there once and of A once for 64 rows.
//
// The 16 k of an MMA are the canonical ones of 32: elements 0..3 of each 8, then 4..7. An MMA reads A in pieces of 16 bytes, so A is copied 8 bytes at a time,
// which lays the halves that belong to one MMA side by side. In what order its 16 k stand is nothing to a sum.
//
// A block takes an equal share of the work, whatever tiles that touches: runs of k blocks of a tile, one after the other without a break in the copies.
#pragma once

#include "barrier.cuh"
#include "shrink.cuh"
#include "warpgroup.cuh"

// Of the block's threads, the first multiply and the others copy.
constexpr int kMultiplyThreads = 2 * kWarpgroupThreads;
constexpr int kCopyThreads = kWarpgroupShrinkThreads - kMultiplyThreads;
static_assert(kLargeTileRows == 2 * kWarpgroupRows);

// Some k blocks of some rows of a tile, for a set of groups of 16 ranks. Without chunks, the end of a block's work.
template <int kGroups>
struct ShrinkRun {
    Tile tile;
    uint32_t k_block;  // the first one
    uint32_t chunks;
    uint32_t groups;  // up to the last one with a delta
    GroupSet<kGroups> set;
    const __nv_bfloat16* rows[kLargeTileRows + kGroups * kRankGranule];  // of x, then of A
};

// Tiles of the pass: `first` of the list and on, `count` of them. They stand in the order of their rows.
struct PassTiles {
    uint32_t first;
    uint32_t count;
};

__device__ __forceinline__ PassTiles tiles_of_pass(const DeltaParams& p) {
    const uint32_t total = tile_total(p);
    if (p.pass_rows >= p.rows) return PassTiles{0, total};
    uint32_t before = 0, inside = 0;
    for (uint32_t first = 0; first < total; first += blockDim.x) {
        const uint32_t index = first + threadIdx.x;
        const bool there = index < total;
        const Tile tile = tile_at(p, there ? index : 0);
        before += __syncthreads_count(there && tile.first < p.pass_first);
        inside += __syncthreads_count(there && tile_in_pass(p, tile));
    }
    return PassTiles{before, inside};
}

// A block's share of all work, whose units are tiles, sets of ranks and k blocks, the last of which change first.
struct WorkShare {
    uint32_t next;
    uint32_t end;
    uint32_t first_tile;
    bool halves;  // units are counted twice, for the first and the other rows of a tile
};

// Where whole units would leave many blocks idle at the end, they are dealt out as halves.
__device__ __forceinline__ WorkShare share_of(const PassTiles& tiles, uint32_t units_a_tile) {
    const uint32_t units = tiles.count * units_a_tile;
    const uint32_t whole_turns = (units + gridDim.x - 1) / gridDim.x;
    const uint32_t half_turns = (2 * units + gridDim.x - 1) / gridDim.x;
    const bool halves = whole_turns > 2 && half_turns < 2 * whole_turns;
    const uint64_t all = halves ? 2 * units : units;
    return WorkShare{uint32_t(all * blockIdx.x / gridDim.x), uint32_t(all * (blockIdx.x + 1) / gridDim.x), tiles.first, halves};
}

// `kUnits` times 64 ranks. A stage is a chunk of k.
template <int kUnits>
struct WarpgroupShrink {
    static constexpr int kRanks = kUnits * 64;
    static constexpr int kGroups = kRanks / kRankGranule;

    // Rows of x 4 words apart modulo 32: see `load_x`. 8 k of all ranks of A stand together, each such piece 16 bytes further modulo 128 than the last, so that
    // copies of a rank's k do not meet on banks.
    static constexpr int kXPitch = kChunkK * 2 + 16;
    static constexpr int kXBytes = kLargeTileRows * kXPitch;
    static constexpr int kAPieceBytes = kRanks * 16 + 16;
    static constexpr int kStageBytes = kXBytes + kChunkK / 8 * kAPieceBytes;

    using Run = ShrinkRun<kGroups>;
    static constexpr int kStages = kUnits == 1 ? kWarpgroupShrinkStages : kWarpgroupShrinkWideStages;
    using Stages = Ring<kStages>;
    static constexpr int kMultiplyRegisters = kUnits == 3 ? 216 : 200;
    static constexpr int kCopyRegisters = 256 - kMultiplyRegisters;
    static constexpr int kRuns = 3;
    using Runs = Ring<kRuns>;

    const DeltaParams& p;
    SharedAddress shared;
    Run* run_slots;
    WorkShare& share;
    Stages stages;
    Runs runs;

    // Takes the next run off the share: as many whole units of a tile and a set as there are, or a half. False where there is nothing to do in it.
    __device__ __forceinline__ bool take(Run& run, uint32_t sets) const {
        const uint32_t next = share.next;
        const uint32_t scale = share.halves ? 2 : 1;
        const uint32_t unit = next / scale;
        const uint32_t second = next % scale;
        const bool half = share.halves && (second == 1 || next + 1 == share.end);
        const uint32_t k_block = unit % p.k_blocks;
        const uint32_t count = half ? 1 : min(p.k_blocks - k_block, share.end / scale - unit);

        Tile tile = tile_at(p, share.first_tile + unit / p.k_blocks / sets);
        if (half) {
            const uint32_t before = min(tile.count, second * kWarpgroupRows);
            tile.first += before;
            tile.count = min(tile.count - before, uint32_t(kWarpgroupRows));
        }
        const uint32_t t = threadIdx.x - kMultiplyThreads;
        const uint32_t first_group = unit / p.k_blocks % sets * kGroups;
#pragma unroll 1
        for (uint32_t i = t; i < kLargeTileRows + kRanks && tile.count > 0; i += kCopyThreads) {
            run.rows[i] = i < kLargeTileRows ? x_pointer(p, tile, i) : run.set.find(p, tile.entry, first_group, i - kLargeTileRows);
        }
        sync_copiers();
        const int groups = tile.count == 0 ? 0 : run.set.count(kGroups);
        if (t == 0) {
            run.tile = tile;
            run.k_block = k_block;
            run.chunks = (min(p.k_in - k_block * kBlockK, count * kBlockK) + kChunkK - 1) / kChunkK;
            run.groups = groups;
            share.next = next + (half ? 1 : count * scale);
        }
        sync_copiers();
        return groups > 0;
    }

    __device__ __forceinline__ static void sync_copiers() { asm volatile("bar.sync 1, %0;" ::"n"(kCopyThreads) : "memory"); }

    // A copying thread's place in a chunk: `kElements` k of a row, of every `kRowsATurn`th row.
    template <int kElements>
    struct CopyPlace {
        static constexpr uint32_t kLanes = kChunkK / kElements;
        static constexpr int kRowsATurn = kCopyThreads / kLanes;

        uint32_t piece;  // which of the chunk's
        uint32_t row;    // the first
        bool inside;     // of the row
        uint32_t at;     // element of the row; 0 where that is past its end

        __device__ __forceinline__ CopyPlace(const DeltaParams& p, const Run& run, uint32_t chunk) {
            const uint32_t k = run.k_block * kBlockK + chunk * kChunkK;
            const uint32_t t = threadIdx.x - kMultiplyThreads;
            piece = t % kLanes;
            row = t / kLanes;
            inside = k + piece * kElements < p.k_in;
            at = inside ? k + piece * kElements : 0;
        }
    };

    // Ranks of A, the run's `chunk`th chunk. Ranks past the run's last group are left as they are: their sums are not stored.
    __device__ __forceinline__ void copy_a(const Run& run, uint32_t chunk, uint32_t slot) const {
        using Place = CopyPlace<4>;
        const Place place(p, run, chunk);
        const uint32_t quad = place.piece;
        // Of 32 k, quads 0, 2, 4 and 6 are the first MMA's, each two of them a piece.
        const uint32_t piece = (quad / 8 * 2 + quad % 2) * 2 + quad / 4 % 2;
        const SharedAddress to = shared + slot * kStageBytes + kXBytes + piece * kAPieceBytes + place.row * 16 + quad / 2 % 2 * 8;
        const int ranks = run.groups * kRankGranule;
#pragma unroll
        for (int turn = 0; turn < kRanks / Place::kRowsATurn; ++turn) {
            const int rank = turn * Place::kRowsATurn;
            if (rank < ranks) copy_async8(to + rank * 16, run.rows[kLargeTileRows + rank + place.row] + place.at, place.inside);
        }
    }

    // Rows of x likewise; rows past the tile's last one are left as they are.
    __device__ __forceinline__ void copy_x(const Run& run, uint32_t chunk, uint32_t slot, uint64_t leaves) const {
        using Place = CopyPlace<8>;
        const Place place(p, run, chunk);
        const SharedAddress to = shared + slot * kStageBytes + place.row * kXPitch + place.piece * 16;
#pragma unroll
        for (int turn = 0; turn < kLargeTileRows / Place::kRowsATurn; ++turn) {
            const int row = turn * Place::kRowsATurn;
            if (row < run.tile.count) copy_async16(to + row * kXPitch, run.rows[row + place.row] + place.at, place.inside, leaves);
        }
    }

    // Copies run after run. The next one is looked up as soon as there is no room for more of this one.
    __device__ __forceinline__ void copy(uint32_t sets) {
        const Run* run = run_slots;
        // A single set of ranks reads x once: what is to be read again stays, A and the sums.
        const uint64_t leaves = sets == 1 ? leaves_first() : leaves_in_turn();
        uint32_t chunks = 0;
        while (true) {
            bool more = false;
            if (chunks > 0) wait_late();
#pragma unroll 1
            for (uint32_t stage = 0;; ++stage) {
                if (stage == min(chunks, uint32_t(kStages))) more = find_run(sets);
                if (stage == chunks) break;
                stages.wait_empty();
                copy_x(*run, stage, stages.slot, leaves);
                copy_a(*run, stage, stages.slot);
                barrier_arrive_after_copies(stages.full());
                stages.advance();
            }
            run = run_slots + runs.slot;
            if (!more && threadIdx.x == kMultiplyThreads) run_slots[runs.slot].chunks = 0;
            runs.hand_over();
            runs.advance();
            if (!more) break;
            chunks = run->chunks;
        }
    }

    // The next run of the share with something to do in it; false where there is none.
    __device__ __forceinline__ bool find_run(uint32_t sets) const {
        runs.wait_empty();
        while (share.next < share.end) {
            if (take(run_slots[runs.slot], sets)) return true;
        }
        return false;
    }

    __device__ __forceinline__ void multiply() {
        const Lane lane = lane_of_thread();
        while (true) {
            runs.wait_full();
            const Run& run = run_slots[runs.slot];
            if (run.chunks == 0) break;
            if (lane.warp / 4 * kWarpgroupRows < run.tile.count) {
                multiply_run(run, lane);
            } else {
                pass(run.chunks);
            }
            runs.give_back();
            runs.advance();
        }
    }

    // A warpgroup for whose rows the tile is too short.
    __device__ __forceinline__ void pass(uint32_t count) {
#pragma unroll 1
        for (uint32_t stage = 0; stage < count; ++stage) {
            stages.wait_full();
            stages.give_back();
            stages.advance();
        }
    }

    __device__ __forceinline__ void multiply_run(const Run& run, const Lane& lane) {
        const SharedAddress x = shared + (lane.warp * 16 + lane.group) * kXPitch + lane.quarter / 2 * 16 + lane.quarter % 2 * 4 + lane.group % 2 * 8;
        uint32_t chunk = 0;
#pragma unroll 1
        while (chunk < run.chunks) {
            const uint32_t block_end = min(chunk + kChunksPerBlock, run.chunks);
            WarpgroupSums block_sum[kUnits] = {};
#pragma unroll 1
            for (; chunk < block_end; ++chunk) multiply_chunk(block_sum, x);
            store(run, run.k_block + (chunk - 1) / kChunksPerBlock, block_sum);
        }
    }

    // Adds a chunk: 64 ranks after the other, their sums added while the next ones are multiplied.
    __device__ __forceinline__ void multiply_chunk(WarpgroupSums (&block_sum)[kUnits], SharedAddress x_row) {
        stages.wait_full();
        const uint32_t offset = stages.slot * kStageBytes;
        uint32_t x[kChunkSteps][2][4];
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step) load_x(x[step], x_row + offset + step * 64);
        WarpgroupSums sum[2];
        fence_for_mma();
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const SharedAddress a = shared + kXBytes + offset + unit * 64 * 16;
            warpgroup_fence();
#pragma unroll
            for (int i = 0; i < kChunkSteps * 2; ++i) {
                warpgroup_mma(sum[unit % 2], x[i / 2][i % 2], brick_descriptor(a + i * 2 * kAPieceBytes, kAPieceBytes), i == 0);
            }
            warpgroup_commit();
            if (unit > 0) {
                warpgroup_wait<1>();
                add(block_sum[unit - 1], sum[(unit - 1) % 2]);
            }
        }
        warpgroup_wait<0>();
        stages.give_back();
        stages.advance();
        add(block_sum[kUnits - 1], sum[(kUnits - 1) % 2]);
    }

    __device__ __forceinline__ static void add(WarpgroupSums& total, const WarpgroupSums& sum) {
#pragma unroll
        for (int i = 0; i < 32; ++i) total[i] += sum[i];
    }

    // Both MMAs' x of 32 k, of the lane's row and the 8th after it. Lanes of odd rows load the halves of a piece in the other order: 8 rows, two pieces and two
    // words each, are then on all banks once.
    __device__ __forceinline__ static void load_x(uint32_t (&x)[2][4], SharedAddress at) {
        const bool odd = (at & 8) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t v = load_shared4(at + i / 2 * 32 + i % 2 * 8 * kXPitch);
            const uint32_t w = load_shared4((at ^ 8) + i / 2 * 32 + i % 2 * 8 * kXPitch);
            x[0][i] = odd ? w : v;
            x[1][i] = odd ? v : w;
        }
    }

    __device__ __forceinline__ void store(const Run& run, uint32_t k_block, const WarpgroupSums (&sum)[kUnits]) const {
        const Lane lane = lane_of_thread();
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            if (run.set.adapter[group].rank == 0) continue;
            const DeltaSite& site = p.sites[run.set.work[group].site];
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const uint32_t row = lane.warp * 16 + lane.group + high * 8;
                if (row >= run.tile.count) continue;
                float* to = partials_at(p, site, k_block, run.tile.first + row) + run.set.work[group].first_rank + 2 * lane.quarter;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float* from = &sum[group / 4][(group % 4 * 2 + i) * 4 + high * 2];
                    *reinterpret_cast<float2*>(to + i * 8) = make_float2(from[0], from[1]);
                }
            }
        }
    }
};

// Tiles of both kinds; `sets` sets of up to `kUnits` times 64 ranks.
template <int kUnits>
__device__ __forceinline__ void shrink_warpgroup(const DeltaParams& p, uint32_t sets) {
    using Work = WarpgroupShrink<kUnits>;
    extern __shared__ __align__(128) char shared[];
    __shared__ typename Work::Run run_slots[Work::kRuns];
    __shared__ WorkShare share;
    __shared__ uint64_t barriers[Work::Stages::kBarriers + Work::Runs::kBarriers];
    begin_late(p);
    Work work{p, shared_address(shared), run_slots, share, typename Work::Stages(barriers), typename Work::Runs(barriers + Work::Stages::kBarriers)};
    const PassTiles tiles = tiles_of_pass(p);
    if (threadIdx.x == 0) {
        share = share_of(tiles, sets * p.k_blocks);
        work.stages.init(kCopyThreads, kMultiplyThreads);
        work.runs.init(kCopyThreads, kMultiplyThreads);
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= kMultiplyThreads) {
        keep_registers<Work::kCopyRegisters>();
        work.copy(sets);
        wait_late();
    } else {
        take_registers<Work::kMultiplyRegisters>();
        wait_late();  // at once: the next launch may start when all threads have
        work.multiply();
    }
}
