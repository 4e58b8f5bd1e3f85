// LM-head logits of overridden ids where warpgroups multiply: hidden rows are kept in shared memory while an overlay's rows pass by them.
//
// The canonical order of summation is that of `overlay_head.cuh`; each block of a cluster of four has a part of the hidden size, of up to 64 hidden rows that
// an item has. A cluster takes a run of items, whose overlay rows stream through stages without a break, 32 ids after the other. Hidden rows are copied along with
// the first item that needs them, into the place of those that were needed before.
//
// Warps share the work: eight copy, four multiply, four add up the parts of a part of the rows and store logits, while the next ids are multiplied. Those that
// multiply do not copy: the fence between copies and their MMAs would wait for all copies that a thread has under way. Hidden rows are the MMA's 64-row
// operand, ids its columns.
#pragma once

#include "barrier.cuh"
#include "cluster.cuh"
#include "head_logits.cuh"
#include "head_stages.cuh"
#include "warpgroup.cuh"

constexpr int kKeptThreads = kHeadThreads + 2 * kWarpgroupThreads;
static_assert(kHeadKeptThreads == kKeptThreads);

struct KeptHead {
    static constexpr int kIds = kHeadKeptIds;
    static constexpr int kRows = kWarpgroupRows;
    static constexpr int kTiles = kHeadKeptTiles;  // of 64 columns, in a stage
    static constexpr int kIdTileBytes = kIds * kHeadRowBytes;
    static constexpr int kRowTileBytes = kRows * kHeadRowBytes;
    static constexpr int kStageBytes = kTiles * kIdTileBytes;
    static constexpr int kRowTiles = kHeadKeptRowTiles;  // that there is room for
    static constexpr int kCopyRows = kHeadThreads / kHeadPieces;
    static constexpr int kRowPasses = kRows / kCopyRows;
    static constexpr int kItems = 4;
    static constexpr int kWarps = kWarpgroupThreads / 32;
    static_assert(kIds == kCopyRows);
    // What a stage's hidden rows are copied over was multiplied before the stage's own slot was given back.
    static_assert(kHeadKeptStages * kTiles <= kRowTiles && kRowTiles % kTiles == 0);

    // Work is shared out by half items.
    static constexpr int kHalfIds = kIds / 2;
    using Work = HeadWork<kHalfIds, kRows, true>;
    using Stages = Ring<kHeadKeptStages>;
    using Items = Ring<kItems>;

    struct Entry {
        HeadItem item;
        uint32_t row_tile;  // the first of its hidden rows' in the ring of those
    };

    struct Shared {
        Work::Shared work;
        Entry entries[kItems];
        uint64_t stages[Stages::kBarriers];
        uint64_t items[Items::kBarriers];
        uint64_t arrived[2];  // the parts of the sums that this block adds up, of every other item
        uint64_t taken[2];    // every block of the cluster has read what it adds up
    };

    const LogitsParams& p;
    Work work;
    Entry* entries;
    Stages stages;
    Items items;
    SharedAddress arrived;
    SharedAddress taken;
    SharedAddress row_ring;
    SharedAddress id_stages;
    uint32_t first_column;  // of the hidden size, that this block takes
    uint32_t end_column;
    uint32_t steps;  // stages that an item has

    // Copies under way.
    uint32_t next_half;  // of the window's
    uint32_t end_half;
    Entry loaded;
    bool other_rows;  // than those of the item before
    const __nv_bfloat16* id_row;
    const __nv_bfloat16* rows[kRowPasses];
    uint32_t present;  // which of the rows exist, a bit each

    // The cluster's share of the window: half items that follow one another.
    __device__ __forceinline__ void share_window() {
        const uint64_t clusters = gridDim.x / kLogitParts;
        const uint64_t cluster = blockIdx.x / kLogitParts;
        next_half = uint32_t(work.window_items * cluster / clusters);
        end_half = uint32_t(work.window_items * (cluster + 1) / clusters);
    }

    // The next half item, and what the share has of the one after it where that has the same rows.
    __device__ __forceinline__ HeadItem next() {
        while (next_half == end_half) {
            if (!work.next_window()) return HeadItem{0, 0, 0, 0, 0, 0};
            share_window();
            loaded.item.ids_after = 0;
        }
        HeadItem item = loaded.item.ids_after > 0 ? work.item_after(loaded.item) : work.item_of_window(next_half);
        ++next_half;
        const uint32_t more = next_half == end_half ? 0 : min(item.ids_after, uint32_t(kHalfIds));
        item.id_count += more;
        item.ids_after -= more;
        next_half += more > 0;
        return item;
    }

    // Finds the next item and its overlay's rows, and tells the others. False where there is none.
    __device__ __forceinline__ bool open_item() {
        const HeadItem item = next();
        other_rows = item.first_position != loaded.item.first_position || item.count != loaded.item.count;
        const uint32_t row_tile = other_rows ? (loaded.row_tile + steps * kTiles) % kRowTiles : loaded.row_tile;
        loaded = Entry{item, row_tile};
        items.wait_empty();
        if (threadIdx.x == 0) {
            entries[items.slot] = loaded;
            items.hand_over();
        }
        items.advance();
        if (item.count == 0) return false;
        id_row = reinterpret_cast<const __nv_bfloat16*>(item.rows) + uint64_t(threadIdx.x / kHeadPieces) * p.k_in;
        if (threadIdx.x < item.id_count) prefetch_l2(item.ids + threadIdx.x * sizeof(uint32_t));
        return true;
    }

    // Finds its hidden rows.
    __device__ __forceinline__ void open_rows() {
        if (!other_rows) return;
        present = 0;
#pragma unroll
        for (int i = 0; i < kRowPasses; ++i) {
            const uint32_t position = threadIdx.x / kHeadPieces + i * kCopyRows;
            // Those past the last repeat it: a load each, none of which waits for a branch.
            const uint32_t from = head_row(p, loaded.item.first_position + min(position, loaded.item.count - 1));
            rows[i] = reinterpret_cast<const __nv_bfloat16*>(p.x) + uint64_t(min(from, p.rows - 1)) * p.x_stride;
            present |= uint32_t(position < loaded.item.count) << i;
        }
    }

    // The thread's piece of a stage's `tile`th tile: an element of the hidden size.
    __device__ __forceinline__ uint32_t column(uint32_t step, int tile) const {
        return first_column + (step * kTiles + tile) * kHeadStageK + threadIdx.x % kHeadPieces * kElementsAPiece;
    }

    // What an id or a row that does not exist leaves in shared memory is multiplied, but into sums that are not stored.
    __device__ __forceinline__ void copy_ids(uint32_t step, uint32_t slot) const {
        if (threadIdx.x / kHeadPieces >= loaded.item.id_count) return;
        const SharedAddress to = id_stages + slot * kStageBytes + head_offset(threadIdx.x / kHeadPieces, threadIdx.x % kHeadPieces);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const uint32_t at = column(step, tile);
            copy_once_async16(to + tile * kIdTileBytes, id_row + (at < end_column ? at : 0), at < end_column);
        }
    }

    __device__ __forceinline__ void copy_rows(uint32_t step) const {
        const SharedAddress to = row_ring + head_offset(threadIdx.x / kHeadPieces, threadIdx.x % kHeadPieces);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const uint32_t at = column(step, tile);
            const uint32_t slot = (loaded.row_tile + step * kTiles + tile) % kRowTiles;
#pragma unroll
            for (int i = 0; i < kRowPasses; ++i) {
                if ((present >> i & 1) == 0) continue;
                copy_async16(to + slot * kRowTileBytes + i * kCopyRows * kHeadRowBytes, rows[i] + (at < end_column ? at : 0), at < end_column);
            }
        }
    }

    __device__ __forceinline__ void end_stage() {
        barrier_arrive_after_copies(stages.full());
        stages.advance();
    }

    // Rows of the first overlay are loaded at once, hidden rows after the wait for the predecessor.
    __device__ __forceinline__ void copy(bool waited) {
        prefetch_overlays(p.entries, p.slots);
        work.start();
        share_window();
        loaded = Entry{{0, 0, 0, ~0u, 0, 0}, 0};
        bool more = open_item();
        const uint32_t first = more ? min(steps, uint32_t(kHeadKeptStages)) : 0;
#pragma unroll 1
        for (uint32_t step = 0; step < first; ++step) copy_ids(step, step);
        if (more) open_rows();
        if (!waited) wait_for_predecessor();
#pragma unroll 1
        for (uint32_t step = 0; step < first; ++step) {
            copy_rows(step);
            end_stage();
        }
        uint32_t step = first;
        while (more) {
#pragma unroll 1
            for (; step < steps; ++step) {
                stages.wait_empty();
                copy_ids(step, stages.slot);
                if (other_rows) copy_rows(step);
                end_stage();
            }
            step = 0;
            more = open_item();
            if (more) open_rows();
        }
        cluster_wait();
        copy_async_wait<0>();
    }

    // The sums that a block adds up: 16 rows and 32 ids of each part. They lie as MMAs leave them, four of a thread together, those of 32 ids of a row and the 8th
    // after it side by side.
    static constexpr int kOwnRows = kRows / kLogitParts;
    static constexpr int kPartSums = kOwnRows * kIds;
    static_assert(kOwnRows == 16);

    static __device__ __forceinline__ uint32_t sent_at(uint32_t row, uint32_t id) {
        const uint32_t thread = row % 8 * 4 + id % 8 / 2;
        return (thread * (kIds / 8) + id / 8) * 4 + row / 8 * 2 + id % 2;
    }

    // Of the `turn`th item.
    static __device__ __forceinline__ float* sums(uint32_t turn) {
        extern __shared__ __align__(1024) char dynamic[];
        float* first = reinterpret_cast<float*>(dynamic + kRowTiles * kRowTileBytes + kHeadKeptStages * kStageBytes);
        return first + turn % 2 * kLogitParts * kPartSums;
    }

    // Sends a part's sums to the blocks that add up their rows: a warp's 16 are one block's.
    __device__ __forceinline__ void send(const HeadItem& item, uint32_t turn, const WarpgroupSums32& sum) const {
        // Until all have read what was sent of the item before the last.
        if (turn > 1) barrier_wait(taken + turn % 2 * kBarrierBytes, (turn / 2 - 1) & 1);
        const uint32_t warp = threadIdx.x / 32 % kWarps;
        if (warp * kOwnRows >= item.count) return;
        const uint32_t lane = threadIdx.x % 32;
        const float* own = sums(turn) + cluster_rank() * kPartSums + sent_at(lane / 4, lane % 4 * 2);
        const SharedAddress there = address_in_cluster(shared_address(own), warp);
        const SharedAddress barrier = address_in_cluster(arrived + turn % 2 * kBarrierBytes, warp);
#pragma unroll
        for (int i = 0; i < kIds / 8; ++i) {
            if (i * 8 >= item.id_count) break;
            const float four[4] = {sum[i * 4], sum[i * 4 + 1], sum[i * 4 + 2], sum[i * 4 + 3]};
            store_async16(there + sent_at(0, i * 8) * sizeof(float), barrier, four);
        }
    }

    __device__ __forceinline__ void multiply() {
        cluster_wait();
#pragma unroll 1
        for (uint32_t turn = 0;; ++turn) {
            items.wait_full();
            const Entry entry = entries[items.slot];
            if (entry.item.count == 0) break;
            WarpgroupSums32 sum = {};
            SharedAddress read = 0;
            // A slot is given back once the next one's MMAs are under way.
#pragma unroll 1
            for (uint32_t step = 0; step < steps; ++step) {
                stages.wait_full();
                fence_for_mma();
                warpgroup_fence();
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    const uint32_t row_tile = (entry.row_tile + step * kTiles + tile) % kRowTiles;
                    const uint64_t rows16 = swizzled_descriptor(row_ring + row_tile * kRowTileBytes);
                    const uint64_t ids16 = swizzled_descriptor(id_stages + stages.slot * kStageBytes + tile * kIdTileBytes);
#pragma unroll
                    for (int k16 = 0; k16 < kHeadStageK / 16; ++k16) warpgroup_mma(sum, swizzled_after(rows16, k16), swizzled_after(ids16, k16));
                }
                warpgroup_commit();
                warpgroup_wait<1>();
                if (step > 0) barrier_arrive_own(read);
                read = stages.empty();
                stages.advance();
            }
            warpgroup_wait<0>();
            barrier_arrive_own(read);
            send(entry.item, turn, sum);
            items.give_back();
            items.advance();
        }
    }

    // Adds up the parts of this block's rows and stores logits, item after item.
    __device__ __forceinline__ void finish() {
        cluster_wait();
        const uint32_t warp = threadIdx.x / 32 % kWarps;
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t from = cluster_rank() * kOwnRows + warp;
#pragma unroll 1
        for (uint32_t turn = 0;; ++turn) {
            items.wait_full();
            const HeadItem item = entries[items.slot].item;
            if (item.count == 0) break;
            // Before the wait: they are there after it.
            LogitPlaces<kIds / 32, kWarps, kOwnRows / kWarps> places;
            places.find_ids(p, item);
            places.find_rows(p, item, from, min((cluster_rank() + 1) * kOwnRows, item.count));
            items.give_back();
            items.advance();
            // Told only if an item comes that waits for it: no block is reached for once it may have left.
            items.wait_full();
            if (turn > 0 && warp == 0 && lane < kLogitParts && entries[items.slot].item.count > 0) {
                barrier_arrive(address_in_cluster(taken + (turn - 1) % 2 * kBarrierBytes, lane));
            }
            const SharedAddress barrier = arrived + turn % 2 * kBarrierBytes;
            const uint32_t eights = cluster_rank() * kOwnRows < item.count ? (item.id_count + 7) / 8 : 0;
            if (warp == 0 && lane == 0) barrier_expect(barrier, kLogitParts * eights * 8 * kOwnRows * sizeof(float));
            // A block without rows of the item waits too, for nothing but its own arrival: a barrier is waited for in every phase.
            barrier_wait(barrier, turn / 2 & 1);
            places.store(p, warp, [&](uint32_t row, uint32_t id) {
                const float* at = sums(turn) + sent_at(row, id);
                float total = at[0];
#pragma unroll
                for (int part = 1; part < kLogitParts; ++part) total += at[part * kPartSums];
                return total;
            });
            asm volatile("bar.sync 2, %0;" ::"n"(kWarpgroupThreads) : "memory");
        }
    }
};

__device__ __forceinline__ void kept_logits(const LogitsParams& p) {
    __shared__ KeptHead::Shared shared;
    const bool wait_first = (p.flags & kFlagTilesReady) == 0;
    if (wait_first) wait_for_predecessor();
    let_dependents_start();
    KeptHead head{p, {p, shared.work}, shared.entries, KeptHead::Stages(shared.stages), KeptHead::Items(shared.items)};
    head.arrived = shared_address(shared.arrived);
    head.taken = shared_address(shared.taken);
    if (threadIdx.x == 0) {
        head.stages.init(kHeadThreads, kWarpgroupThreads);
        head.items.init(1, 2 * kWarpgroupThreads);
        for (int i = 0; i < 2; ++i) {
            barrier_init(head.arrived + i * kBarrierBytes, 1);
            barrier_init(head.taken + i * kBarrierBytes, kLogitParts);
        }
        fence_barrier_init();
    }
    __syncthreads();
    cluster_arrive();
    extern __shared__ __align__(1024) char dynamic[];
    head.row_ring = kept_shared_address(dynamic);
    head.id_stages = head.row_ring + KeptHead::kRowTiles * KeptHead::kRowTileBytes;
    const uint32_t tiles = part_tiles(p);
    head.first_column = cluster_rank() * tiles * kHeadStageK;
    head.end_column = min(p.k_in, head.first_column + tiles * kHeadStageK);
    head.steps = (tiles + KeptHead::kTiles - 1) / KeptHead::kTiles;
    // The same for a warp's threads, which the compiler is to know where they multiply together.
    const uint32_t group = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroupThreads, 0);
    if (group < kHeadThreads / kWarpgroupThreads) {
        head.copy(wait_first);
        return;
    }
    if (!wait_first) wait_for_predecessor();
    if (group == kHeadThreads / kWarpgroupThreads) {
        head.multiply();
    } else {
        head.finish();
    }
}
