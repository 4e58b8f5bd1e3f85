// B in registers, as the MMAs of the expand kernels take it: a thread has 8 rows.
#pragma once

#include "params.cuh"
#include "primitives.cuh"

// First of the 4 ranks that a lane quarter takes of a group of 16.
__device__ __forceinline__ uint32_t first_of_quarter(uint32_t quarter) { return quarter % 2 * 8 + quarter / 2 * 4; }

// How B is read: by a tile's blocks alone, as far as is known.
struct ReadOnce {
    template <int kOffset>
    __device__ __forceinline__ void load(uint2& to, const void* from) const {
        to = load_weights8<kOffset>(from);
    }

    template <int kOffset>
    __device__ __forceinline__ void load(uint4& to, const void* from) const {
        to = load_weights16<kOffset>(from);
    }
};

// By those of one tile after the other, past which far more of out goes: it stays in the L2 until the last of them has it.
struct ReadAgain {
    uint64_t leaves;

    __device__ __forceinline__ explicit ReadAgain(bool by_others) : leaves(by_others ? leaves_last() : leaves_first()) {}

    template <int kOffset>
    __device__ __forceinline__ void load(uint2& to, const void* from) const {
        to = load_weights8<kOffset>(from, leaves);
    }

    template <int kOffset>
    __device__ __forceinline__ void load(uint4& to, const void* from) const {
        to = load_weights16<kOffset>(from, leaves);
    }
};

// Which 8 of a warp's 64 outputs a thread has the rows of B of.
//
// Small tiles have B as the 16-row operand of four MMAs: rows g and g + 8 of MMA i are outputs 8g + 2i and 8g + 2i + 1, so that a thread owns 8 adjacent
// outputs of two rows of x.
struct AdjacentOutputs {
    __device__ __forceinline__ static uint32_t first(const Lane& lane) { return lane.group * 8; }
    __device__ static constexpr int offset(int i) { return i; }
};

// Large tiles have it as the 8-column operand, which an MMA takes in the order in which it was loaded, where a 16-row operand would have to be moved together
// for each: column g of MMA i is output 8(g / 2) + g % 2 + 2i of 32, and a thread owns 8 adjacent outputs of two rows again. Which operand is which is nothing
// to an element's sum: the products are the same, in the same order.
struct InterleavedOutputs {
    __device__ __forceinline__ static uint32_t first(const Lane& lane) { return lane.group / 2 * 8 + lane.group % 2; }
    __device__ static constexpr int offset(int i) { return i / 4 * 32 + i % 4 * 2; }
};

// Rows whose distance in bytes is known: one address for all of them.
template <typename Outputs, int kStride, typename Fragment, typename Reads>
__device__ __forceinline__ void load_rows(Fragment (&row)[8], const void* from, const Reads& reads) {
    reads.template load<Outputs::offset(0) * kStride>(row[0], from);
    reads.template load<Outputs::offset(1) * kStride>(row[1], from);
    reads.template load<Outputs::offset(2) * kStride>(row[2], from);
    reads.template load<Outputs::offset(3) * kStride>(row[3], from);
    reads.template load<Outputs::offset(4) * kStride>(row[4], from);
    reads.template load<Outputs::offset(5) * kStride>(row[5], from);
    reads.template load<Outputs::offset(6) * kStride>(row[6], from);
    reads.template load<Outputs::offset(7) * kStride>(row[7], from);
}

// Adds one group of 16 ranks; `xa` is the row of the lane's group at the group's first rank.
template <typename Fragment>
__device__ __forceinline__ void multiply_group(float (&sum)[4][4], const char* xa, uint32_t quarter, Fragment fragment) {
    const uint2 x = *reinterpret_cast<const uint2*>(xa + first_of_quarter(quarter) * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint2 low = fragment(2 * i);
        const uint2 high = fragment(2 * i + 1);
        mma_16x8x16(sum[i], low.x, high.x, low.y, high.y, x.x, x.y);
    }
}

// Adds one group of 16 ranks of 32 outputs and 16 rows, `x` of them as the MMA takes it.
template <typename Fragment>
__device__ __forceinline__ void multiply_rows(float (&sum)[4][4], const uint4& x, Fragment fragment) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint2 b = fragment(i);
        mma_16x8x16(sum[i], x, b.x, b.y);
    }
}

// Bytes of a row of B, one group of 16 ranks, in shared memory.
constexpr uint32_t kSharedRowBytes = kRankGranule * 2;

// Where row `row` of B lies there: rows change places in fours, so that the lanes of a phase, which read the same of 8 rows each, are on different banks.
__device__ __forceinline__ uint32_t shared_row(uint32_t row) { return (row ^ (row / 8) % 4) * kSharedRowBytes; }

// Asks for `rows` rows of B from `from` on, one after the other at 16 ranks a row, in shared memory; called by all of the block's `kThreads` threads.
template <int kThreads>
__device__ __forceinline__ void ask_for_shared_rows(SharedAddress to, const __nv_bfloat16* from, uint32_t rows) {
    constexpr uint32_t kPieces = kSharedRowBytes / 16;
    for (uint32_t i = threadIdx.x; i < rows * kPieces; i += kThreads) {
        copy_async16(to + shared_row(i / kPieces) + i % kPieces * 16, from + uint64_t(i) * 8, true);
    }
    copy_async_commit();
}

// Of the 16 bytes that a lane has and those that the lane two from it has, the half of each that is its own.
__device__ __forceinline__ uint4 own_halves(const uint4& v, uint32_t quarter) {
    const bool upper = quarter >= 2;
    const uint32_t first = __shfl_xor_sync(0xffffffffu, upper ? v.x : v.z, 2);
    const uint32_t second = __shfl_xor_sync(0xffffffffu, upper ? v.y : v.w, 2);
    return upper ? make_uint4(first, second, v.z, v.w) : make_uint4(v.x, v.y, first, second);
}

// The thread's 8 rows of B, one group of 16 ranks. Two rows' 64 bytes are loaded 16 a lane, since the L2 serves no more requests of 32 bytes than of 64; then lanes
// two apart exchange halves, so that each has its 4 ranks of both rows.
template <typename Outputs = AdjacentOutputs>
struct Weights16 {
    static constexpr int kRanks = kRankGranule;
    uint4 pair[4];

    // `from`: the thread's first row, at the first rank; B has `rows` of them from there on (at least 1). Rows past them repeat the last one; their outputs do
    // not exist.
    template <typename Reads>
    __device__ __forceinline__ void load(const __nv_bfloat16* from, uint32_t stride, uint32_t rows, uint32_t, uint32_t quarter, const Reads& reads) {
        const uint32_t second = quarter / 2 * Outputs::offset(1);
        from += quarter % 2 * 8;
        if (rows > Outputs::offset(7) && stride == kRanks) {
            from += second * kRanks;
            reads.template load<Outputs::offset(0) * kRanks * 2>(pair[0], from);
            reads.template load<Outputs::offset(2) * kRanks * 2>(pair[1], from);
            reads.template load<Outputs::offset(4) * kRanks * 2>(pair[2], from);
            reads.template load<Outputs::offset(6) * kRanks * 2>(pair[3], from);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) reads.template load<0>(pair[i], from + uint64_t(min(Outputs::offset(2 * i) + second, rows - 1)) * stride);
    }

    // The same from shared memory, where `first` is the thread's first row, a multiple of 8; settled.
    __device__ __forceinline__ void take(SharedAddress b, uint32_t first, uint32_t quarter) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint2 even = load_shared8(b + shared_row(first + 2 * i) + first_of_quarter(quarter) * 2);
            const uint2 odd = load_shared8(b + shared_row(first + 2 * i + 1) + first_of_quarter(quarter) * 2);
            pair[i] = make_uint4(even.x, even.y, odd.x, odd.y);
        }
    }

    // The exchange, once what was loaded is wanted.
    __device__ __forceinline__ void settle(uint32_t, uint32_t quarter) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pair[i] = own_halves(pair[i], quarter);
    }

    __device__ __forceinline__ uint2 row(int i) const {
        const uint4& v = pair[i / 2];
        return i % 2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
    }

    __device__ __forceinline__ void multiply(float (&sum)[4][4], const char* xa, uint32_t, uint32_t quarter) const {
        multiply_group(sum, xa, quarter, [&](int i) { return row(i); });
    }

    // The `half`th 32 outputs of 16 rows, of which `x` has each group of ranks.
    __device__ __forceinline__ void multiply_half(float (&sum)[4][4], int half, const uint4 (&x)[1], uint32_t) const {
        multiply_rows(sum, x[0], [&](int i) { return row(half * 4 + i); });
    }
};

// The thread's 8 rows of B, up to `kPairs` pairs of groups of 16 ranks. A pair's 64 bytes of a row are loaded 16 a lane; then lanes two apart exchange halves,
// so that each has its 4 ranks of both groups.
template <int kPairs, typename Outputs = AdjacentOutputs>
struct Weights {
    static constexpr int kRanks = kPairs * 2 * kRankGranule;
    uint4 row[kPairs][8];

    // As in `Weights16`; `ranks` of them are wanted, in groups of 16.
    template <typename Reads>
    __device__ __forceinline__ void load(const __nv_bfloat16* from, uint32_t stride, uint32_t rows, uint32_t ranks, uint32_t quarter, const Reads& reads) {
        if (rows > Outputs::offset(7) && stride == kRanks && ranks >= kRanks) {
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) load_rows<Outputs, kRanks * 2>(row[pair], from + pair * 32 + quarter * 8, reads);
            return;
        }
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            const uint32_t first = pair * 32;
            if (first >= ranks) break;
            const bool whole = first + 32 <= ranks;
            const __nv_bfloat16* at = from + first + (whole ? quarter * 8 : first_of_quarter(quarter));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const __nv_bfloat16* here = at + uint64_t(min(uint32_t(Outputs::offset(i)), rows - 1)) * stride;
                if (whole) {
                    reads.template load<0>(row[pair][i], here);
                } else {
                    uint2 v;
                    reads.template load<0>(v, here);
                    row[pair][i] = make_uint4(v.x, v.y, 0, 0);
                }
            }
        }
    }

    // As in `Weights16`.
    __device__ __forceinline__ void settle(uint32_t ranks, uint32_t quarter) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            if (pair * 32 + 32 > ranks) break;
#pragma unroll
            for (int i = 0; i < 8; ++i) row[pair][i] = own_halves(row[pair][i], quarter);
        }
    }

    __device__ __forceinline__ void multiply(float (&sum)[4][4], const char* xa, uint32_t ranks, uint32_t quarter) const {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            const char* at = xa + pair * 64;
            if (pair * 32 >= ranks) break;
            multiply_group(sum, at, quarter, [&](int i) { return make_uint2(row[pair][i].x, row[pair][i].y); });
            if (pair * 32 + 16 >= ranks) break;
            multiply_group(sum, at + 32, quarter, [&](int i) { return make_uint2(row[pair][i].z, row[pair][i].w); });
        }
    }

    // As in `Weights16`.
    __device__ __forceinline__ void multiply_half(float (&sum)[4][4], int half, const uint4 (&x)[kPairs * 2], uint32_t ranks) const {
#pragma unroll
        for (int group = 0; group < kPairs * 2; ++group) {
            if (group > 0 && group * kRankGranule >= ranks) break;
            multiply_rows(sum, x[group], [&](int i) {
                const uint4& v = row[group / 2][half * 4 + i];
                return group % 2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
            });
        }
    }
};
