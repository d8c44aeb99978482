// Accumulators -> D: sums over the warps of k through shared memory, in the order of their slices, so that the same
// input gives the same bits; then bias, one rounding and the store, or float partials where CTAs split k.
#pragma once

#include "dequant.cuh"
#include "scheduler.cuh"
#include "smem_iter.cuh"

namespace w4 {

constexpr int kVector = 8;                                                       // outputs of one thread at a time

// out[i] of kVector consecutive n of one row of D; scalar stores where a vector would be misaligned or leave the row.
template <class Type>
W4_DEVICE void store_row(void* D, int64_t m, int64_t n, int n_total, const void* bias, const float (&out)[kVector]) {
  char* const to = static_cast<char*>(D) + (m * n_total + n) * 2;
  uint32_t word[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    uint32_t pair[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float v = out[i + e];
      if (bias != nullptr && n + i + e < n_total) {
        v += Type::to_float(ptx::load_global<uint16_t>(static_cast<const char*>(bias) + (n + i + e) * 2));
      }
      pair[e] = Type::from_float(v);
    }
    word[i / 2] = pair[0] | pair[1] << 16;
  }
  if (n_total % kVector == 0 && n < n_total) {
    ptx::store_global<uint4>(to, make_uint4(word[0], word[1], word[2], word[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (n + i < n_total) ptx::store_global<uint16_t>(to + i * 2, static_cast<uint16_t>(word[i / 2] >> (16 * (i % 2))));
  }
}

template <class Tile, class Type>
struct Epilogue {
  using S = Shapes<Tile>;

  // smem: the ring, whose copies have all landed and been read.
  W4_DEVICE static void run(const GemmArgs& args, const WorkTile& work, char* smem,
                            const float (&acc)[S::kN16][S::kM8][4], int warp, int lane) {
    const int slice = warp / S::kSliceWarps, warp_n = warp % Tile::kWarpsN,
              warp_m = warp / Tile::kWarpsN % Tile::kWarpsM;
    float* const tile = reinterpret_cast<float*>(smem);                          // (kWarpsK, kTileM, kTileN + 4)
    ptx::sync_cta();
#pragma unroll
    for (int i = 0; i < S::kN16; ++i) {
#pragma unroll
      for (int j = 0; j < S::kM8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int m = slice * Tile::kTileM + warp_m * S::kWarpM + j * 8 + lane % 4 * 2 + c % 2;
          const int n = warp_n * S::kWarpN + i * 16 + c / 2 * 8 + lane / 4;
          ptx::store_shared<float>(tile + m * S::kReduceStride + n, acc[i][j][c]);
        }
      }
    }
    ptx::sync_cta();
    const int n_padded = args.n16 * layout::kGrainN;
    for (int at = warp * 32 + lane; at < Tile::kTileM * Tile::kTileN / kVector; at += S::kThreads) {
      const int m = at / (Tile::kTileN / kVector), n = at % (Tile::kTileN / kVector) * kVector;
      float out[kVector];
#pragma unroll
      for (int s = 0; s < Tile::kWarpsK; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 v = ptx::load_shared<float4>(tile + (s * Tile::kTileM + m) * S::kReduceStride + n + half * 4);
          float* const o = out + half * 4;
          o[0] = s == 0 ? v.x : o[0] + v.x;
          o[1] = s == 0 ? v.y : o[1] + v.y;
          o[2] = s == 0 ? v.z : o[2] + v.z;
          o[3] = s == 0 ? v.w : o[3] + v.w;
        }
      }
      const int64_t row = work.m + m, column = work.n16 * layout::kGrainN + n;
      if (row >= args.m || column >= n_padded) continue;
      if (args.partials != nullptr) {
        float* const to = args.partials + (work.split * static_cast<int64_t>(args.m) + row) * n_padded + column;
        ptx::store_global<float4>(to, make_float4(out[0], out[1], out[2], out[3]));
        ptx::store_global<float4>(to + 4, make_float4(out[4], out[5], out[6], out[7]));
      } else {
        store_row<Type>(args.D, row, column, args.n, args.bias, out);
      }
    }
  }
};

}  // namespace w4
