// Barriers in shared memory: of a block, of a cluster, and of the slots of a ring.
#pragma once

#include <cstdint>

#include "primitives.cuh"

// Bytes of a barrier.
constexpr int kBarrierBytes = 8;

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barriers visible to the cluster; what follows is `cluster_arrive`.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier_there) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier_there) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Arrives at a barrier once the thread's copies so far have.
__device__ __forceinline__ void barrier_arrive_after_copies(SharedAddress barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives at a barrier of the block's own.
__device__ __forceinline__ void barrier_arrive_own(SharedAddress barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Slots of shared memory that are filled and read in turn, a barrier for each that is full and one for each that is empty again. All threads that fill a slot
// or read it arrive there themselves: one lane for its warp costs no less, and checkers of races do not follow it to what the others did.
template <int kSlots>
struct Ring {
    SharedAddress barriers;
    uint32_t slot = 0;
    uint32_t round = 0;

    static constexpr int kBarriers = 2 * kSlots;

    __device__ __forceinline__ explicit Ring(const uint64_t* barriers) : barriers(shared_address(barriers)) {}

    // By one thread, for so many that fill a slot and that read it.
    __device__ __forceinline__ void init(uint32_t fillers, uint32_t readers) const {
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(barriers + i * kBarrierBytes, fillers);
            barrier_init(barriers + (kSlots + i) * kBarrierBytes, readers);
        }
    }

    __device__ __forceinline__ SharedAddress full() const { return barriers + slot * kBarrierBytes; }

    __device__ __forceinline__ SharedAddress empty() const { return full() + kSlots * kBarrierBytes; }

    __device__ __forceinline__ void wait_full() const { barrier_wait(full(), round & 1); }

    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), round & 1 ^ 1); }

    // By every filler that has written its part; `barrier_arrive_after_copies(full())` where copies do.
    __device__ __forceinline__ void hand_over() const { barrier_arrive_own(full()); }

    // By every reader that needs the slot no more.
    __device__ __forceinline__ void give_back() const { barrier_arrive_own(empty()); }

    __device__ __forceinline__ void advance() {
        slot = slot + 1 == kSlots ? 0 : slot + 1;
        round += slot == 0;
    }
};
