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
// A third kind, for warpgroups, is `overlay_head_kept.cuh`'s.
// The overlay's rows are nobody's output, so the first stages of them are under way before the wait for the predecessor.
#pragma once

#include "barrier.cuh"
#include "cluster.cuh"
#include "head_logits.cuh"
#include "head_stages.cuh"
#include "overlay_work.cuh"

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
        const uint32_t first = first_column + step * Shape::kPartTiles * kHeadStageK + piece * kElementsAPiece;
#pragma unroll
        for (int tile = 0; tile < Shape::kTiles; ++tile) {
            const int part = tile / Shape::kPartTiles;
            const uint32_t at = first + part * part_columns + tile % Shape::kPartTiles * kHeadStageK;
            // Where a step is one tile, parts end where one does.
            const uint32_t end = Shape::kPartTiles > 1 ? min(p.k_in, first_column + (part + 1) * part_columns) : p.k_in;
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

    // Steps that an item has.
    __device__ __forceinline__ uint32_t steps() const { return Shape::kParts / Shape::kPartsAtOnce * part_steps; }

    // Begins the loads of one stage, of the next item where one is done.
    __device__ __forceinline__ void load_stage(uint32_t stage) {
        if (more && load_step == steps()) open_rows(open_item());
        if (more) copy_rows<0, kThreadRows>(load_step++, stage);
    }

    // Fills the stages, all or all but one. Rows of overlays are loaded at once, hidden rows after the wait for the predecessor.
    __device__ __forceinline__ void begin_loads(bool waited) {
        constexpr uint32_t kAhead = Shape::kFillsAll ? Shape::kStages : Shape::kStages - 1;
        next_item = Shape::kSplit ? blockIdx.x / Shape::kBlocks : blockIdx.x;
        load_slot = kQueue - 1;
        const HeadItem item = open_item();
        const uint32_t first = more ? min(steps(), kAhead) : 0;
#pragma unroll 1
        for (uint32_t step = 0; step < first; ++step) copy_rows<0, kIdPasses>(step, step);
        open_rows(item);
        if (!waited) wait_for_predecessor();
        load_step = first;
#pragma unroll 1
        for (uint32_t stage = 0; stage < kAhead; ++stage) {
            if (stage < first) {
                copy_rows<kIdPasses, kThreadRows>(stage, stage);
            } else {
                load_stage(stage);
            }
            // A stage more than waits count on belongs to the one before it.
            if (!Shape::kFillsAll || stage > 0) copy_async_commit();
        }
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
        constexpr int kSteps = Shape::kPartTiles * kTileSteps;
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

    // The same where a warp has 16 ids and 16 rows only, so that an MMA waits for the last: operands are loaded a tile ahead.
    __device__ __forceinline__ void multiply_sixteen(Sums& sum, uint32_t base, const Place& place) const {
        constexpr int kTileSteps = kHeadStageK / 16;
        uint4 a[2][kTileSteps];
        uint4 b[2][kTileSteps];
        const auto load_tile = [&](int tile) {
            const uint32_t at = base + tile * Shape::kTileBytes;
#pragma unroll
            for (int k16 = 0; k16 < kTileSteps; ++k16) {
                a[tile % 2][k16] = load_matrices(at + place.ids + (place.id_piece ^ k16 << 5));
                b[tile % 2][k16] = load_matrices(at + place.rows + (place.row_piece ^ k16 << 5));
            }
        };
        load_tile(0);
#pragma unroll
        for (int tile = 0; tile < Shape::kPartTiles; ++tile) {
            if (tile + 1 < Shape::kPartTiles) load_tile(tile + 1);
#pragma unroll
            for (int k16 = 0; k16 < kTileSteps; ++k16) {
                const uint4& rows16 = b[tile % 2][k16];
                mma_16x8x16(sum[0][0][0], a[tile % 2][k16], rows16.x, rows16.y);
                mma_16x8x16(sum[0][0][1], a[tile % 2][k16], rows16.z, rows16.w);
            }
        }
    }

    // `part`: of those at once.
    __device__ __forceinline__ void multiply(Sums& sum, uint32_t stage, uint32_t part, uint32_t pairs, const Place& place) const {
        static_assert(Shape::kPairs == 1 || Shape::kPairs == 2 || Shape::kPairs == 4);
        const uint32_t base = stages + stage * Shape::kStageBytes + part * Shape::kPartBytes;
        if constexpr (Shape::kPairs == 1 && Shape::kIdTiles == 1) {
            if (pairs > 0) multiply_sixteen(sum, base, place);
            return;
        }
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

    static constexpr int kIdsALane = Shape::kIds / 32;

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
        const uint32_t own = shared_address(sums() + part * kPartSums + sent_at(lane % 4 * 2, lane / 4));
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
        // Before the wait: they are there after it.
        const uint32_t from = first + threadIdx.x / 32;
        LogitPlaces<kIdsALane, kHeadWarps, kOwnRows / kHeadWarps> places;
        places.find_ids(p, item);
        places.find_rows(p, item, from, end);
        if (threadIdx.x == 0) barrier_expect(arrived, kLogitParts * mmas * kMmaSums * sizeof(float));
        // A block without rows of the item waits too, for nothing but its own arrival: a barrier is waited for in every phase.
        barrier_wait(arrived, turn & 1);
        if (first < end) {
            places.store(p, from, [&](uint32_t row, uint32_t id) {
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
        constexpr int kBatch = 8 / kIdsALane;
        LogitPlaces<kIdsALane, kHeadWarps, kBatch> places;
        places.find_ids(p, item);
#pragma unroll 1
        for (uint32_t from = threadIdx.x / 32; from < item.count; from += kBatch * kHeadWarps) {
            places.find_rows(p, item, from, item.count);
            places.store(p, from, [&](uint32_t row, uint32_t id) { return *sum_at(row, id); });
        }
        __syncthreads();
    }

    __device__ __forceinline__ void run(bool waited) {
        const uint32_t part_at_once = threadIdx.x / 32 / Shape::kPartWarps;
        const uint32_t warp = threadIdx.x / 32 % Shape::kPartWarps;
        const uint32_t id_warp = warp % Shape::kIdWarps;
        const uint32_t row_warp = warp / Shape::kIdWarps;
        const Place place = place_of(id_warp, row_warp);
        begin_loads(waited);
        if (Shape::kSplit) cluster_wait();  // until the others' barriers are there
        bool filled = Shape::kFillsAll;
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
            for (uint32_t part = 0; part < Shape::kParts; part += Shape::kPartsAtOnce) {
                for (uint32_t step = 0; step < part_steps; ++step) {
                    copy_async_wait<Shape::kStages - 2>();
                    __syncthreads();
                    const auto load_ahead = [&]() {
                        if (!filled) load_stage(stage == 0 ? Shape::kStages - 1 : stage - 1);
                        filled = false;
                        copy_async_commit();
                    };
                    if constexpr (Shape::kPartsAtOnce == 1) {
                        load_ahead();
                        multiply(sum, stage, 0, pairs, place);
                    } else {
                        // Warps of one part load while those of another, on the same schedulers, multiply. A loop: twice the code would take longer to come.
#pragma unroll 1
                        for (uint32_t turn_in_step = 0; turn_in_step < 2; ++turn_in_step) {
                            if (turn_in_step == part_at_once % 2) {
                                load_ahead();
                            } else {
                                multiply(sum, stage, part_at_once, pairs, place);
                            }
                        }
                    }
                    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
                }
                if (Shape::kSplit) {
                    // Until all have read what was sent of the last item.
                    if (turn > 0) barrier_wait(taken, (turn - 1) & 1);
                    send_part(item, sum, cluster_rank() * Shape::kParts + part_at_once, id_warp, row_warp);
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
        head.arrived = shared_address(&shared.arrived);
        head.taken = shared_address(&shared.taken);
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
    static_assert(!Shape::kSplit || Shape::kTiles % Shape::kPartsAtOnce == 0);
    const uint32_t tiles = part_tiles(p);
    head.part_columns = tiles * kHeadStageK;
    head.part_steps = (tiles + Shape::kPartTiles - 1) / Shape::kPartTiles;
    head.first_column = Shape::kSplit ? cluster_rank() * Shape::kParts * head.part_columns : 0;
    prefetch_overlays(p.entries, p.slots);
    head.work.start();
    head.run(wait_first);
}
