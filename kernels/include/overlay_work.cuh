// The head's work: which rows go with which of an overlay's ids, found on the device from tiles and overlay records.
//
// An item is up to `kRows` rows of one slot and up to `kIds` of its overlay's ids. Tiles of one slot stand together and their positions are contiguous, so
// small tiles are put together again: a slot's overlay is read once for every `kRows` of its rows. Items are numbered tile by tile. The
// grid cannot know how many there are, since overlays change under a captured graph: blocks take every n-th of them.
#pragma once

#include "block_scan.cuh"
#include "overlay_rows.cuh"

constexpr int kHeadWarps = kHeadThreads / 32;

struct HeadItem {
    uint64_t rows;  // of the overlay, from the item's first id on
    uint64_t ids;
    uint32_t id_count;
    uint32_t first_position;
    uint32_t count;      // rows; 0 = there is no such item
    uint32_t ids_after;  // of the overlay, behind the item's
};

__device__ __forceinline__ uint32_t head_tiles(const LogitsParams& p) {
    return p.tiles == 0 ? p.max_tiles : min(*reinterpret_cast<const uint32_t*>(p.tile_count), p.max_tiles);
}

__device__ __forceinline__ Tile head_tile(const LogitsParams& p, uint32_t index) {
    if (p.tiles == 0) {
        const uint32_t first = index * p.tile_rows;
        return Tile{p.slot, first, min(p.tile_rows, p.rows - first), 0};
    }
    const uint4 v = reinterpret_cast<const uint4*>(p.tiles)[index];
    return Tile{v.x, v.y, v.z, v.w};
}

__device__ __forceinline__ uint32_t head_row(const LogitsParams& p, uint32_t position) {
    return p.perm == 0 ? position : reinterpret_cast<const uint32_t*>(p.perm)[position];
}

// Threads that find work meet here: a block's first `kHeadThreads`.
__device__ __forceinline__ void sync_finders() { asm volatile("bar.sync 1, %0;" ::"n"(kHeadThreads) : "memory"); }

// Finds items by number, in ascending order. A window holds as many tiles as threads find work. Of a tile larger than items, items are numbered row by row: those
// that follow one another share ids, or, with `kRowsStay`, rows.
template <int kIds, int kRows, bool kRowsStay = false>
struct HeadWork {
    struct Shared {
        uint32_t first_item[kHeadThreads];
        uint32_t group_start_of_warp[kHeadWarps];  // position of the last group that starts in the warp's tiles, plus one; 0 = none does
        uint32_t items_of_warp[kHeadWarps];
    };

    const LogitsParams& p;
    Shared& shared;
    uint32_t tiles;
    uint32_t window;         // first tile
    uint32_t group_start;    // of the last tile before the window's end, plus one
    uint32_t items_before;   // the window
    uint32_t window_items;

    // Items' worth of rows that a tile has: more than one where tiles are larger than items.
    __device__ __forceinline__ static uint32_t row_blocks(const Tile& tile) { return (tile.count + kRows - 1) / kRows; }

    // Called by all threads that find work; tiles may be read.
    __device__ __forceinline__ void start() {
        tiles = head_tiles(p);
        items_before = 0;
        group_start = 0;
        load_window(0);
    }

    __device__ __forceinline__ void load_window(uint32_t first) {
        window = first;
        const uint32_t warp = threadIdx.x / 32;
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t index = first + threadIdx.x;
        Tile tile{~0u, 0, 0, 0};
        uint32_t before = ~0u;
        // Not only of the tiles that there are, whose number is a load of its own: the list has room for as many.
        if (index < p.max_tiles) {
            tile = head_tile(p, index);
            before = index == 0 ? ~0u : head_tile(p, index - 1).entry;
        }
        const OverlaySlot overlay = overlay_of(p.entries, p.slots, tile.entry);
        const uint32_t ids = overlay.ids == 0 ? 0 : overlay.n_override;
        const bool present = index < tiles;
        const uint32_t starts = __ballot_sync(kAllLanes, present && (index == 0 || before != tile.entry));
        const uint32_t starts_here = starts & (kAllLanes >> (31 - lane));
        const uint32_t of_warp = __shfl_sync(kAllLanes, tile.first, starts == 0 ? 0 : 31 - __clz(starts));
        uint32_t start = __shfl_sync(kAllLanes, tile.first, starts_here == 0 ? 0 : 31 - __clz(starts_here));
        if (lane == 0) shared.group_start_of_warp[warp] = starts == 0 ? 0 : of_warp + 1;
        sync_finders();
        // Positions ascend: the last group is the one that starts furthest on.
        uint32_t carried = group_start;
#pragma unroll
        for (uint32_t other = 0; other < kHeadWarps; ++other) {
            const uint32_t theirs = shared.group_start_of_warp[other];
            group_start = max(group_start, theirs);
            if (other < warp) carried = max(carried, theirs);
        }
        if (starts_here == 0) start = carried - 1;
        const bool leads = present && (tile.first - start) % kRows == 0;
        const uint32_t items = leads ? (ids + kIds - 1) / kIds * row_blocks(tile) : 0;
        const uint32_t inclusive = warp_inclusive_scan(items);
        if (lane == 31) shared.items_of_warp[warp] = inclusive;
        sync_finders();
        window_items = 0;
        uint32_t of_others = 0;
#pragma unroll
        for (uint32_t other = 0; other < kHeadWarps; ++other) {
            if (other < warp) of_others += shared.items_of_warp[other];
            window_items += shared.items_of_warp[other];
        }
        shared.first_item[threadIdx.x] = of_others + inclusive - items;
        sync_finders();
    }

    // The last tile of the window whose items do not begin after `inside`.
    __device__ __forceinline__ uint32_t tile_of(uint32_t inside) const {
        constexpr uint32_t kStep = kHeadThreads / 32;
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t coarse = __popc(__ballot_sync(kAllLanes, shared.first_item[lane * kStep] <= inside)) - 1;
        const uint32_t fine = __popc(__ballot_sync(kAllLanes, shared.first_item[coarse * kStep + lane % kStep] <= inside)) / (32 / kStep) - 1;
        return coarse * kStep + fine;
    }

    // The item of number `item`, which is not below any asked for before.
    __device__ __forceinline__ HeadItem find(uint32_t item) {
        while (item - items_before >= window_items) {
            if (!next_window()) return HeadItem{0, 0, 0, 0, 0, 0};
        }
        return item_of_window(item - items_before);
    }

    // False where there is none.
    __device__ __forceinline__ bool next_window() {
        if (window + kHeadThreads >= tiles) return false;
        items_before += window_items;
        load_window(window + kHeadThreads);
        return true;
    }

    // The item of number `inside` of the window's.
    __device__ __forceinline__ HeadItem item_of_window(uint32_t inside) const {
        const uint32_t low = tile_of(inside);
        const uint32_t index = window + low;
        const Tile tile = head_tile(p, index);
        const uint32_t of_tile = inside - shared.first_item[low];
        // Small tiles that follow in the slot's rows; a large tile's rows may fill the item on their own.
        const uint32_t other = index + threadIdx.x % 32;
        uint32_t end = 0;
        if (other < tiles) {
            const Tile next = head_tile(p, other);
            if (next.entry == tile.entry && next.first - tile.first < kRows) end = next.first + next.count;
        }
        end = __reduce_max_sync(0xffffffffu, end);
        const OverlaySlot overlay = overlay_of(p.entries, p.slots, tile.entry);
        const uint32_t id_blocks = (overlay.n_override + kIds - 1) / kIds;
        const uint32_t id_block = kRowsStay ? of_tile % id_blocks : of_tile / row_blocks(tile);
        const uint32_t row_block = kRowsStay ? of_tile / id_blocks : of_tile % row_blocks(tile);
        const uint32_t first = tile.first + row_block * kRows;
        return item_at(overlay, id_block * kIds, first, min(end - first, uint32_t(kRows)));
    }

    // What follows `item` in its overlay, for the same rows.
    __device__ __forceinline__ HeadItem item_after(const HeadItem& item) const {
        return item_at(OverlaySlot{item.rows, item.ids, 0, item.id_count + item.ids_after, 0}, item.id_count, item.first_position, item.count);
    }

    // From an overlay's `first_id`th of `ids` on.
    __device__ __forceinline__ HeadItem item_at(const OverlaySlot& overlay, uint32_t first_id, uint32_t first_position, uint32_t count) const {
        const uint32_t left = overlay.n_override - first_id;
        return HeadItem{overlay.rows + uint64_t(first_id) * p.k_in * sizeof(__nv_bfloat16),
                        overlay.ids + uint64_t(first_id) * sizeof(uint32_t),
                        min(left, uint32_t(kIds)),
                        first_position,
                        count,
                        left - min(left, uint32_t(kIds))};
    }
};
