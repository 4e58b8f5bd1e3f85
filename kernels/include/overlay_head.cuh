// LM-head logits of overridden ids: products of hidden rows with an overlay's rows, one launch for all rows and ids of a batch.
//
// The canonical order of summation: the hidden size is cut into four parts of whole stages of 64; a part is one chain of m16n8k16
// MMAs in order, onto sums that start at zero; the four sums are added in order. The overlay's rows are always the MMA's 16-row operand and the hidden
// rows its 8 columns, so a logit depends on nothing but its two rows. Stages past the hidden size are zeros, which change no sum.
//
// A block takes an item of 128 ids (`overlay_work.cuh`) at a time and streams both operands through shared memory in asynchronous stages, without a
// break between items. Two kernels:
// split: up to 64 rows; a cluster of four blocks takes an item, each one part, and the parts meet in distributed shared memory. For few rows a
//   slot, and overlays of some thousand ids, whose items alone would not fill the device.
// wide: more rows; one block takes an item and all parts in turn, their sum waiting in registers or shared memory. For nearly whole tables: a
//   matrix product.
// The overlay's rows are nobody's output, so the first stages of them are under way before the wait for the predecessor.
#pragma once

#include "overlay_work.cuh"

constexpr int kHeadWarps = kHeadThreads / 32;
constexpr int kHeadRowBytes = kHeadStageK * 2;
constexpr int kHeadPieces = kHeadStageK / kElementsAPiece;
static_assert(kHeadPieces == 8 && kHeadIds == 128 && kHeadThreads == 256);

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

__device__ __forceinline__ void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ float load_of_cluster(const float* shared, uint32_t rank) {
    const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    uint32_t there;
    float v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
    return v;
}

// `kIdWarps` warps share the ids, the others the rows. Rows are dealt out to warps 16 at a time, so that few of them still keep every warp busy.
template <int kRows_, int kIdWarps_, int kStages_, bool kSplit_, bool kAligned_>
struct HeadShape {
    static constexpr int kRows = kRows_;
    static constexpr int kIdWarps = kIdWarps_;
    static constexpr int kStages = kStages_;
    static constexpr bool kSplit = kSplit_;
    static constexpr bool kAligned = kAligned_;
    static constexpr int kRowWarps = kHeadWarps / kIdWarps;
    static constexpr int kIdTiles = kHeadIds / kIdWarps / 16;
    static constexpr int kPairs = kRows / kRowWarps / 16;
    static constexpr int kStageBytes = (kHeadIds + kRows) * kHeadRowBytes;
    // Sums of all rows and ids, and as many of the parts before, do not fit the registers of a block.
    static constexpr bool kTotalsInShared = !kSplit && kRows > 128;
};

using HeadSplit = HeadShape<kHeadSplitRows, 4, kHeadSplitStages, true, true>;
using HeadSplitLow = HeadShape<kHeadSplitRows, 4, kHeadLowStages, true, true>;
using HeadUnaligned = HeadShape<kHeadSplitRows, 4, kHeadLowStages, true, false>;
using HeadWide = HeadShape<kHeadWideRows, 2, kHeadWideStages, false, true>;

template <typename Shape>
struct Head {
    using Work = HeadWork<Shape::kRows>;
    static constexpr int kQueue = Shape::kStages + 1;
    static constexpr int kPassRows = kHeadThreads / kHeadPieces;  // rows of a stage that a block copies at a time
    static constexpr int kIdPasses = kHeadIds / kPassRows;
    static constexpr int kRowPasses = Shape::kRows / kPassRows;
    static constexpr int kThreadRows = kIdPasses + kRowPasses;

    struct Shared {
        typename Work::Shared work;
        HeadItem queue[kQueue];  // items that loads have begun, until their logits are stored
    };

    const LogitsParams& p;
    Work work;
    HeadItem* queue;
    uint32_t part_steps;
    uint32_t steps;       // of this block, an item
    uint32_t first_step;  // of the hidden size
    uint32_t takers;      // blocks or clusters, of which this one is the `taker`th
    uint32_t taker;

    uint32_t stages;  // shared address of the asynchronous stages

    // FP32 sums `[kRows][kHeadIds]`, after the stages; see `sum_at`.
    static __device__ __forceinline__ float* sums() {
        extern __shared__ __align__(128) char dynamic[];
        return reinterpret_cast<float*>(dynamic + Shape::kStages * Shape::kStageBytes);
    }

    // Loads under way.
    uint32_t next_item;
    uint32_t load_slot;   // of the queue
    uint32_t load_step;
    uint32_t load_stage;
    bool more;
    const __nv_bfloat16* rows[kThreadRows];  // of the overlay, then of x
    uint32_t present;                        // which of them exist, a bit each

    __device__ __forceinline__ void open_item() {
        const HeadItem item = work.find(next_item);
        next_item += takers;
        more = item.count != 0;
        load_step = 0;
        load_slot = load_slot + 1 == kQueue ? 0 : load_slot + 1;
        if (threadIdx.x == 0) queue[load_slot] = item;
        if (!more) return;
        const uint32_t row = threadIdx.x / kHeadPieces;
        if (threadIdx.x < item.id_count) prefetch_l2(reinterpret_cast<const uint32_t*>(item.ids) + threadIdx.x);
        present = 0;
#pragma unroll
        for (int i = 0; i < kIdPasses; ++i) {
            const uint32_t id = row + i * kPassRows;
            rows[i] = reinterpret_cast<const __nv_bfloat16*>(item.rows) + uint64_t(id) * p.k_in;
            present |= uint32_t(id < item.id_count) << i;
        }
#pragma unroll
        for (int i = 0; i < kRowPasses; ++i) {
            const uint32_t position = row + i * kPassRows;
            // Those past the last repeat it: a load each, none of which waits for a branch.
            const uint32_t from = head_row(p, item.first_position + min(position, item.count - 1));
            rows[kIdPasses + i] = reinterpret_cast<const __nv_bfloat16*>(p.x) + uint64_t(min(from, p.rows - 1)) * p.x_stride;
            present |= uint32_t(position < item.count) << (kIdPasses + i);
        }
    }

    __device__ __forceinline__ void copy_piece(uint32_t to, const __nv_bfloat16* row, uint32_t at, bool inside) const {
        if (Shape::kAligned) {
            copy_async16(to, row + at, inside);
            return;
        }
        uint4 v;
        const uint16_t* bits = reinterpret_cast<const uint16_t*>(row);
        uint32_t* words = reinterpret_cast<uint32_t*>(&v);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t low = at + 2 * i < p.k_in ? load_u16(bits + at + 2 * i) : 0;
            const uint32_t high = at + 2 * i + 1 < p.k_in ? load_u16(bits + at + 2 * i + 1) : 0;
            words[i] = low | high << 16;
        }
        store_shared16(to, v);
    }

    // Begins the loads of a stage: the thread's rows from `kFirst` to before `kEnd`. What a row that does not exist leaves in its stage is read, but only
    // into sums that are not stored.
    template <int kFirst, int kEnd>
    __device__ __forceinline__ void copy_rows(uint32_t step, uint32_t stage) const {
        const uint32_t piece = threadIdx.x % kHeadPieces;
        const uint32_t at = (first_step + step) * kHeadStageK + piece * kElementsAPiece;
        const bool inside = at < p.k_in;
        const uint32_t from = inside || !Shape::kAligned ? at : 0;
        const uint32_t to = stages + stage * Shape::kStageBytes + head_offset(threadIdx.x / kHeadPieces, piece);
#pragma unroll
        for (int i = kFirst; i < kEnd; ++i) {
            if (present >> i & 1) copy_piece(to + i * kPassRows * kHeadRowBytes, rows[i], from, inside);
        }
    }

    // Begins the loads of one stage, of the next item where one is done.
    __device__ __forceinline__ void load_stage_ahead() {
        if (more && load_step == steps) open_item();
        if (more) copy_rows<0, kThreadRows>(load_step++, load_stage);
        load_stage = load_stage + 1 == Shape::kStages ? 0 : load_stage + 1;
        copy_async_commit();
    }

    // Fills all stages but one. Rows of overlays are loaded at once, hidden rows after the wait for the predecessor.
    __device__ __forceinline__ void begin_loads(bool waited) {
        constexpr uint32_t kAhead = Shape::kStages - 1;
        next_item = taker;
        load_slot = kQueue - 1;
        open_item();
        const uint32_t first = more ? min(steps, kAhead) : 0;
#pragma unroll 1
        for (uint32_t step = 0; step < first; ++step) copy_rows<0, kIdPasses>(step, step);
        if (!waited) wait_for_predecessor();
#pragma unroll 1
        for (uint32_t step = 0; step < first; ++step) {
            copy_rows<kIdPasses, kThreadRows>(step, step);
            copy_async_commit();
        }
        load_step = first;
        load_stage = first;
#pragma unroll 1
        for (uint32_t stage = first; stage < kAhead; ++stage) load_stage_ahead();
    }

    // Place of a sum: consecutive ids on consecutive banks, and so are the two rows' worth of MMA results of a warp.
    __device__ __forceinline__ float* sum_at(uint32_t row, uint32_t id) const {
        return sums() + row * kHeadIds + (id ^ (row >> 1 & 3) << 3);
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
        const uint32_t row = kHeadIds + row_warp * 16 + lane % 8 + lane / 16 * 8;
        return Place{id * kHeadRowBytes, row * kHeadRowBytes, (lane / 16 ^ lane % 8) << 4, (lane / 8 % 2 ^ lane % 8) << 4};
    }

    // One stage, `kActive` sixteens of the warp's rows. Operands are loaded one MMA group ahead.
    template <int kActive>
    __device__ __forceinline__ void multiply_pairs(Sums& sum, uint32_t base, const Place& place) const {
        constexpr int kSteps = kHeadStageK / 16;
        uint4 a[2][Shape::kIdTiles];
        uint4 b[2];
        const auto load_ids = [&](int k16) {
            const uint32_t at = base + place.ids + (place.id_piece ^ k16 << 5);
#pragma unroll
            for (int i = 0; i < Shape::kIdTiles; ++i) a[k16 % 2][i] = load_matrices(at + i * 16 * kHeadRowBytes);
        };
        const auto load_rows = [&](int group) {
            const uint32_t at = base + place.rows + (place.row_piece ^ group / kActive << 5);
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
        static_assert(Shape::kPairs == 2 || Shape::kPairs == 4);
        const uint32_t base = stages + stage * Shape::kStageBytes;
        if (pairs == Shape::kPairs) {
            multiply_pairs<Shape::kPairs>(sum, base, place);
        } else if (Shape::kPairs > 2 && pairs > 1) {
            multiply_pairs<Shape::kPairs - 1>(sum, base, place);  // 2 as 3: what follows the rows is not stored
        } else if (pairs > 0) {
            multiply_pairs<1>(sum, base, place);
        }
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

    // Stores `kColumns` ids from the block's `first` on, of all rows of the item; `value(row, id)` is a logit. Lanes take neighbouring ids, so that a whole
    // table's are stored together.
    template <int kColumns, typename Value>
    __device__ __forceinline__ void store(const HeadItem& item, uint32_t first, Value value) const {
        const uint32_t lane = threadIdx.x % 32;
        uint32_t ids[kColumns / 32];
#pragma unroll
        for (int i = 0; i < kColumns / 32; ++i) {
            const uint32_t column = first + i * 32 + lane;
            ids[i] = column < item.id_count ? __ldcg(reinterpret_cast<const uint32_t*>(item.ids) + column) : ~0u;
        }
#pragma unroll 8 / (kColumns / 32)
        for (uint32_t row = threadIdx.x / 32; row < item.count; row += kHeadWarps) {
            const uint32_t out = head_row(p, item.first_position + row);
            if (out >= p.rows) continue;
            const uint64_t start = out * p.logits_stride;
#pragma unroll
            for (int i = 0; i < kColumns / 32; ++i) {
                if (ids[i] < p.vocab) store_logit(start + ids[i], value(row, first + i * 32 + lane));
            }
        }
    }

    // The four blocks of a cluster have a part each; every one adds up a quarter of the ids.
    __device__ __forceinline__ void finish_split(const HeadItem& item, Sums& sum, uint32_t id_warp, uint32_t row_warp) const {
        cluster_wait();  // until all have read the last item's sums
        for_sums(sum, id_warp, row_warp, [&](float value, uint32_t row, uint32_t id, int) { *sum_at(row, id) = value; });
        cluster_arrive();
        cluster_wait();
        constexpr int kColumns = kHeadIds / kLogitParts;
        store<kColumns>(item, cluster_rank() * kColumns, [&](uint32_t row, uint32_t id) {
            const float* at = sum_at(row, id);
            float part[kLogitParts];
#pragma unroll
            for (int i = 0; i < kLogitParts; ++i) part[i] = load_of_cluster(at, i);
            float total = part[0];
#pragma unroll
            for (int i = 1; i < kLogitParts; ++i) total += part[i];
            return total;
        });
        cluster_arrive();
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
        store<kHeadIds>(item, 0, [&](uint32_t row, uint32_t id) { return *sum_at(row, id); });
        __syncthreads();
    }

    __device__ __forceinline__ void run(bool waited) {
        const uint32_t warp = threadIdx.x / 32;
        const uint32_t id_warp = warp % Shape::kIdWarps;
        const uint32_t row_warp = warp / Shape::kIdWarps;
        const Place place = place_of(id_warp, row_warp);
        begin_loads(waited);
        if (Shape::kSplit) cluster_arrive();
        Totals totals;
        uint32_t stage = 0;
        Sums sum = {};
        for (uint32_t slot = 0;; slot = slot + 1 == kQueue ? 0 : slot + 1) {
            __syncthreads();
            const HeadItem item = queue[slot];
            if (item.count == 0) break;
            const uint32_t sixteens = (item.count + 15) / 16;
            const uint32_t pairs = (max(sixteens, row_warp) - row_warp + Shape::kRowWarps - 1) / Shape::kRowWarps;
            uint32_t part_end = part_steps;
            uint32_t part = 0;
            for (uint32_t step = 0; step < steps; ++step) {
                copy_async_wait<Shape::kStages - 2>();
                __syncthreads();
                load_stage_ahead();
                multiply(sum, stage, pairs, place);
                stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
                if (!Shape::kSplit && step + 1 == part_end) {
                    finish_part(item, sum, totals, part++, id_warp, row_warp);
                    part_end += part_steps;
                }
            }
            if (Shape::kSplit) {
                finish_split(item, sum, id_warp, row_warp);
                for_sums(sum, id_warp, row_warp, [](float& value, uint32_t, uint32_t, int) { value = 0; });
            }
        }
        if (Shape::kSplit) cluster_wait();  // no block leaves while another reads its sums
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
    extern __shared__ __align__(128) char dynamic[];
    head.stages = kept_shared_address(dynamic);
    const uint32_t all_steps = (p.k_in + kHeadStageK - 1) / kHeadStageK;
    head.part_steps = (all_steps + kLogitParts - 1) / kLogitParts;
    head.steps = Shape::kSplit ? head.part_steps : head.part_steps * kLogitParts;
    head.first_step = Shape::kSplit ? cluster_rank() * head.part_steps : 0;
    head.takers = Shape::kSplit ? gridDim.x / kLogitParts : gridDim.x;
    head.taker = Shape::kSplit ? blockIdx.x / kLogitParts : blockIdx.x;
    head.work.start();
    head.run(wait_first);
}
