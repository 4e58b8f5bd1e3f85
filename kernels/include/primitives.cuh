// The PTX that the algorithm is written in: loads, the MMA, programmatic dependent launch.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

// Loads that the compiler issues where they stand, rather than after a branch that may not need them.
__device__ __forceinline__ uint32_t load_u32(const uint32_t* address) {
    uint32_t v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint64_t load_u64(const uint64_t* address) {
    uint64_t v;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint32_t load_u16(const uint16_t* address) {
    uint16_t v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(address) : "memory");
    return v;
}

// Loads that leave zeros where `present` is false. Predicated, not branched around: with a branch each, the compiler waits for one load before
// it issues the next.

#define LORA_LOAD16_IF(kind)                                                                  \
    asm volatile(                                                                             \
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"                                     \
        "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"            \
        "@p " kind " {%0,%1,%2,%3}, [%4+%6];\n\t}"                                            \
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)                                      \
        : "l"(base), "r"(static_cast<uint32_t>(present)), "n"(kOffset)                        \
        : "memory")

// Loads of what is there, `kOffset` bytes from one base address for all of them.
template <int kOffset>
__device__ __forceinline__ uint4 load_weights16(const void* base) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4+%5];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(base), "n"(kOffset)
                 : "memory");
    return v;
}

template <int kOffset>
__device__ __forceinline__ uint2 load_weights8(const void* base) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2+%3];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(base), "n"(kOffset)
                 : "memory");
    return v;
}

template <int kOffset>
__device__ __forceinline__ uint4 load16(const void* base) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4+%5];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(base), "n"(kOffset)
                 : "memory");
    return v;
}

// When a line leaves the L2: after all others, before them, or in its turn.
__device__ __forceinline__ uint64_t leaves_last() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t leaves_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t leaves_in_turn() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Loads of what is there, which say when it leaves the L2.
template <int kOffset>
__device__ __forceinline__ uint4 load_weights16(const void* base, uint64_t leaves) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4+%5], %6;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(base), "n"(kOffset), "l"(leaves)
                 : "memory");
    return v;
}

template <int kOffset>
__device__ __forceinline__ uint2 load_weights8(const void* base, uint64_t leaves) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v2.u32 {%0,%1}, [%2+%3], %4;"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(base), "n"(kOffset), "l"(leaves)
                 : "memory");
    return v;
}

// Weights are read once a launch: past L1, whole lines into L2.
template <int kOffset>
__device__ __forceinline__ uint4 load_weights16_if(bool present, const void* base) {
    uint4 v;
    LORA_LOAD16_IF("ld.global.nc.L1::no_allocate.L2::128B.v4.u32");
    return v;
}

// What earlier launches may have written: from L2.
template <int kOffset = 0>
__device__ __forceinline__ uint4 load16_if(bool present, const void* base) {
    uint4 v;
    LORA_LOAD16_IF("ld.global.cg.v4.u32");
    return v;
}

#undef LORA_LOAD16_IF

constexpr uint32_t kLineBytes = 128;

// Asks for the line of an address in L2, whatever may still be written to it.
__device__ __forceinline__ void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

__device__ __forceinline__ void prefetch_l2(uint64_t address) { prefetch_l2(reinterpret_cast<const void*>(address)); }

// Drops the line at an address from L2, so that it is not written to memory. It holds anything until it is written again.
__device__ __forceinline__ void drop_line(const void* line) { asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory"); }

// D = A * B + D on one 16x8x16 BF16 tile with FP32 sums.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                            uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    mma_16x8x16(d, a.x, a.y, a.z, a.w, b0, b1);
}

// Four registers in a row, as an MMA takes them, made once for several MMAs: left to itself, the compiler moves them together again for each. A permutation of
// all four bytes is a move that it does not see through.
__device__ __forceinline__ uint4 in_mma_order(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
    uint4 v;
    asm("prmt.b32 %0, %1, 0, 0x3210;" : "=r"(v.x) : "r"(a0));
    asm("prmt.b32 %0, %1, 0, 0x3210;" : "=r"(v.y) : "r"(a1));
    asm("prmt.b32 %0, %1, 0, 0x3210;" : "=r"(v.z) : "r"(a2));
    asm("prmt.b32 %0, %1, 0, 0x3210;" : "=r"(v.w) : "r"(a3));
    return v;
}

// Byte offset of 16-byte piece `piece` of row `row` in shared memory, for rows of `kRowBytes` that lanes read four adjacent pieces of. Odd rows have their
// 64-byte halves swapped, so that the eight lanes of a phase, four of each of two rows, hit all banks once, and so do the lanes that bring a row.
template <int kRowBytes>
__device__ __forceinline__ uint32_t stage_offset(uint32_t row, uint32_t piece) {
    static_assert(kRowBytes % 128 == 0);
    return row * kRowBytes + ((piece ^ ((row & 1) << 2)) << 4);
}

// Shared memory by its 32-bit address, which stays in one register.
using SharedAddress = uint32_t;

__device__ __forceinline__ SharedAddress shared_address(const void* shared) { return SharedAddress(__cvta_generic_to_shared(shared)); }

// 16 bytes from global to shared memory without registers; zeros where `present` is false, `global` then being any global address.
__device__ __forceinline__ void copy_async16(SharedAddress to, const void* global, bool present) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(present ? 16 : 0) : "memory");
}

// The same, which says when its line leaves the L2. The shared address is one that the compiler cannot split into a register and a uniform one: `ptxas` 13.0 makes an
// illegal instruction of that together with a cache policy.
__device__ __forceinline__ void copy_async16(SharedAddress to, const void* global, bool present, uint64_t leaves) {
    SharedAddress whole;
    asm("prmt.b32 %0, %1, 0, 0x3210;" : "=r"(whole) : "r"(to));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(whole), "l"(global), "r"(present ? 16 : 0), "l"(leaves)
                 : "memory");
}

__device__ __forceinline__ void copy_async16(void* shared, const void* global, bool present) { copy_async16(shared_address(shared), global, present); }

// 8 bytes from global to shared memory without registers; zeros where `present` is false, `global` then being any global address.
__device__ __forceinline__ void copy_async8(SharedAddress to, const void* global, bool present) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(to), "l"(global), "r"(present ? 8 : 0) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(SharedAddress address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint32_t load_shared4(SharedAddress address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint2 load_shared8(SharedAddress address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint64_t load_shared_u64(SharedAddress address) {
    uint64_t v;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void copy_async16(SharedAddress to, uint64_t global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

__device__ __forceinline__ void store16(uint64_t address, const uint4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Programmatic dependent launch: a kernel may start before its predecessors have finished, and this waits until all of them have, their writes
// seen. Only what no launch of the step writes (weights, tables, tiles that are ready) may be read before it. Every block waits before it exits,
// so that a finished kernel has no unfinished one before it.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void let_dependents_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Multiprocessors of the device, as far as they are numbered.
__device__ __forceinline__ uint32_t multiprocessors() {
    uint32_t count;
    asm("mov.u32 %0, %%nsmid;" : "=r"(count));
    return count;
}

// Two values rounded to nearest even, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }

__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// A number that all lanes of a warp have, so that the compiler knows it: it then makes no provision for lanes that part ways around a shuffle.
__device__ __forceinline__ uint32_t warp_uniform(uint32_t v) { return __shfl_sync(0xffffffffu, v, 0); }

// A thread's place in the MMA's layouts.
struct Lane {
    uint32_t warp;
    uint32_t group;    // row of A, column of x, row of the result
    uint32_t quarter;  // which 8 of 32 k; which two columns of the result
};

__device__ __forceinline__ Lane lane_of_thread() {
    return Lane{threadIdx.x / 32, (threadIdx.x % 32) / 4, threadIdx.x % 4};
}
