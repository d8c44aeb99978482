// Copies of A for the kernels: columns gathered for act-order, rows brought to 16-byte alignment.
#include "../gemm.h"
#include "ptx.cuh"

namespace w4 {
namespace {

constexpr int kThreads = 256, kPerThread = 8;

// out (m, packed_k): column j is x's column perm[j] (j itself without perm), 0 where there is none. Element offsets are
// 64 bit: x may hold more than 2^31.
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const uint16_t* x, int64_t ldx, const int32_t* perm, uint16_t* out, int64_t m, int64_t k,
                  int64_t packed_k, int64_t vectors_per_row) {
  const int64_t at = static_cast<int64_t>(ptx::cta_index_x()) * kThreads + ptx::thread_index();
  const int64_t row = at / vectors_per_row, column = at % vectors_per_row * kPerThread;
  if (row >= m) return;
  uint32_t word[kPerThread / 2];
#pragma unroll
  for (int i = 0; i < kPerThread; i += 2) {
    uint32_t pair[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int64_t j = column + i + e;
      const int64_t source = perm != nullptr ? ptx::load_global<int32_t>(perm + j) : j < k ? j : -1;
      pair[e] = source >= 0 ? ptx::load_global<uint16_t>(x + row * ldx + source) : 0;
    }
    word[i / 2] = pair[0] | pair[1] << 16;
  }
  ptx::store_global<uint4>(out + row * packed_k + column, make_uint4(word[0], word[1], word[2], word[3]));
}

}  // namespace

void launch_gather(const void* x, int64_t ldx, const int32_t* perm, void* out, int64_t m, int64_t k, int64_t packed_k,
                   cudaStream_t stream) {
  const int64_t vectors = packed_k / kPerThread;
  const int64_t ctas = (m * vectors + kThreads - 1) / kThreads;
  gather_kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(
      static_cast<const uint16_t*>(x), ldx, perm, static_cast<uint16_t*>(out), m, k, packed_k, vectors);
}

}  // namespace w4
