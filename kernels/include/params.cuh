// What kernels are given. The layout is that of `crates/lora-kernels/src/params.rs`, where the fields are documented.
#pragma once

#include <cstddef>
#include <cstdint>

#include "constants.cuh"

struct Tile {
    uint32_t entry;
    uint32_t first;
    uint32_t count;
    uint32_t reserved;
};

struct DeltaSite {
    uint64_t a_table;
    uint64_t b_table;
    uint64_t scale_table;
    uint64_t rank_table;
    uint64_t a;
    uint64_t b;
    uint64_t out;
    uint64_t out_stride;
    uint64_t partials;
    float scale;
    uint32_t rank;
    uint32_t n_out;
    uint32_t max_rank;
};

struct DeltaParams {
    uint64_t x;
    uint64_t x_stride;
    uint64_t tiles;
    uint64_t tile_count;
    uint64_t perm;
    uint64_t x_rows;
    uint32_t rows;
    uint32_t x_row_count;
    uint32_t k_in;
    uint32_t k_blocks;
    uint32_t x_div;
    uint32_t tile_rows;
    uint32_t slots;
    uint32_t site_count;
    uint32_t pass_first;
    uint32_t pass_rows;
    uint32_t max_tiles;
    uint32_t flags;
    DeltaSite sites[kMaxSites];
};

struct GroupParams {
    uint64_t seq_slot;
    uint64_t tile_count;
    uint64_t tiles;
    uint64_t perm;
    uint32_t rows;
    uint32_t slots;
    uint32_t small_max;
    uint32_t max_tiles;
};

struct EntryParams {
    uint64_t adapters;
    uint64_t resident_of_slot;
    uint64_t experts;
    uint64_t offsets;
    uint64_t tokens;
    uint32_t token_count;
    uint32_t top_k;
    uint32_t num_experts;
    uint32_t slots;
    uint32_t residents;
    uint32_t reserved;
};

struct OverlaySlot {
    uint64_t rows;
    uint64_t ids;
    uint64_t slot_map;
    uint32_t n_override;
    uint32_t reserved;
};

struct RowDiffParams {
    uint64_t a;
    uint64_t b;
    uint64_t a_stride;
    uint64_t b_stride;
    uint64_t distances;
    uint32_t rows;
    uint32_t cols;
};

struct GatherRowsParams {
    uint64_t base;
    uint64_t base_stride;
    uint64_t delta;
    uint64_t delta_stride;
    uint64_t index;
    uint64_t out;
    uint64_t out_stride;
    uint32_t base_rows;
    uint32_t delta_rows;
    uint32_t rows;
    uint32_t cols;
};

struct ReplaceRowsParams {
    uint64_t entries;
    uint64_t token_ids;
    uint64_t seq_slot;
    uint64_t out;
    uint64_t out_stride;
    uint32_t rows;
    uint32_t hidden;
    uint32_t slots;
    uint32_t vocab;
    uint32_t slot;
    float multiplier;
    uint32_t flags;
    uint32_t reserved;
};

struct LogitsParams {
    uint64_t entries;
    uint64_t tiles;
    uint64_t tile_count;
    uint64_t perm;
    uint64_t x;
    uint64_t x_stride;
    uint64_t logits;
    uint64_t logits_stride;
    uint32_t rows;
    uint32_t k_in;
    uint32_t slots;
    uint32_t vocab;
    uint32_t slot;
    uint32_t tile_rows;
    uint32_t max_tiles;
    uint32_t flags;
    uint32_t expected_ids;
    uint32_t reserved;
};

// Where each site's share of a grid dimension ends; unused sites end where the last one does.
struct SiteEnds {
    uint32_t end[kMaxSites];
};

static_assert(sizeof(Tile) == 16);
static_assert(sizeof(DeltaSite) == 88);
static_assert(offsetof(DeltaSite, a) == 32 && offsetof(DeltaSite, partials) == 64);
static_assert(offsetof(DeltaSite, scale) == 72 && offsetof(DeltaSite, max_rank) == 84);
static_assert(sizeof(DeltaParams) == 96 + 88 * kMaxSites);
static_assert(offsetof(DeltaParams, x_rows) == 40 && offsetof(DeltaParams, rows) == 48);
static_assert(offsetof(DeltaParams, pass_first) == 80 && offsetof(DeltaParams, sites) == 96);
static_assert(sizeof(GroupParams) == 48);
static_assert(sizeof(EntryParams) == 64 && offsetof(EntryParams, token_count) == 40);
static_assert(sizeof(OverlaySlot) == 32 && offsetof(OverlaySlot, slot_map) == 16 && offsetof(OverlaySlot, n_override) == 24);
static_assert(sizeof(RowDiffParams) == 48 && offsetof(RowDiffParams, distances) == 32 && offsetof(RowDiffParams, rows) == 40);
static_assert(sizeof(GatherRowsParams) == 72 && offsetof(GatherRowsParams, index) == 32);
static_assert(offsetof(GatherRowsParams, base_rows) == 56);
static_assert(sizeof(ReplaceRowsParams) == 72 && offsetof(ReplaceRowsParams, out) == 24);
static_assert(offsetof(ReplaceRowsParams, rows) == 40 && offsetof(ReplaceRowsParams, multiplier) == 60);
static_assert(sizeof(LogitsParams) == 104 && offsetof(LogitsParams, x) == 32);
static_assert(offsetof(LogitsParams, rows) == 64 && offsetof(LogitsParams, flags) == 92);
