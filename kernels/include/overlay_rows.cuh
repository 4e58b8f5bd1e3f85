// Whole rows: by how much they differ, copies of some, and rows of an overlay in place of others.
//
// A warp takes a row of a diff or a gather, a block or half of one a row to replace: there are few of those, and finding one is a chain of three loads. Rows
// move 16 bytes a lane where every address and the width allow it, else element by element.
#pragma once

#include <cuda_bf16.h>

#include "params.cuh"
#include "primitives.cuh"

constexpr int kRowWarps = kRowThreads / 32;
constexpr int kElementsAPiece = 8;

// Pieces of a row that a lane has in flight where a warp takes a row, and where a block or half of one does: fewer registers leave room for the next kernel's
// blocks.
constexpr int kPiecesAhead = 8;
constexpr int kBlockPiecesAhead = 4;

__device__ __forceinline__ bool aligned16(uint64_t address, uint64_t stride) { return address % 16 == 0 && stride % 8 == 0; }

__device__ __forceinline__ uint16_t* row_of(uint64_t table, uint64_t stride, uint64_t row) {
    return reinterpret_cast<uint16_t*>(table) + row * stride;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float v;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}

// Absolute difference of two elements whose bits are the upper halves; none where the bits are equal, whatever they stand for.
__device__ __forceinline__ float element_distance(uint32_t a, uint32_t b) {
    return a == b ? 0.0f : fabsf(__uint_as_float(a) - __uint_as_float(b));
}

__device__ __forceinline__ float pair_distance(float largest, uint32_t a, uint32_t b) {
    largest = max_or_nan(largest, element_distance(a << 16, b << 16));
    return max_or_nan(largest, element_distance(a & 0xffff0000u, b & 0xffff0000u));
}

__device__ __forceinline__ float piece_distance(float largest, const uint4& a, const uint4& b) {
    // Most rows of a table are those of the other.
    if (((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) == 0) return largest;
    largest = pair_distance(largest, a.x, b.x);
    largest = pair_distance(largest, a.y, b.y);
    largest = pair_distance(largest, a.z, b.z);
    return pair_distance(largest, a.w, b.w);
}

__device__ __forceinline__ void row_diff(const RowDiffParams& p) {
    wait_for_predecessor();
    const uint64_t row = uint64_t(blockIdx.x) * kRowWarps + threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    const uint16_t* a = row_of(p.a, p.a_stride, row);
    const uint16_t* b = row_of(p.b, p.b_stride, row);
    float largest = 0;
    if (aligned16(p.a, p.a_stride) && aligned16(p.b, p.b_stride) && p.cols % kElementsAPiece == 0) {
        const uint32_t pieces = p.cols / kElementsAPiece;
        for (uint32_t first = lane; first < pieces; first += 32 * kPiecesAhead) {
            uint4 from_a[kPiecesAhead], from_b[kPiecesAhead];
#pragma unroll
            for (int i = 0; i < kPiecesAhead; ++i) {
                const uint32_t piece = first + i * 32;
                from_a[i] = load16_if(piece < pieces, a + uint64_t(piece) * kElementsAPiece);
                from_b[i] = load16_if(piece < pieces, b + uint64_t(piece) * kElementsAPiece);
            }
#pragma unroll
            for (int i = 0; i < kPiecesAhead; ++i) largest = piece_distance(largest, from_a[i], from_b[i]);
        }
    } else {
        for (uint32_t i = lane; i < p.cols; i += 32) {
            largest = max_or_nan(largest, element_distance(load_u16(a + i) << 16, load_u16(b + i) << 16));
        }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    if (lane == 0) reinterpret_cast<float*>(p.distances)[row] = isnan(largest) ? __uint_as_float(0x7f800000u) : largest;
}

__device__ __forceinline__ uint4 multiplied(uint4 v, float by) {
    v.x = pack_bf16(bf16_low(v.x) * by, bf16_high(v.x) * by);
    v.y = pack_bf16(bf16_low(v.y) * by, bf16_high(v.y) * by);
    v.z = pack_bf16(bf16_low(v.z) * by, bf16_high(v.z) * by);
    v.w = pack_bf16(bf16_low(v.w) * by, bf16_high(v.w) * by);
    return v;
}

// Copies a row by `threads` threads, of which this one is the `thread`th, `kAhead` pieces a thread at a time.
template <int kAhead, bool kMultiply>
__device__ __forceinline__ void copy_row(uint16_t* to, const uint16_t* from, uint32_t cols, uint32_t thread, uint32_t threads, float by) {
    const bool whole = (reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) % 16 == 0;
    const uint32_t pieces = whole ? cols / kElementsAPiece : 0;
    for (uint32_t first = thread; first < pieces; first += threads * kAhead) {
        uint4 v[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const uint32_t piece = first + i * threads;
            v[i] = load16_if(piece < pieces, from + uint64_t(piece) * kElementsAPiece);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const uint32_t piece = first + i * threads;
            if (kMultiply) v[i] = multiplied(v[i], by);
            if (piece < pieces) *reinterpret_cast<uint4*>(to + uint64_t(piece) * kElementsAPiece) = v[i];
        }
    }
    for (uint32_t i = pieces * kElementsAPiece + thread; i < cols; i += threads) {
        const uint32_t element = load_u16(from + i);
        to[i] = static_cast<uint16_t>(kMultiply ? pack_bf16(__uint_as_float(element << 16) * by, 0) : element);
    }
}

__device__ __forceinline__ void gather_rows(const GatherRowsParams& p) {
    wait_for_predecessor();
    const uint64_t row = uint64_t(blockIdx.x) * kRowWarps + threadIdx.x / 32;
    if (row >= p.rows) return;
    const uint32_t index = __ldcg(reinterpret_cast<const uint32_t*>(p.index) + row);
    const bool of_base = index < p.base_rows;
    const uint32_t of_delta = index - p.base_rows;
    if (!of_base && of_delta >= p.delta_rows) return;
    const uint16_t* from = of_base ? row_of(p.base, p.base_stride, index) : row_of(p.delta, p.delta_stride, of_delta);
    copy_row<kPiecesAhead, false>(row_of(p.out, p.out_stride, row), from, p.cols, threadIdx.x % 32, 32, 0);
}

// Part of a record that no launch of the step writes: by way of L1, where a block finds it again.
template <int kOffset>
__device__ __forceinline__ uint4 load_record16(const void* base) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4+%5];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(base), "n"(kOffset) : "memory");
    return v;
}

// The overlay of a slot; `n_override` 0 where there is none.
__device__ __forceinline__ OverlaySlot overlay_of(uint64_t entries, uint32_t slots, uint32_t slot) {
    OverlaySlot overlay{0, 0, 0, 0, 0};
    if (slot >= slots) return overlay;  // a negative slot is past every table once it is unsigned
    const OverlaySlot* at = reinterpret_cast<const OverlaySlot*>(entries) + slot;
    const uint4 low = load_record16<0>(at);
    const uint4 high = load_record16<16>(at);
    overlay.rows = low.x | uint64_t(low.y) << 32;
    overlay.ids = low.z | uint64_t(low.w) << 32;
    overlay.slot_map = high.x | uint64_t(high.y) << 32;
    overlay.n_override = overlay.rows == 0 ? 0 : high.z;
    return overlay;
}

// Asks for the lines of the overlays' records, before it is known which are wanted.
__device__ __forceinline__ void prefetch_overlays(uint64_t entries, uint32_t slots) {
    if (threadIdx.x * kLineBytes < slots * sizeof(OverlaySlot)) prefetch_l2(entries + threadIdx.x * kLineBytes);
}

__device__ __forceinline__ void replace_rows(const ReplaceRowsParams& p) {
    prefetch_overlays(p.entries, p.slots);
    const bool halves = p.rows > gridDim.x;
    const uint32_t threads = halves ? kRowThreads / 2 : kRowThreads;
    const uint32_t thread = halves ? threadIdx.x % (kRowThreads / 2) : threadIdx.x;
    const uint32_t row = halves ? blockIdx.x * 2 + threadIdx.x / (kRowThreads / 2) : blockIdx.x;
    // Before the wait: nothing is written here that a dependent reads before its own, and a grouping before this launch makes it wait first.
    let_dependents_start();
    wait_for_predecessor();
    if (row >= p.rows) return;
    const uint32_t token = __ldcg(reinterpret_cast<const uint32_t*>(p.token_ids) + row);
    const uint32_t slot = p.seq_slot == 0 ? p.slot : __ldcg(reinterpret_cast<const uint32_t*>(p.seq_slot) + row);
    const OverlaySlot overlay = overlay_of(p.entries, p.slots, slot);
    if (token >= p.vocab || overlay.n_override == 0 || overlay.slot_map == 0) return;
    const uint32_t place = __ldcg(reinterpret_cast<const uint32_t*>(overlay.slot_map) + token);
    if (place >= overlay.n_override) return;
    const uint16_t* from = row_of(overlay.rows, p.hidden, place);
    uint16_t* to = row_of(p.out, p.out_stride, row);
    if (p.flags & kFlagMultiply) {
        copy_row<kBlockPiecesAhead, true>(to, from, p.hidden, thread, threads, p.multiplier);
    } else {
        copy_row<kBlockPiecesAhead, false>(to, from, p.hidden, thread, threads, 0);
    }
}
