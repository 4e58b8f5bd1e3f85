// LM-head logits of overridden ids: products of hidden rows with an overlay's rows, one launch for all rows and ids of a batch.
//
// The canonical order of summation: the hidden size is cut into four parts of whole stages of 64; a part is one chain of m16n8k16
// MMAs in order, onto sums that start at zero; the four sums are added in order. The overlay's rows are always the MMA's 16-row operand and the hidden
// rows its 8 columns, so a logit depends on nothing but its two rows. Stages past the hidden size are zeros, which change no sum.
//
// A block takes an item of some ids and rows (`overlay_work.cuh`) at a time and streams both operands through shared memory in asynchronous stages, without
// a break between items. Two kinds of kernel:
// split: up to 64 rows; the blocks of a cluster share the parts of an item, and send one another's sums through distributed shared memory, where each adds
//   up some of the rows. Where there is little work, items are of few ids, so that every multiprocessor has some, and stages are of several tiles of 64
//   columns, since a block waits and meets once a stage.
// wide: more rows; one block takes an item and all parts in turn, their sum waiting in registers or shared memory. For nearly whole tables: a
//   matrix product.
// The overlay's rows are nobody's output, so the first stages of them are under way before the wait for the predecessor.
#pragma once

#include "cluster.cuh"
#include "overlay_work.cuh"

constexpr int kHeadRowBytes = kHeadStageK * 2;
constexpr int kHeadPieces = kHeadStageK / kElementsAPiece;
static_assert(kHeadPieces == 8 && kHeadThreads == 256);

// Byte offset of a 16-byte piece of a row of a stage: the eight rows that a matrix load takes at a time meet every bank once.
__device__ __forceinline__ uint32_t head_offset(uint32_t row, uint32_t piece) {
    return row * kHeadRowBytes + ((piece ^ (row & 7)) << 4);
}

// A shared address that the compiler keeps in a register. Left to itself it makes it anew for every access, and waits for a special register each time.
__device__ __forceinline__ uint32_t kept_shared_address(const void* shared) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("" : "+r"(address));
    return address;
}

__device__ __forceinline__ void copy_async16(uint32_t shared, const void* global, bool present) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(present ? 16 : 0)
                 : "memory");
}

// The same of what is read once a step: the first to leave the L2. The shared address is one that the compiler cannot split into a register and a uniform
// register: it makes an illegal instruction of that together with a cache policy.
__device__ __forceinline__ void copy_once_async16(uint32_t shared, const void* global, bool present) {
    constexpr uint64_t kEvictFirst = 0x12f0000000000000;
    uint32_t whole;
    asm("prmt.b32 %0, %1, 0, 0x3210;" : "=r"(whole) : "r"(shared));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(whole), "l"(global), "r"(present ? 16 : 0),
                 "l"(kEvictFirst)
                 : "memory");
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

// `kBlocks` share an item's parts. `kIdWarps` warps share its ids, the others its rows, which are dealt out 16 at a time, so that few of them still keep every
// warp busy. A stage has `kTiles` tiles of 64 columns.
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
    static constexpr int kRowWarps = kHeadWarps / kIdWarps;
    static constexpr int kIdTiles = kIds / kIdWarps / 16;
    static constexpr int kPairs = kRows / kRowWarps / 16;
    static constexpr int kTileBytes = (kIds + kRows) * kHeadRowBytes;
    static constexpr int kStageBytes = kTiles * kTileBytes;
    // Sums of all rows and ids, and as many of the parts before, do not fit the registers of a block.
    static constexpr bool kTotalsInShared = !kSplit && kRows > 128;
};

using HeadFewDeep = HeadShape<4, kHeadFewIds, kHeadSplitRows, 2, kHeadFewTiles, kHeadDeepStages, true>;
using HeadFew = HeadShape<4, kHeadFewIds, kHeadSplitRows, 2, kHeadFewTiles, kHeadFewStages, true>;
using HeadPair = HeadShape<2, kHeadPairIds, kHeadSplitRows, 2, kHeadPairTiles, kHeadPairStages, true>;
using HeadSplit = HeadShape<4, kHeadIds, kHeadSplitRows, 4, 1, kHeadSplitStages, true>;
using HeadSplitLow = HeadShape<4, kHeadIds, kHeadSplitRows, 4, 1, kHeadLowStages, true>;
using HeadUnaligned = HeadShape<4, kHeadIds, kHeadSplitRows, 4, 1, kHeadLowStages, false>;
using HeadWide = HeadShape<1, kHeadIds, kHeadWideRows, 2, 1, kHeadWideStages, true>;

template <typename Shape>
struct Head {
    using Work = HeadWork<Shape::kIds, Shape::kRows>;
    static constexpr int kQueue = Shape::kStages + 1;
    static constexpr int kPassRows = kHeadThreads / kHeadPieces;  // rows of a stage that a block copies at a time
    static constexpr int kIdPasses = Shape::kIds / kPassRows;
    static constexpr int kRowPasses = Shape::kRows / kPassRows;
    static constexpr int kThreadRows = kIdPasses + kRowPasses;

    struct Shared {
        typename Work::Shared work;
        HeadItem queue[kQueue];  // items that loads have begun, until their logits are stored
        uint64_t arrived;        // barrier: the parts of the sums that this block adds up
        uint64_t taken;          // barrier: every block of the cluster has read what it adds up
    };

    const LogitsParams& p;
    Work work;
    HeadItem* queue;
    uint32_t arrived;  // shared addresses of the barriers
    uint32_t taken;
    uint32_t stages;        // and of the asynchronous stages
    uint32_t first_column;  // of the hidden size, that this block takes
    uint32_t part_columns;
    uint32_t part_steps;

    // FP32 sums after the stages: of all rows and ids, see `sum_at`; where blocks share an item, all parts of the rows that this one adds up, see `sent_at`.
    static __device__ __forceinline__ float* sums() {
        extern __shared__ __align__(128) char dynamic[];
        return reinterpret_cast<float*>(dynamic + Shape::kStages * Shape::kStageBytes);
    }

    // Loads under way.
    uint32_t next_item;
    uint32_t load_slot;   // of the queue
    uint32_t load_step;
    bool more;
    const __nv_bfloat16* rows[kThreadRows];  // of the overlay, then of x
    uint32_t present;                        // which of them exist, a bit each

    // Finds the next item and its overlay's rows.
    __device__ __forceinline__ HeadItem open_item() {
        const HeadItem item = work.find(next_item);
        next_item += Shape::kSplit ? gridDim.x / Shape::kBlocks : gridDim.x;
        more = item.count != 0;
        load_step = 0;
        load_slot = load_slot + 1 == kQueue ? 0 : load_slot + 1;
        if (threadIdx.x == 0) queue[load_slot] = item;
        present = 0;
        if (!more) return item;
        if (threadIdx.x < item.id_count) prefetch_l2(reinterpret_cast<const uint32_t*>(item.ids) + threadIdx.x);
        const uint32_t row = threadIdx.x / kHeadPieces;
#pragma unroll
        for (int i = 0; i < kIdPasses; ++i) {
            const uint32_t id = row + i * kPassRows;
            rows[i] = reinterpret_cast<const __nv_bfloat16*>(item.rows) + uint64_t(id) * p.k_in;
            present |= uint32_t(id < item.id_count) << i;
        }
        return item;
    }

    // Finds its hidden rows.
    __device__ __forceinline__ void open_rows(const HeadItem& item) {
        if (!more) return;
        const uint32_t row = threadIdx.x / kHeadPieces;
#pragma unroll
        for (int i = 0; i < kRowPasses; ++i) {
            const uint32_t position = row + i * kPassRows;
            // Those past the last repeat it: a load each, none of which waits for a branch.
            const uint32_t from = head_row(p, item.first_position + min(position, item.count - 1));
            rows[kIdPasses + i] = reinterpret_cast<const __nv_bfloat16*>(p.x) + uint64_t(min(from, p.rows - 1)) * p.x_stride;
            present |= uint32_t(position < item.count) << (kIdPasses + i);
        }
    }

    // Copies 16 bytes of a row from column `at` on, zeros from column `end` on.
    __device__ __forceinline__ void copy_piece(uint32_t to, const __nv_bfloat16* row, uint32_t at, uint32_t end) const {
        uint4 v;
        const uint16_t* bits = reinterpret_cast<const uint16_t*>(row);
        uint32_t* words = reinterpret_cast<uint32_t*>(&v);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t low = at + 2 * i < end ? load_u16(bits + at + 2 * i) : 0;
            const uint32_t high = at + 2 * i + 1 < end ? load_u16(bits + at + 2 * i + 1) : 0;
            words[i] = low | high << 16;
        }
        store_shared16(to, v);
    }

    // Begins the loads of a stage: the thread's rows from `kFirst` to before `kEnd`. What a row that does not exist leaves in its stage is read, but only
    // into sums that are not stored.
    template <int kFirst, int kEnd>
    __device__ __forceinline__ void copy_rows(uint32_t step, uint32_t stage) const {
        const uint32_t piece = threadIdx.x % kHeadPieces;
        const uint32_t to = stages + stage * Shape::kStageBytes + head_offset(threadIdx.x / kHeadPieces, piece);
        uint32_t first = first_column + step * Shape::kTiles * kHeadStageK;
        uint32_t end = p.k_in;
        // Where a step is one tile, parts follow one another without a gap.
        if (Shape::kTiles > 1) {
            static_assert(Shape::kTiles == 1 || Shape::kParts <= 2);
            const bool second = Shape::kParts == 2 && step >= part_steps;
            if (second) first += part_columns - part_steps * Shape::kTiles * kHeadStageK;
            end = min(end, first_column + (second ? 2 : 1) * part_columns);
        }
#pragma unroll
        for (int tile = 0; tile < Shape::kTiles; ++tile) {
            const uint32_t at = first + tile * kHeadStageK + piece * kElementsAPiece;
            const bool inside = at < end;
            const uint32_t from = inside ? at : 0;
#pragma unroll
            for (int i = kFirst; i < kEnd; ++i) {
                if ((present >> i & 1) == 0) continue;
                const uint32_t there = to + tile * Shape::kTileBytes + i * kPassRows * kHeadRowBytes;
                if (!Shape::kAligned) {
                    copy_piece(there, rows[i], at, end);
                } else if (i < kIdPasses) {
                    copy_once_async16(there, rows[i] + from, inside);
                } else {
                    copy_async16(there, rows[i] + from, inside);
                }
            }
        }
    }

    // Begins the loads of one stage, of the next item where one is done.
    __device__ __forceinline__ void load_stage_ahead(uint32_t stage) {
        if (more && load_step == Shape::kParts * part_steps) open_rows(open_item());
        if (more) copy_rows<0, kThreadRows>(load_step++, stage);
        copy_async_commit();
    }

    // Fills all stages but one. Rows of overlays are loaded at once, hidden rows after the wait for the predecessor.
    __device__ __forceinline__ void begin_loads(bool waited) {
        constexpr uint32_t kAhead = Shape::kStages - 1;
        next_item = Shape::kSplit ? blockIdx.x / Shape::kBlocks : blockIdx.x;
        load_slot = kQueue - 1;
        const HeadItem item = open_item();
        const uint32_t first = more ? min(Shape::kParts * part_steps, kAhead) : 0;
#pragma unroll 1
        for (uint32_t step = 0; step < first; ++step) copy_rows<0, kIdPasses>(step, step);
        open_rows(item);
        if (!waited) wait_for_predecessor();
#pragma unroll 1
        for (uint32_t step = 0; step < first; ++step) {
            copy_rows<kIdPasses, kThreadRows>(step, step);
            copy_async_commit();
        }
        load_step = first;
#pragma unroll 1
        for (uint32_t stage = first; stage < kAhead; ++stage) load_stage_ahead(stage);
    }

    // Place of a sum: consecutive ids on consecutive banks, and so are the two rows' worth of MMA results of a warp.
    __device__ __forceinline__ float* sum_at(uint32_t row, uint32_t id) const {
        return sums() + row * Shape::kIds + (id ^ (row >> 1 & 3) << 3);
    }

    using Sums = float[Shape::kIdTiles][Shape::kPairs][2][4];

    // Sums of the parts before, by the number of a sum.
    struct Totals {
        float value[Shape::kSplit || Shape::kTotalsInShared ? 1 : sizeof(Sums) / sizeof(float)];
    };

    // Where a lane's rows of the operands lie in a stage, and the bits that the swizzle turns.
    struct Place {
        uint32_t ids;
        uint32_t rows;
        uint32_t id_piece;
        uint32_t row_piece;
    };

    static __device__ __forceinline__ Place place_of(uint32_t id_warp, uint32_t row_warp) {
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t id = id_warp * Shape::kIdTiles * 16 + lane % 16;
        const uint32_t row = Shape::kIds + row_warp * 16 + lane % 8 + lane / 16 * 8;
        return Place{id * kHeadRowBytes, row * kHeadRowBytes, (lane / 16 ^ lane % 8) << 4, (lane / 8 % 2 ^ lane % 8) << 4};
    }

    // One stage, `kActive` sixteens of the warp's rows. Operands are loaded one MMA group ahead.
    template <int kActive>
    __device__ __forceinline__ void multiply_pairs(Sums& sum, uint32_t base, const Place& place) const {
        constexpr int kTileSteps = kHeadStageK / 16;
        constexpr int kSteps = Shape::kTiles * kTileSteps;
        uint4 a[2][Shape::kIdTiles];
        uint4 b[2];
        const auto load_ids = [&](int k16) {
            const uint32_t at = base + place.ids + k16 / kTileSteps * Shape::kTileBytes + (place.id_piece ^ k16 % kTileSteps << 5);
#pragma unroll
            for (int i = 0; i < Shape::kIdTiles; ++i) a[k16 % 2][i] = load_matrices(at + i * 16 * kHeadRowBytes);
        };
        const auto load_rows = [&](int group) {
            const int k16 = group / kActive;
            const uint32_t at = base + place.rows + k16 / kTileSteps * Shape::kTileBytes + (place.row_piece ^ k16 % kTileSteps << 5);
            b[group % 2] = load_matrices(at + group % kActive * Shape::kRowWarps * 16 * kHeadRowBytes);
        };
        load_ids(0);
        load_rows(0);
#pragma unroll
        for (int group = 0; group < kSteps * kActive; ++group) {
            const int k16 = group / kActive;
            const int pair = group % kActive;
            if (group + 1 < kSteps * kActive) load_rows(group + 1);
            if (pair == 0 && k16 + 1 < kSteps) load_ids(k16 + 1);
            const uint4& rows16 = b[group % 2];
#pragma unroll
            for (int i = 0; i < Shape::kIdTiles; ++i) {
                const uint4& ids16 = a[k16 % 2][i];
                mma_16x8x16(sum[i][pair][0], ids16.x, ids16.y, ids16.z, ids16.w, rows16.x, rows16.y);
                mma_16x8x16(sum[i][pair][1], ids16.x, ids16.y, ids16.z, ids16.w, rows16.z, rows16.w);
            }
        }
    }

    __device__ __forceinline__ void multiply(Sums& sum, uint32_t stage, uint32_t pairs, const Place& place) const {
        static_assert(Shape::kPairs == 1 || Shape::kPairs == 2 || Shape::kPairs == 4);
        const uint32_t base = stages + stage * Shape::kStageBytes;
        if (pairs == Shape::kPairs) {
            multiply_pairs<Shape::kPairs>(sum, base, place);
            return;
        }
        if constexpr (Shape::kPairs > 2) {
            if (pairs > 1) return multiply_pairs<Shape::kPairs - 1>(sum, base, place);  // 2 as 3: what follows the rows is not stored
        }
        if (pairs > 0) multiply_pairs<1>(sum, base, place);
    }

    // Visits this thread's sums: `visit(sum, row, id, number)`.
    template <typename Visit>
    __device__ __forceinline__ void for_sums(Sums& sum, uint32_t id_warp, uint32_t row_warp, Visit visit) const {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < Shape::kIdTiles; ++i) {
#pragma unroll
            for (int pair = 0; pair < Shape::kPairs; ++pair) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const uint32_t row = (row_warp + pair * Shape::kRowWarps) * 16 + half * 8 + lane % 4 * 2 + j % 2;
                        const uint32_t id = (id_warp * Shape::kIdTiles + i) * 16 + lane / 4 + j / 2 * 8;
                        visit(sum[i][pair][half][j], row, id, ((i * Shape::kPairs + pair) * 2 + half) * 4 + j);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void store_logit(uint64_t at, float value) const {
        if (p.flags & kFlagF32Logits) {
            reinterpret_cast<float*>(p.logits)[at] = value;
        } else {
            reinterpret_cast<__nv_bfloat16*>(p.logits)[at] = __float2bfloat16_rn(value);
        }
    }

    // Stores logits of the item: all ids of rows from `first` to before `end`, of which there are at most `kMost`; `value(row, id)` is a logit. Lanes take
    // neighbouring ids, so that a whole table's are stored together. Loads are not branched around, so that they are under way together.
    template <int kMost, typename Value>
    __device__ __forceinline__ void store(const HeadItem& item, uint32_t first, uint32_t end, Value value) const {
        constexpr int kIdsALane = Shape::kIds / 32;
        constexpr int kBatch = 8 / kIdsALane < kMost / kHeadWarps ? 8 / kIdsALane : kMost / kHeadWarps;
        const uint32_t lane = threadIdx.x % 32;
        uint32_t ids[kIdsALane];
#pragma unroll
        for (int i = 0; i < kIdsALane; ++i) {
            const uint32_t column = i * 32 + lane;
            const uint32_t id = load_u32(reinterpret_cast<const uint32_t*>(item.ids) + min(column, item.id_count - 1));
            ids[i] = column < item.id_count ? id : ~0u;
        }
#pragma unroll 1
        for (uint32_t from = first + threadIdx.x / 32; from < end; from += kBatch * kHeadWarps) {
            uint32_t out[kBatch];
            float logit[kBatch][kIdsALane];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const uint32_t row = min(from + j * kHeadWarps, end - 1);
                out[j] = head_row(p, item.first_position + row);
#pragma unroll
                for (int i = 0; i < kIdsALane; ++i) logit[j][i] = value(row, i * 32 + lane);
            }
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const bool exists = from + j * kHeadWarps < end && out[j] < p.rows;
                const uint64_t start = out[j] * p.logits_stride;
#pragma unroll
                for (int i = 0; i < kIdsALane; ++i) {
                    if (exists && ids[i] < p.vocab) store_logit(start + ids[i], logit[j][i]);
                }
            }
        }
    }

    // Rows of an item whose parts a block of a cluster adds up, and the sums of a part of them. Those of 16 ids and 8 rows lie together as an MMA leaves them:
    // four of a thread, the threads in an order that lets neighbouring ids be read from different banks.
    static constexpr int kOwnRows = Shape::kRows / Shape::kBlocks;
    static constexpr int kOwnEights = kOwnRows / 8;
    static constexpr int kMmaSums = 16 * 8;
    static constexpr int kPartSums = Shape::kIds / 16 * kOwnEights * kMmaSums;

    static __device__ __forceinline__ uint32_t sent_at(uint32_t row, uint32_t id) {
        const uint32_t mma = id / 16 * kOwnEights + row / 8 % kOwnEights;
        const uint32_t thread = row / 2 % 4 * 8 + id % 8;
        return mma * kMmaSums + thread * 4 + id / 8 % 2 * 2 + row % 2;
    }

    // Sends the sums of a part to the blocks that add up their rows.
    __device__ __forceinline__ void send_part(const HeadItem& item, const Sums& sum, uint32_t part, uint32_t id_warp, uint32_t row_warp) const {
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(sums() + part * kPartSums + sent_at(lane % 4 * 2, lane / 4)));
#pragma unroll
        for (int pair = 0; pair < Shape::kPairs; ++pair) {
            const uint32_t row = (row_warp + pair * Shape::kRowWarps) * 16;
            if (row >= item.count) break;
            const uint32_t there = address_in_cluster(own, row / kOwnRows);
            const uint32_t barrier = address_in_cluster(arrived, row / kOwnRows);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (row + half * 8 >= item.count) break;
#pragma unroll
                for (int i = 0; i < Shape::kIdTiles; ++i) {
                    const uint32_t id = (id_warp * Shape::kIdTiles + i) * 16;
                    if (id < item.id_count) store_async16(there + sent_at(row + half * 8, id) * sizeof(float), barrier, sum[i][pair][half]);
                }
            }
        }
    }

    // Adds up the parts of this block's rows and stores logits. `turn`: how many items the cluster has finished.
    __device__ __forceinline__ void finish_split(const HeadItem& item, const HeadItem& another, uint32_t turn) const {
        const uint32_t first = cluster_rank() * kOwnRows;
        const uint32_t end = min(first + kOwnRows, item.count);
        const uint32_t mmas = first < end ? (item.id_count + 15) / 16 * ((end - first + 7) / 8) : 0;
        if (threadIdx.x == 0) barrier_expect(arrived, kLogitParts * mmas * kMmaSums * sizeof(float));
        // A block without rows of the item waits too, for nothing but its own arrival: a barrier is waited for in every phase.
        barrier_wait(arrived, turn & 1);
        if (first < end) {
            store<kOwnRows>(item, first, end, [&](uint32_t row, uint32_t id) {
                const float* at = sums() + sent_at(row, id);
                float total = at[0];
#pragma unroll
                for (int part = 1; part < kLogitParts; ++part) total += at[part * kPartSums];
                return total;
            });
        }
        __syncthreads();
        // Nobody waits for it after the last item: no block is reached for once it may have left.
        if (another.count > 0 && threadIdx.x < Shape::kBlocks) barrier_arrive(address_in_cluster(taken, threadIdx.x));
    }

    // Adds a part to those before it; after the last one, stores logits. Where totals are in shared memory, a thread's lie where it alone finds them, free of
    // bank conflicts.
    __device__ __forceinline__ void finish_part(const HeadItem& item, Sums& sum, Totals& totals, uint32_t part, uint32_t id_warp,
                                                uint32_t row_warp) const {
        for_sums(sum, id_warp, row_warp, [&](float& value, uint32_t, uint32_t, int number) {
            float& total = Shape::kTotalsInShared ? sums()[number * kHeadThreads + threadIdx.x] : totals.value[number];
            if (part > 0) value = total + value;
            total = value;
            if (part + 1 < kLogitParts) value = 0;
        });
        if (part + 1 < kLogitParts) return;
        __syncthreads();
        for_sums(sum, id_warp, row_warp, [&](float& value, uint32_t row, uint32_t id, int) {
            *sum_at(row, id) = value;
            value = 0;
        });
        __syncthreads();
        store<Shape::kRows>(item, 0, item.count, [&](uint32_t row, uint32_t id) { return *sum_at(row, id); });
        __syncthreads();
    }

    __device__ __forceinline__ void run(bool waited) {
        const uint32_t warp = threadIdx.x / 32;
        const uint32_t id_warp = warp % Shape::kIdWarps;
        const uint32_t row_warp = warp / Shape::kIdWarps;
        const Place place = place_of(id_warp, row_warp);
        begin_loads(waited);
        if (Shape::kSplit) cluster_wait();  // until the others' barriers are there
        uint32_t turn = 0;
        Totals totals;
        uint32_t stage = 0;
        Sums sum = {};
        for (uint32_t slot = 0;; slot = slot + 1 == kQueue ? 0 : slot + 1) {
            __syncthreads();
            const HeadItem item = queue[slot];
            if (item.count == 0) break;
            const uint32_t sixteens = (item.count + 15) / 16;
            const uint32_t pairs = (max(sixteens, row_warp) - row_warp + Shape::kRowWarps - 1) / Shape::kRowWarps;
#pragma unroll 1
            for (uint32_t part = 0; part < Shape::kParts; ++part) {
                for (uint32_t step = 0; step < part_steps; ++step) {
                    copy_async_wait<Shape::kStages - 2>();
                    __syncthreads();
                    load_stage_ahead(stage == 0 ? Shape::kStages - 1 : stage - 1);
                    multiply(sum, stage, pairs, place);
                    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
                }
                if (Shape::kSplit) {
                    // Until all have read what was sent of the last item.
                    if (part == 0 && turn > 0) barrier_wait(taken, (turn - 1) & 1);
                    send_part(item, sum, cluster_rank() * Shape::kParts + part, id_warp, row_warp);
                    for_sums(sum, id_warp, row_warp, [](float& value, uint32_t, uint32_t, int) { value = 0; });
                } else {
                    finish_part(item, sum, totals, part, id_warp, row_warp);
                }
            }
            if (Shape::kSplit) finish_split(item, queue[slot + 1 == kQueue ? 0 : slot + 1], turn++);
        }
        copy_async_wait<0>();
    }
};

template <typename Shape>
__device__ __forceinline__ void head_logits(const LogitsParams& p) {
    __shared__ typename Head<Shape>::Shared shared;
    const bool wait_first = (p.flags & kFlagTilesReady) == 0;
    if (wait_first) wait_for_predecessor();
    let_dependents_start();
    Head<Shape> head{p, {p, shared.work}, shared.queue};
    if (Shape::kSplit) {
        head.arrived = static_cast<uint32_t>(__cvta_generic_to_shared(&shared.arrived));
        head.taken = static_cast<uint32_t>(__cvta_generic_to_shared(&shared.taken));
        if (threadIdx.x == 0) {
            barrier_init(head.arrived, 1);
            barrier_init(head.taken, Shape::kBlocks);
            fence_barrier_init();
        }
        __syncwarp();
        cluster_arrive();
    }
    extern __shared__ __align__(128) char dynamic[];
    head.stages = kept_shared_address(dynamic);
    const uint32_t part_tiles = ((p.k_in + kHeadStageK - 1) / kHeadStageK + kLogitParts - 1) / kLogitParts;
    head.part_columns = part_tiles * kHeadStageK;
    head.part_steps = (part_tiles + Shape::kTiles - 1) / Shape::kTiles;
    head.first_column = Shape::kSplit ? cluster_rank() * Shape::kParts * head.part_columns : 0;
    prefetch_overlays(p.entries, p.slots);
    head.work.start();
    head.run(wait_first);
}
