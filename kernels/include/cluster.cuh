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

// Stores to another block's shared memory, or to the own by such an address; the others see it after the cluster's next barrier.
__device__ __forceinline__ void store_in_cluster(uint32_t there, float v) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(v) : "memory"); }

__device__ __forceinline__ void store_in_cluster(uint32_t there, uint16_t v) { asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(there), "h"(v) : "memory"); }

#define LORA_STORE_ASYNC16(type, kind, a, b, c, d)                                                                                        \
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4." type " [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there), kind(a), kind(b), \
                 kind(c), kind(d), "r"(barrier_there)                                                                                     \
                 : "memory")

// Stores to another block's shared memory, and counts the bytes on a barrier there once they are visible.
__device__ __forceinline__ void store_async16(uint32_t there, uint32_t barrier_there, const float (&v)[4]) {
    LORA_STORE_ASYNC16("f32", "f", v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ void store_async16(uint32_t there, uint32_t barrier_there, const uint4& v) {
    LORA_STORE_ASYNC16("b32", "r", v.x, v.y, v.z, v.w);
}

#undef LORA_STORE_ASYNC16
