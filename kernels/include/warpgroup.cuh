// Hopper's MMA of four warps, a warpgroup, and what goes with it: descriptors of shared memory, registers that warpgroups pass on. For sm_90a alone.
#pragma once

#include "primitives.cuh"

// Threads of a warpgroup, and the rows that it multiplies at a time.
constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;

// Sums of 64 rows and 64 columns: a warp has 16 of the rows. Elements 4i and on: columns 8i + 2 * quarter and the next of row `group`, the same of row `group + 8`.
using WarpgroupSums = float[32];

// Before the first MMA after ordinary instructions have written its registers.
__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all committed groups of MMAs but the last `kPending` have ended.
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Between a thread's view of shared memory that ordinary instructions or asynchronous copies have written, and MMAs that read it.
__device__ __forceinline__ void fence_for_mma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 16 k of a column operand in shared memory: bricks of 8 columns, 16 bytes each, one after the other; `k_stride` bytes from the first 8 k to the others.
__device__ __forceinline__ uint64_t brick_descriptor(SharedAddress first, uint32_t k_stride) {
    constexpr uint32_t kBrickBytes = 8 * 16;
    return uint64_t((first & 0x3ffff) >> 4) | uint64_t(k_stride >> 4) << 16 | uint64_t(kBrickBytes >> 4) << 32;
}

// An operand in shared memory, rows of 64 k, 128 bytes each: the 16-byte pieces of a row stand in the order of their number, exclusive-or the row's modulo 8.
// Eights of rows follow one another from a multiple of 1024 bytes on.
__device__ __forceinline__ uint64_t swizzled_descriptor(SharedAddress first) {
    constexpr uint64_t kSwizzled128 = 1;
    constexpr uint64_t kEightBytes = 8 * 128;
    return uint64_t((first & 0x3ffff) >> 4) | uint64_t(1) << 16 | kEightBytes >> 4 << 32 | kSwizzled128 << 62;
}

// The same operand's `k16`th 16 k.
__device__ __forceinline__ uint64_t swizzled_after(uint64_t descriptor, uint32_t k16) { return descriptor + k16 * (32 >> 4); }

// Sums of 64 rows and 32 columns, in the order of `WarpgroupSums`.
using WarpgroupSums32 = float[16];

// D = A * B + D on 64 rows and 32 columns, 16 k, both operands in shared memory. The bits are those of `mma_16x8x16`.
__device__ __forceinline__ void warpgroup_mma(WarpgroupSums32& d, uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
          "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b));
}

// D = A * B + D, or A * B with `clear`, on 64 rows in registers, as `mma_16x8x16` takes 16 of them a warp, and 64 columns in shared memory, 16 k. The sum of
// the 16 products and D has the bits of `mma_16x8x16`, in whatever order the 16 stand.
__device__ __forceinline__ void warpgroup_mma(WarpgroupSums& d, const uint32_t (&a)[4], uint64_t b, bool clear) {
    asm volatile(
        "{\n\t.reg .pred add;\n\tsetp.eq.u32 add, %37, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, add, 1, 1, 0;\n\t}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
          "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
          "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<uint32_t>(clear)));
}

// A warpgroup gives registers back, or waits for so many a thread.
template <int kRegisters>
__device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
