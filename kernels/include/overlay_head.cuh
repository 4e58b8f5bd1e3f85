// LM-head logits of overridden ids: products of hidden rows with an overlay's rows, one launch for all rows and ids of a batch.
//
// The canonical order of summation: the hidden size is cut into four parts of whole stages of 32; a part is one chain of m16n8k16
// MMAs in order, onto sums that start at zero; the four sums are added in order. The overlay's rows are always the MMA's 16-row operand and the hidden
// rows its 8 columns, so a logit depends on nothing but its two rows. Stages past the hidden size are zeros, which change no sum.
//
// A block takes an item of 128 ids (`overlay_work.cuh`) at a time and streams both operands through shared memory in asynchronous stages, without a
// break between items. Two kernels:
// split: up to 64 rows; a cluster of four blocks takes an item, each one part, and the parts meet in distributed shared memory. For few rows a
//   slot, and overlays of some thousand ids, whose items alone would not fill the device.
// wide: up to 256 rows; one block takes an item and all parts in turn, their sum waiting in shared memory. For nearly whole tables: a matrix product.
#pragma once

#include "overlay_work.cuh"

constexpr int kHeadWarps = kHeadThreads / 32;
constexpr int kHeadRowBytes = kHeadStageK * 2;
constexpr int kHeadPieces = kHeadStageK / kElementsAPiece;
static_assert(kHeadPieces == 4 && kHeadIds == 128 && kHeadThreads == 256);

// Byte offset of a 16-byte piece of a row of a stage. Two rows share a line of all banks; the eight rows that a matrix load takes at a time meet every bank once.
__device__ __forceinline__ uint32_t head_offset(uint32_t row, uint32_t piece) {
    return row * kHeadRowBytes + ((piece ^ (row >> 1 & 3)) << 4);
}

__device__ __forceinline__ uint4 load_matrices(uint32_t shared) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared)
                 : "memory");
    return v;
}

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
    static constexpr int kRowPasses = kRows / 64;
    static constexpr int kStageBytes = (kHeadIds + kRows) * kHeadRowBytes;
};

using HeadSplit = HeadShape<kHeadSplitRows, 4, kHeadSplitStages, true, true>;
using HeadUnaligned = HeadShape<kHeadSplitRows, 4, kHeadSplitStages, true, false>;
using HeadWide = HeadShape<kHeadWideRows, 2, kHeadWideStages, false, true>;

template <typename Shape>
struct Head {
    using Work = HeadWork<Shape::kRows>;
    static constexpr int kQueue = Shape::kStages + 1;

    struct Shared {
        typename Work::Shared work;
        HeadItem queue[kQueue];  // items that loads have begun, until their logits are stored
    };

    const LogitsParams& p;
    Work work;
    HeadItem* queue;
    char* stages;
    float* sums;  // [kRows][kHeadIds], see `sum_at`
    uint32_t part_steps;
    uint32_t steps;       // of this block, an item
    uint32_t first_step;  // of the hidden size
    uint32_t takers;      // blocks or clusters, of which this one is the `taker`th
    uint32_t taker;

    // Loads under way.
    uint32_t next_item;
    uint32_t load_slot;   // of the queue
    uint32_t load_step;
    uint32_t load_stage;
    bool more;
    const __nv_bfloat16* weights[2];
    const __nv_bfloat16* x[Shape::kRowPasses];

    __device__ __forceinline__ void open_item() {
        const HeadItem item = work.find(next_item);
        next_item += takers;
        more = item.count != 0;
        load_step = 0;
        load_slot = load_slot + 1 == kQueue ? 0 : load_slot + 1;
        if (threadIdx.x == 0) queue[load_slot] = item;
        if (!more) return;
        const uint32_t row = threadIdx.x / kHeadPieces;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t id = row + i * 64;
            weights[i] = id < item.id_count ? reinterpret_cast<const __nv_bfloat16*>(item.rows) + uint64_t(id) * p.k_in : nullptr;
        }
#pragma unroll
        for (int i = 0; i < Shape::kRowPasses; ++i) {
            x[i] = nullptr;
            if (row + i * 64 < item.count) {
                const uint32_t from = min(head_row(p, item.first_position + row + i * 64), p.rows - 1);
                x[i] = reinterpret_cast<const __nv_bfloat16*>(p.x) + uint64_t(from) * p.x_stride;
            }
        }
    }

    // What a row that does not exist leaves in its stage is read, but only into sums that are not stored.
    __device__ __forceinline__ void copy_piece(char* to, const __nv_bfloat16* row, uint32_t at) const {
        if (row == nullptr) return;
        if (Shape::kAligned) {
            const bool inside = at < p.k_in;
            copy_async16(to, inside ? row + at : row, inside);
        } else {
            uint4 v;
            const uint16_t* bits = reinterpret_cast<const uint16_t*>(row);
            uint32_t* words = reinterpret_cast<uint32_t*>(&v);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t low = at + 2 * i < p.k_in ? load_u16(bits + at + 2 * i) : 0;
                const uint32_t high = at + 2 * i + 1 < p.k_in ? load_u16(bits + at + 2 * i + 1) : 0;
                words[i] = low | high << 16;
            }
            *reinterpret_cast<uint4*>(to) = v;
        }
    }

    // Begins the loads of one stage, of the next item where one is done.
    __device__ __forceinline__ void load_stage_ahead() {
        if (more && load_step == steps) open_item();
        if (more) {
            const uint32_t row = threadIdx.x / kHeadPieces;
            const uint32_t piece = threadIdx.x % kHeadPieces;
            const uint32_t at = (first_step + load_step) * kHeadStageK + piece * kElementsAPiece;
            char* to = stages + load_stage * Shape::kStageBytes + head_offset(row, piece);
#pragma unroll
            for (int i = 0; i < 2; ++i) copy_piece(to + i * 64 * kHeadRowBytes, weights[i], at);
            to += kHeadIds * kHeadRowBytes;
#pragma unroll
            for (int i = 0; i < Shape::kRowPasses; ++i) copy_piece(to + i * 64 * kHeadRowBytes, x[i], at);
            ++load_step;
        }
        load_stage = load_stage + 1 == Shape::kStages ? 0 : load_stage + 1;
        copy_async_commit();
    }

    // Place of a sum: consecutive ids on consecutive banks, and so are the two rows' worth of MMA results of a warp.
    __device__ __forceinline__ float* sum_at(uint32_t row, uint32_t id) const {
        return sums + row * kHeadIds + (id ^ (row >> 1 & 3) << 3);
    }

    using Sums = float[Shape::kIdTiles][Shape::kPairs][2][4];

    __device__ __forceinline__ void multiply(Sums& sum, uint32_t stage, uint32_t pairs, uint32_t id_warp, uint32_t row_warp) const {
        if (pairs == 0) return;
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(stages)) + stage * Shape::kStageBytes;
        const uint32_t id = id_warp * Shape::kIdTiles * 16 + lane % 16;
        const uint32_t row = row_warp * 16 + lane % 8 + lane / 16 * 8;
#pragma unroll
        for (int k16 = 0; k16 < kHeadStageK / 16; ++k16) {
            uint4 a[Shape::kIdTiles];
#pragma unroll
            for (int i = 0; i < Shape::kIdTiles; ++i) a[i] = load_matrices(base + head_offset(id + i * 16, k16 * 2 + lane / 16));
#pragma unroll
            for (int pair = 0; pair < Shape::kPairs; ++pair) {
                if (pair >= pairs) break;
                const uint32_t at = row + pair * Shape::kRowWarps * 16;
                const uint4 b = load_matrices(base + kHeadIds * kHeadRowBytes + head_offset(at, k16 * 2 + lane / 8 % 2));
#pragma unroll
                for (int i = 0; i < Shape::kIdTiles; ++i) {
                    mma_16x8x16(sum[i][pair][0], a[i].x, a[i].y, a[i].z, a[i].w, b.x, b.y);
                    mma_16x8x16(sum[i][pair][1], a[i].x, a[i].y, a[i].z, a[i].w, b.z, b.w);
                }
            }
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

    __device__ __forceinline__ void store_logit(uint32_t row, uint32_t id, float value) const {
        const uint64_t at = row * p.logits_stride + id;
        if (p.flags & kFlagF32Logits) {
            reinterpret_cast<float*>(p.logits)[at] = value;
        } else {
            reinterpret_cast<__nv_bfloat16*>(p.logits)[at] = __float2bfloat16_rn(value);
        }
    }

    // Stores `kColumns` ids from the block's `first` on, of all rows of the item; `value(row, id)` is a logit.
    template <int kColumns, typename Value>
    __device__ __forceinline__ void store(const HeadItem& item, uint32_t first, Value value) const {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
        for (uint32_t column = first + lane; column < first + kColumns; column += 32) {
            const uint32_t id = column < item.id_count ? __ldcg(reinterpret_cast<const uint32_t*>(item.ids) + column) : ~0u;
#pragma unroll 8
            for (uint32_t row = threadIdx.x / 32; row < item.count; row += kHeadWarps) {
                const uint32_t out = head_row(p, item.first_position + row);
                if (id < p.vocab && out < p.rows) store_logit(out, id, value(row, column));
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

    // Adds a part to those before it. Until the last one, a thread's sums lie where it alone finds them, free of bank conflicts.
    __device__ __forceinline__ void finish_part(const HeadItem& item, Sums& sum, uint32_t part, uint32_t id_warp, uint32_t row_warp) const {
        float* own = sums + threadIdx.x;
        for_sums(sum, id_warp, row_warp, [&](float& value, uint32_t, uint32_t, int number) {
            if (part > 0) value = own[number * kHeadThreads] + value;
            if (part + 1 < kLogitParts) {
                own[number * kHeadThreads] = value;
                value = 0;
            }
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

    __device__ __forceinline__ void run() {
        const uint32_t warp = threadIdx.x / 32;
        const uint32_t id_warp = warp % Shape::kIdWarps;
        const uint32_t row_warp = warp / Shape::kIdWarps;
        next_item = taker;
        load_slot = kQueue - 1;
        load_step = steps;
        load_stage = 0;
        more = true;
#pragma unroll 1
        for (int stage = 0; stage < Shape::kStages - 1; ++stage) load_stage_ahead();
        if (Shape::kSplit) cluster_arrive();
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
                multiply(sum, stage, pairs, id_warp, row_warp);
                stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
                if (!Shape::kSplit && step + 1 == part_end) {
                    finish_part(item, sum, part++, id_warp, row_warp);
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
    extern __shared__ __align__(128) char dynamic[];
    __shared__ typename Head<Shape>::Shared shared;
    const bool wait_first = (p.flags & kFlagTilesReady) == 0;
    if (wait_first) wait_for_predecessor();
    let_dependents_start();
    Head<Shape> head{p, {p, shared.work}, shared.queue};
    head.stages = dynamic;
    head.sums = reinterpret_cast<float*>(dynamic + Shape::kStages * Shape::kStageBytes);
    const uint32_t all_steps = (p.k_in + kHeadStageK - 1) / kHeadStageK;
    head.part_steps = (all_steps + kLogitParts - 1) / kLogitParts;
    head.steps = Shape::kSplit ? head.part_steps : head.part_steps * kLogitParts;
    head.first_step = Shape::kSplit ? cluster_rank() * head.part_steps : 0;
    head.takers = Shape::kSplit ? gridDim.x / kLogitParts : gridDim.x;
    head.taker = Shape::kSplit ? blockIdx.x / kLogitParts : blockIdx.x;
    head.work.start();
    if (!wait_first) wait_for_predecessor();
    head.run();
}
