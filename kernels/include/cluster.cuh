// Clusters of blocks: shared memory of one that others read, and sums sent from one's to another's, which its barriers count.
#pragma once

#include <cstdint>

#include "primitives.cuh"

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// The same where other blocks are to see what the threads have written.
__device__ __forceinline__ void cluster_arrive_release() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address in the shared memory of block `rank` of the cluster that `own` is in this one's.
__device__ __forceinline__ uint32_t address_in_cluster(uint32_t own, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
    return there;
}

// What block `rank` has at this address of its own shared memory.
__device__ __forceinline__ uint32_t load_of_cluster(const uint32_t* shared, uint32_t rank) {
    uint32_t v;
    const uint32_t there = address_in_cluster(shared_address(shared), rank);
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(there) : "memory");
    return v;
}

// Stores to another block's shared memory, and counts the bytes on a barrier there once they are visible.
__device__ __forceinline__ void store_async16(uint32_t there, uint32_t barrier_there, const float (&v)[4]) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there), "f"(v[0]), "f"(v[1]),
                 "f"(v[2]), "f"(v[3]), "r"(barrier_there)
                 : "memory");
}
