// GemmUniversal: wires scheduler, main loop and epilogue into the kernel of one instance, and launches it.
#pragma once

#include "epilogue.cuh"
#include "mainloop.cuh"

namespace w4 {

template <class Tile, class Type, bool kSymmetric>
struct GemmUniversal {
  using S = Shapes<Tile>;

  W4_DEVICE static void run(const GemmArgs& args) {
    const int warp = ptx::warp_index(), lane = ptx::lane_index();
    char* const smem = ptx::dynamic_shared();
    const WorkTile work = Scheduler<Tile>::work(args);
    float acc[S::kN16][S::kM8][4] = {};                                          // (n16, m8)
    MainloopSm80<Tile, Type, kSymmetric>(args, work, smem, warp, lane).run(acc);
    Epilogue<Tile, Type>::run(args, work, smem, acc, warp, lane);
  }
};

template <class Tile, class Type, bool kSymmetric>
__global__ void __launch_bounds__(Shapes<Tile>::kThreads) gemm_kernel(const __grid_constant__ GemmArgs args) {
  GemmUniversal<Tile, Type, kSymmetric>::run(args);
}

template <class Tile, class Type, bool kSymmetric>
cudaError_t launch_kernel(const GemmArgs& args, cudaStream_t stream) {
  using S = Shapes<Tile>;
  auto* const kernel = gemm_kernel<Tile, Type, kSymmetric>;
  const int smem = S::smem_bytes(args.group_shift, kSymmetric);
  // Above 48 KB a kernel must ask, once per device.
  constexpr int kFreeSmem = 48 << 10;
  if (smem > kFreeSmem) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
    if (error != cudaSuccess) return error;
  }
  const int64_t tiles_m = (static_cast<int64_t>(args.m) + Tile::kTileM - 1) / Tile::kTileM;
  const int64_t tiles_n = (static_cast<int64_t>(args.n16) * layout::kGrainN + Tile::kTileN - 1) / Tile::kTileN;
  const dim3 grid(static_cast<unsigned>(tiles_m * tiles_n), static_cast<unsigned>(args.splits));
  kernel<<<grid, S::kThreads, smem, stream>>>(args);
  return cudaGetLastError();
}

template <class Tile, class Type>
cudaError_t launch_instance(const GemmArgs& args, cudaStream_t stream) {
  return args.V == nullptr ? launch_kernel<Tile, Type, true>(args, stream)
                           : launch_kernel<Tile, Type, false>(args, stream);
}

}  // namespace w4
