// Sums the float partials of CTAs that split k, in the order of the splits, then bias and one rounding.
#include "epilogue.cuh"

namespace w4 {
namespace {

constexpr int kThreads = 128;

// partials (splits, m, 16 n16) -> D (m, n).
template <class Type>
__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ GemmArgs args) {
  const int64_t n_padded = static_cast<int64_t>(args.n16) * layout::kGrainN;
  const int64_t vectors = n_padded / kVector;
  const int64_t at = static_cast<int64_t>(ptx::cta_index_x()) * kThreads + ptx::thread_index();
  const int64_t row = at / vectors, column = at % vectors * kVector;
  if (row >= args.m) return;
  float out[kVector] = {};
  for (int s = 0; s < args.splits; ++s) {
    const float* const from = args.partials + (s * static_cast<int64_t>(args.m) + row) * n_padded + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 v = ptx::load_global<float4>(from + half * 4);
      out[half * 4] += v.x, out[half * 4 + 1] += v.y, out[half * 4 + 2] += v.z, out[half * 4 + 3] += v.w;
    }
  }
  store_row<Type>(args.D, row, column, args.n, args.bias, out);
}

}  // namespace

void launch_reduce(bool bf16, const GemmArgs& args, cudaStream_t stream) {
  const int64_t vectors = static_cast<int64_t>(args.n16) * layout::kGrainN / kVector;
  const unsigned ctas = static_cast<unsigned>((vectors * args.m + kThreads - 1) / kThreads);
  if (bf16) {
    reduce_kernel<BF16><<<ctas, kThreads, 0, stream>>>(args);
  } else {
    reduce_kernel<F16><<<ctas, kThreads, 0, stream>>>(args);
  }
}

}  // namespace w4
