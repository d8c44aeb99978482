// The sizes that follow from a TileConfig, for kernels and for dispatch alike.
#pragma once

#include "../gemm.h"
#include "layout.cuh"

namespace w4 {

template <class Tile>
struct Shapes {
  static constexpr int kWarpN = Tile::kTileN / Tile::kWarpsN;                    // what one warp computes
  static constexpr int kWarpM = Tile::kTileM / Tile::kWarpsM;
  static constexpr int kSliceK = Tile::kTileK / Tile::kWarpsK;
  static constexpr int kN16 = kWarpN / 16, kM8 = kWarpM / 8, kK64 = kSliceK / 64;
  static constexpr int kTileN16 = Tile::kTileN / 16;
  static constexpr int kSliceWarps = Tile::kWarpsN * Tile::kWarpsM;
  static constexpr int kSliceThreads = 32 * kSliceWarps;
  static constexpr int kThreads = kSliceThreads * Tile::kWarpsK;

  static_assert(kN16 >= 1 && kWarpN % 16 == 0, "a warp computes a multiple of 16 n");
  static_assert(kM8 == 1 || kM8 % 2 == 0, "ldmatrix.x4 takes m in pairs of 8 beyond the first");
  static_assert(kK64 >= 1 && kSliceK % 64 == 0, "a packed piece is 64 k");
  static_assert((kSliceK & (kSliceK - 1)) == 0, "a slice lies inside a group or holds whole ones: powers of two");
  static_assert(Tile::kStages >= 3 && Tile::kStages <= 8, "kStages is 3 to 8");

  static constexpr int kStageABytes = Tile::kTileM * Tile::kTileK * 2;
  static constexpr int kSliceABytes = kStageABytes / Tile::kWarpsK;
  static constexpr int kStageBBytes = Tile::kTileN * Tile::kTileK / 2;
  static constexpr int kSliceBBytes = kStageBBytes / Tile::kWarpsK;
  // Row stride of the float tile through which warps reduce: lanes (g, t) write n = g of rows 2 t, and
  // 2 * stride = 8 mod 32 spreads them over all banks.
  static constexpr int kReduceStride = Tile::kTileN + 4;
  static constexpr int kReduceBytes = Tile::kWarpsK * Tile::kTileM * kReduceStride * 4;

  // Groups that one slice of one k tile touches.
  W4_HOST_DEVICE static constexpr int group_rows(int group_shift) {
    return group_shift >= 31 || (kSliceK >> group_shift) == 0 ? 1 : kSliceK >> group_shift;
  }
  W4_HOST_DEVICE static constexpr int slot_u_bytes(int group_shift) {
    return kTileN16 * group_rows(group_shift) * layout::kScaleBytes;
  }
  W4_HOST_DEVICE static constexpr int slot_v_bytes(int group_shift) {
    return kTileN16 * group_rows(group_shift) * layout::kZeroBytes;
  }
  W4_HOST_DEVICE static constexpr int smem_bytes(int group_shift, bool symmetric) {
    const int slots = Tile::kStages * Tile::kWarpsK;
    const int ring = Tile::kStages * (kStageABytes + kStageBBytes) +
                     slots * (slot_u_bytes(group_shift) + (symmetric ? 0 : slot_v_bytes(group_shift)));
    return ring > kReduceBytes ? ring : kReduceBytes;
  }
};

}  // namespace w4
