// A whole delta in one launch, several blocks a tile: where there are few tiles for `delta_rows`, each with many rows, or two sites read the same x.
//
// The blocks of a tile are a cluster. Each has a share of what there is to multiply by A, they send each other the sums, and each makes a share of the outputs. So x and
// B are read once, as by two launches, but a block waits for those of its own tile alone, and what it waits for is in shared memory.
#pragma once

#include "cluster.cuh"
#include "delta_rows.cuh"

// Up to `kBlocks` k blocks in as many blocks, `kSites` sites that read the same x, up to 16 ranks, routed, out in whole runs of 8 outputs. A block has one k block of
// all sites, and then `outputs` outputs of one of them, which it may share with other blocks. Blocks of the cluster; tiles.
template <int kBlocks, int kSites>
__device__ __forceinline__ void delta_cross(const DeltaParams& p, uint32_t outputs) {
    static_assert(kSites <= 2 && kBlocks % kSites == 0);
    constexpr uint32_t kSharers = kBlocks / kSites;  // of a site's outputs
    extern __shared__ __align__(128) char shared[];
    __shared__ TileRows rows;
    const uint32_t own = cluster_rank();
    const uint32_t own_site = kSites == 1 ? 0 : own / kSharers;
    const DeltaSite& site = p.sites[own_site];
    cluster_arrive();
    begin(p, [&] {
#pragma unroll
        for (uint32_t index = 0; index < kSites; ++index) prefetch_likely<1>(p, index, own);
    });
    const Tile tile = tile_at(p, blockIdx.y);  // not after the count: one latency less
    if (blockIdx.y >= tile_total(p) || !tile_in_pass(p, tile)) return wait_for_predecessor();
    const uint32_t row = out_row_of(p, tile, threadIdx.x);  // on its way with the addresses of A and B
    const Pair pair(p, site, tile.entry);
    Adapter other{nullptr, 0};
    if (kSites > 1) other = adapter_of<Factor::kA>(p, p.sites[1 - own_site], tile.entry);
    if ((pair.a.rank | other.rank) == 0) return wait_for_predecessor();
    rows.put(p, site, row);
    const ExpandTile t(p, site, tile, pair.b);
    const OwnOutputs outs(site, own % kSharers * outputs, outputs);
    // A of one site leaves registers for B while rows pass by it.
    constexpr bool kEarlyB = kSites == 1;
    Weights16<> coming;
    if (kEarlyB) t.load_weights(coming, outs.n, 0);
    ChunkLines loaded[kSites];
#pragma unroll
    for (uint32_t index = 0; index < kSites; ++index) load_ranks(loaded[index], p, index == own_site ? pair.a : other, ShrinkWork{own, 0, index});
    __syncthreads();
    wait_for_predecessor();

    const uint32_t pitch = xa_pitch(kRankGranule);
    char* const xa = shared + kDeltaRingBytes;
    float* const sums = reinterpret_cast<float*>(xa + kLargeTileRows * pitch);  // of the own site: [k block][row][rank]
    const ThreadSum place;  // its group is a site
    const uint32_t here = shared_address(sums + (own * kLargeTileRows + place.row) * kRankGranule + place.rank);
    uint32_t to[kSharers];
#pragma unroll
    for (uint32_t sharer = 0; sharer < kSharers; ++sharer) to[sharer] = address_in_cluster(here, (kSites == 1 ? 0 : place.group) * kSharers + sharer);
    // There may be one k block less than blocks.
    const PassingRows passing{p, shared, rows.x, kBlocks > 2 && own >= p.k_blocks ? 0 : tile.count};
    const XStream stream = passing.ask(own);
    cluster_wait();  // the other blocks run: their shared memory may be written
    passing.pass(stream, loaded, [&](const float(&exchange)[kSites][kExchangeFloats], uint32_t first) {
        if (place.group >= kSites) return;
        const float sum = place.total(exchange, chunks_of_block(p, own));
#pragma unroll
        for (uint32_t sharer = 0; sharer < kSharers; ++sharer) store_in_cluster(to[sharer] + first * kRankGranule * 4, sum);
    });

    SpreadBase<kShrinkThreads> base(shared, rows.out, tile.count, t.lane, outs.n, outs.end);
    if (pair.a.rank > 0) {
        base.ask_for_first();
        if (!kEarlyB) t.load_weights(coming, outs.n, 0);
    }
    cluster_arrive_release();
    cluster_wait();
    if (pair.a.rank == 0) return;
    constexpr uint32_t kQuads = kRankGranule / 4;
    for (uint32_t item = threadIdx.x; item < tile.count * kQuads; item += kShrinkThreads) {
        const float4* from = reinterpret_cast<const float4*>(sums) + item;
        float4 sum = *from;
#pragma unroll
        for (uint32_t block = 1; block < kBlocks; ++block) {
            if (kBlocks > 2 && block >= p.k_blocks) break;
            from += kLargeTileRows * kQuads;
            sum = make_float4(sum.x + from->x, sum.y + from->y, sum.z + from->z, sum.w + from->w);
        }
        *reinterpret_cast<uint2*>(xa + item / kQuads * pitch + item % kQuads * 8) = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    }
    __syncthreads();
    make_runs(t, base, coming, xa + t.lane.group * pitch, pitch, outs.n, outs.runs());
}

// One site, one k block, up to `kGroups` groups of 16 ranks, routed, out in whole runs of 8 outputs. A block has half of the rows, and then `outputs` outputs, half of
// them, of all rows. Blocks of the cluster; tiles.
template <int kGroups, typename W>
__device__ __forceinline__ void delta_halves(const DeltaParams& p, uint32_t outputs) {
    extern __shared__ __align__(128) char shared[];
    __shared__ TileRows rows;
    const uint32_t own = cluster_rank();
    const DeltaSite& site = p.sites[0];
    cluster_arrive();
    begin(p, [&] {
        if (own == 0) prefetch_likely<kGroups>(p, 0, 0);
    });
    const Tile tile = tile_at(p, blockIdx.y);  // not after the count: one latency less
    if (blockIdx.y >= tile_total(p) || !tile_in_pass(p, tile)) return wait_for_predecessor();
    const uint32_t row = out_row_of(p, tile, threadIdx.x);  // on its way with the addresses of A and B
    const Pair pair(p, site, tile.entry);
    if (pair.a.rank == 0) return wait_for_predecessor();
    rows.put(p, site, row);
    const ExpandTile t(p, site, tile, pair.b);
    const OwnOutputs outs(site, own * outputs, outputs);
    // 16 ranks leave registers for B while rows pass by A.
    constexpr bool kEarlyB = kGroups == 1;
    W coming;
    if (kEarlyB) t.load_weights(coming, outs.n, 0);
    ChunkLines loaded[kGroups];
    load_block(loaded, p, pair.a, 0);
    __syncthreads();
    wait_for_predecessor();

    // The first half is in whole groups of 8.
    constexpr uint32_t kBothGroups = kTileBlocks * kSmallTileRows;
    const uint32_t half = min((tile.count + kBothGroups - 1) / kBothGroups * kSmallTileRows, tile.count);
    const uint32_t before = own * half;
    const uint32_t pitch = xa_pitch(kGroups * kRankGranule);
    char* const xa = shared + kDeltaRingBytes;
    const ThreadSum place;
    const uint32_t here = shared_address(xa + (before + place.row) * pitch + (place.group * kRankGranule + place.rank) * 2);
    const uint32_t to[kTileBlocks] = {address_in_cluster(here, 0), address_in_cluster(here, 1)};
    const PassingRows passing{p, shared, rows.x + before, own == 0 ? half : tile.count - half};
    const XStream stream = passing.ask(0);
    cluster_wait();  // the other block runs: its shared memory may be written
    passing.pass(stream, loaded, [&](const float(&exchange)[kGroups][kExchangeFloats], uint32_t first) {
        if (place.group >= kGroups) return;
        const uint16_t sum = __bfloat16_as_ushort(__float2bfloat16_rn(place.total(exchange, chunks_of_block(p, 0))));
#pragma unroll
        for (uint32_t block = 0; block < kTileBlocks; ++block) store_in_cluster(to[block] + first * pitch, sum);
    });

    SpreadBase<kShrinkThreads> base(shared, rows.out, tile.count, t.lane, outs.n, outs.end);
    base.ask_for_first();
    if (!kEarlyB) t.load_weights(coming, outs.n, 0);
    cluster_arrive_release();
    cluster_wait();
    make_runs(t, base, coming, xa + t.lane.group * pitch, pitch, outs.n, outs.runs());
}
