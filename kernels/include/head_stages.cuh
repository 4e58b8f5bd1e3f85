// The stages in shared memory that operands of the LM head's products pass through: their sizes, their layout, and the instructions that fill and read them.
#pragma once

#include "overlay_work.cuh"
#include "primitives.cuh"

constexpr int kHeadRowBytes = kHeadStageK * 2;
constexpr int kHeadPieces = kHeadStageK / kElementsAPiece;
static_assert(kHeadPieces == 8 && kHeadThreads == 256);

// Tiles of 64 columns in a part of the hidden size.
__device__ __forceinline__ uint32_t part_tiles(const LogitsParams& p) { return ((p.k_in + kHeadStageK - 1) / kHeadStageK + kLogitParts - 1) / kLogitParts; }

// Byte offset of a 16-byte piece of a row of a stage: the eight rows that a matrix load takes at a time meet every bank once.
__device__ __forceinline__ uint32_t head_offset(uint32_t row, uint32_t piece) {
    return row * kHeadRowBytes + ((piece ^ (row & 7)) << 4);
}

// A shared address that the compiler keeps in a register. Left to itself it makes it anew for every access, and waits for a special register each time.
__device__ __forceinline__ uint32_t kept_shared_address(const void* shared) {
    uint32_t address = shared_address(shared);
    asm volatile("" : "+r"(address));
    return address;
}

// As `copy_async16`, of what is read once a step: the first to leave the L2. The policy is what `createpolicy` makes, as a constant.
__device__ __forceinline__ void copy_once_async16(SharedAddress shared, const void* global, bool present) {
    constexpr uint64_t kEvictFirst = 0x12f0000000000000;
    copy_async16(shared, global, present, kEvictFirst);
}

__device__ __forceinline__ void store_shared16(uint32_t shared, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint4 load_matrices(uint32_t shared) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared)
                 : "memory");
    return v;
}

// `kBlocks` share an item's parts. Where a block of a cluster has several, its warps share them, so that a warp loads fewer operands for an MMA; a block alone
// takes them in turn. Of the warps of a part, `kIdWarps` share the ids, the others the rows, which are dealt out 16 at a time, so that few of them still keep
// every warp busy. A stage has `kTiles` tiles of 64 columns, as many of each part that is under way.
template <int kBlocks_, int kIds_, int kRows_, int kIdWarps_, int kTiles_, int kStages_, bool kAligned_>
struct HeadShape {
    static constexpr int kBlocks = kBlocks_;
    static constexpr int kParts = kLogitParts / kBlocks;
    static constexpr int kIds = kIds_;
    static constexpr int kRows = kRows_;
    static constexpr int kIdWarps = kIdWarps_;
    static constexpr int kTiles = kTiles_;
    static constexpr int kStages = kStages_;
    static constexpr bool kSplit = kBlocks > 1;
    static constexpr bool kAligned = kAligned_;
    static constexpr int kPartsAtOnce = kSplit ? kParts : 1;
    static constexpr int kPartTiles = kTiles / kPartsAtOnce;
    static constexpr int kPartWarps = kHeadWarps / kPartsAtOnce;
    static constexpr int kRowWarps = kPartWarps / kIdWarps;
    static constexpr int kIdTiles = kIds / kIdWarps / 16;
    static constexpr int kPairs = kRows / kRowWarps / 16;
    static constexpr int kTileBytes = (kIds + kRows) * kHeadRowBytes;
    static constexpr int kPartBytes = kPartTiles * kTileBytes;  // of a stage
    static constexpr int kStageBytes = kTiles * kTileBytes;
    // Of two stages, both are filled at the start: the second would otherwise be asked for only once the first is there.
    static constexpr bool kFillsAll = kSplit && kStages == 2;
    // Sums of all rows and ids, and as many of the parts before, do not fit the registers of a block.
    static constexpr bool kTotalsInShared = !kSplit && kRows > 128;
};

using HeadFewDeep = HeadShape<4, kHeadFewIds, kHeadSplitRows, 2, kHeadDeepTiles, kHeadDeepStages, true>;
using HeadFew = HeadShape<4, kHeadFewIds, kHeadSplitRows, 2, kHeadFewTiles, kHeadFewStages, true>;
using HeadPair = HeadShape<2, kHeadPairIds, kHeadSplitRows, 2, kHeadPairTiles, kHeadPairStages, true>;
using HeadSplit = HeadShape<4, kHeadIds, kHeadSplitRows, 4, 1, kHeadSplitStages, true>;
using HeadSplitLow = HeadShape<4, kHeadIds, kHeadSplitRows, 4, 1, kHeadLowStages, true>;
using HeadUnaligned = HeadShape<4, kHeadIds, kHeadSplitRows, 4, 1, kHeadLowStages, false>;
using HeadWide = HeadShape<1, kHeadIds, kHeadWideRows, 2, 1, kHeadWideStages, true>;
