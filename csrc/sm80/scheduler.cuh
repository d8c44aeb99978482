// CTA -> (tile_n, tile_m, k tiles).
#pragma once

#include "../gemm.h"
#include "layout.cuh"
#include "ptx.cuh"

namespace w4 {

// CTAs that share a weight tile run side by side: kRasterM tiles of m, then the next tile of n, so that at large m one
// wave reads few tiles of both operands and L2 serves the rest.
constexpr int kRasterM = 16;

struct WorkTile {
  int n16;                                                                       // first 16-row block of weights
  int m;                                                                         // first row of A
  int k_tile_begin, k_tile_end;                                                  // of this split
  int split;
};

template <class Tile>
struct Scheduler {
  W4_DEVICE static WorkTile work(const GemmArgs& args) {
    const int tiles_m = (args.m + Tile::kTileM - 1) / Tile::kTileM;
    const int tiles_n = (args.n16 * layout::kGrainN + Tile::kTileN - 1) / Tile::kTileN;
    const int band_tiles = kRasterM * tiles_n;
    const int band = ptx::cta_index_x() / band_tiles;
    const int in_band = ptx::cta_index_x() % band_tiles;
    const int band_m = min(kRasterM, tiles_m - band * kRasterM);                 // the last band may be narrower
    const int tile_n = in_band / band_m, tile_m = band * kRasterM + in_band % band_m;
    const int k_tiles = (args.k64 * layout::kGrainK + Tile::kTileK - 1) / Tile::kTileK;
    const int split = ptx::cta_index_y();
    return {tile_n * (Tile::kTileN / layout::kGrainN), tile_m * Tile::kTileM,
            static_cast<int>(static_cast<int64_t>(k_tiles) * split / args.splits),
            static_cast<int>(static_cast<int64_t>(k_tiles) * (split + 1) / args.splits), split};
  }
};

}  // namespace w4
