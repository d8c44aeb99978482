// Every hardware instruction and intrinsic that the kernels use, behind a thin wrapper each. The other files of this
// folder touch the machine only through these.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define W4_DEVICE __device__ __forceinline__

namespace w4::ptx {

// ---- where this thread is ----

W4_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
W4_DEVICE int cta_index_x() { return static_cast<int>(blockIdx.x); }
W4_DEVICE int cta_index_y() { return static_cast<int>(blockIdx.y); }

// The warp's index, told to the compiler to be the same in all lanes.
W4_DEVICE int warp_index() { return __shfl_sync(0xffffffffu, thread_index() / 32, 0); }
W4_DEVICE int lane_index() { return thread_index() % 32; }

W4_DEVICE char* dynamic_shared() {
  extern __shared__ __align__(128) char shared[];
  return shared;
}

// ---- barriers ----

W4_DEVICE void sync_warp() { __syncwarp(); }
W4_DEVICE void sync_cta() { __syncthreads(); }

// A barrier of `threads` threads of the CTA, named 1 to 15 (0 is sync_cta's).
template <int kThreads>
W4_DEVICE void sync_named(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// ---- global -> shared ----

W4_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies 16 bytes through L2 only where `active`; the bytes from `bytes` (0 to 16) on are written as 0, and nothing is
// read where it is 0. L2::128B: weights are read once and in order, so the next sectors of the line are wanted too.
// `active` predicates the instruction itself: a branch could leave the warp diverged at the next mma.sync.
W4_DEVICE void cp_async_16(void* shared, const void* global, int bytes, bool active = true) {
  asm volatile(
      "{.reg .pred p;\n setp.ne.b32 p, %3, 0;\n @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;}" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(static_cast<int>(active))
      : "memory");
}

// The same for 8 bytes, or 8 zeros where bytes is 0.
W4_DEVICE void cp_async_8(void* shared, const void* global, int bytes, bool active = true) {
  asm volatile("{.reg .pred p;\n setp.ne.b32 p, %3, 0;\n @p cp.async.ca.shared.global [%0], [%1], 8, %2;}" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(static_cast<int>(active))
               : "memory");
}

W4_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's committed groups are still under way.
template <int kPending>
W4_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- loads and stores ----

template <class T>
W4_DEVICE T load_shared(const void* p) {
  return *static_cast<const T*>(p);
}

template <class T>
W4_DEVICE void store_shared(void* p, T value) {
  *static_cast<T*>(p) = value;
}

template <class T>
W4_DEVICE T load_global(const void* p) {
  return __ldg(static_cast<const T*>(p));
}

template <class T>
W4_DEVICE void store_global(void* p, T value) {
  *static_cast<T*>(p) = value;
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
W4_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// ---- arithmetic ----

// (a & b) | c in one instruction.
W4_DEVICE uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// The low (or high) 16 bits in both halves.
W4_DEVICE uint32_t broadcast_low(uint32_t a) { return __byte_perm(a, a, 0x1010); }
W4_DEVICE uint32_t broadcast_high(uint32_t a) { return __byte_perm(a, a, 0x3232); }

W4_DEVICE uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

W4_DEVICE uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

W4_DEVICE uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// sm_80 has bf16 arithmetic as fma alone.
W4_DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// D (16,8) += A (16,16) B (16,8): A rows and B columns as PTX's mma.m16n8k16 lays them over the lanes.
W4_DEVICE void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

W4_DEVICE void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- float <-> 16 bit ----

W4_DEVICE uint16_t float_to_f16(float v) { return __half_as_ushort(__float2half_rn(v)); }
W4_DEVICE uint16_t float_to_bf16(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
W4_DEVICE float f16_to_float(uint16_t v) { return __half2float(__ushort_as_half(v)); }
W4_DEVICE float bf16_to_float(uint16_t v) { return __bfloat162float(__ushort_as_bfloat16(v)); }

}  // namespace w4::ptx
