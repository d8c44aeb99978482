// The multistage main loop of one warp: prologue, steady state, drain.
//
//   stage t+kStages-1 is copied while stage t is computed; a stage is one cp.async group, so
//   wait_group<kStages-2> always means "stage t has landed". One barrier per k tile then does two things: it shows this
//   slice's A, U and V to all its warps, and it says that stage t-1, which the copies of this round overwrite, has been
//   read. A slice of one warp (the small-m instances) waits for itself alone.
#pragma once

#include "gmem_iterator.cuh"
#include "mma.cuh"

namespace w4 {

template <class Tile, class Type, bool kSymmetric>
struct MainloopSm80 {
  using S = Shapes<Tile>;
  using Gmem = GmemIteratorSm80<Tile, kSymmetric>;
  using Accumulators = float[S::kN16][S::kM8][4];  // (n16, m8)(n = g, g+8; m = 2t, 2t+1)
  static constexpr int kSteps = 4;  // k steps of 16 in a 64-k piece

  SharedStorage<Tile> shared;
  Gmem gmem;
  FragmentA<Tile> fragment_A;
  int slice, warp_n, lane;
  int group_shift, k_tiles;
  int k;  // first k of the slice in the tile computed
  SmemIter<Tile::kStages> stage;
  GroupIter<Tile::kStages> groups;

  W4_DEVICE MainloopSm80(const GemmArgs& args, const WorkTile& work, char* smem, int warp, int lane_)
      : shared(smem, warp / S::kSliceWarps, args.group_shift),
        gmem(args, work, warp % Tile::kWarpsN, warp / Tile::kWarpsN % Tile::kWarpsM, warp / S::kSliceWarps, lane_),
        fragment_A(shared.A, warp / Tile::kWarpsN % Tile::kWarpsM, lane_),
        slice(warp / S::kSliceWarps),
        warp_n(warp % Tile::kWarpsN),
        lane(lane_),
        group_shift(args.group_shift),
        k_tiles(work.k_tile_end - work.k_tile_begin),
        k(work.k_tile_begin * Tile::kTileK + slice * S::kSliceK) {}

  W4_DEVICE void sync_slice() const {
    if constexpr (S::kSliceWarps == 1) {
      ptx::sync_warp();
    } else if constexpr (Tile::kWarpsK == 1) {
      ptx::sync_cta();
    } else {
      ptx::sync_named<S::kSliceThreads>(1 + slice);
    }
  }

  W4_DEVICE void run(Accumulators& acc) {
    // Prologue: kStages - 1 stages on their way.
#pragma unroll
    for (int s = 0; s < Tile::kStages - 1; ++s) {
#pragma unroll
      for (int part = 0; part < Gmem::kParts; ++part) gmem.Prefetch(shared, part);
      gmem.commit();
    }
    if (S::group_rows(group_shift) == 1) {
      steady<false>(acc);
    } else {
      steady<true>(acc);
    }
    ptx::cp_async_wait<0>();
  }

  // Steady state, and drain: the copies of the last kStages - 1 rounds read nothing. kNarrow: a slice
  // of a k tile crosses into other groups; kept apart, since its branches would cost every layer with wider groups.
  template <bool kNarrow>
  W4_DEVICE void steady(Accumulators& acc) {
#pragma unroll 1
    for (int t = 0; t < k_tiles; ++t) {
      ptx::cp_async_wait<Tile::kStages - 2>();
      sync_slice();
      compute<kNarrow>(acc);
      gmem.commit();
      ++stage;
      k += Tile::kTileK;
    }
  }

  // One k tile, with the copies of a later one issued between the MMAs.
  template <bool kNarrow>
  W4_DEVICE void compute(Accumulators& acc) {
    groups.advance(k, group_shift);
    const char* const smem_B = shared.B + stage.at * S::kSliceBBytes +
                               warp_n * S::kN16 * S::kK64 * layout::kPieceBytes + lane * layout::kLaneBytes;
    const char* const smem_U = shared.U + groups.slot.at * S::slot_u_bytes(group_shift) + lane / 4 * 4;
    const char* const smem_V = shared.V + groups.slot.at * S::slot_v_bytes(group_shift) + lane / 4;
    const int rows = kNarrow ? S::group_rows(group_shift) : 1;
    GroupFragment<Type> group[S::kN16];
    int issued = 0;
#pragma unroll
    for (int j = 0; j < S::kK64; ++j) {  // 64-k pieces of the slice
      uint4 rQ[S::kN16];  // (n16)(k step)
#pragma unroll
      for (int i = 0; i < S::kN16; ++i) {
        rQ[i] = ptx::load_shared<uint4>(smem_B + (i * S::kK64 + j) * layout::kPieceBytes);
      }
      const int offset_A = stage.at * S::kSliceABytes + j * Tile::kTileM * 128;
      uint32_t rA_pair[4];  // kM8 == 1: two k steps
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int k_slice = j * 64 + step * layout::kStepK;
        if (k_slice == 0) {
          load_groups(group, smem_U, smem_V, 0, rows);
        } else if (kNarrow && (k_slice & ((1 << group_shift) - 1)) == 0) {
          load_groups(group, smem_U, smem_V, k_slice >> group_shift, rows);
        }
        uint32_t rA[S::kM8][2];
        if constexpr (S::kM8 == 1) {
          if (step % 2 == 0) fragment_A.load_pair(rA_pair, offset_A, step / 2);
          rA[0][0] = rA_pair[2 * (step % 2)], rA[0][1] = rA_pair[2 * (step % 2) + 1];
        } else {
          fragment_A.load(rA, offset_A, step);
        }
        const int until = (j * kSteps + step + 1) * Gmem::kParts / (S::kK64 * kSteps);
#pragma unroll
        for (; issued < until; ++issued) gmem.Prefetch(shared, issued);
#pragma unroll
        for (int i = 0; i < S::kN16; ++i) {
          uint32_t rB[layout::kRegisters];  // (row half, k half)
          dequant_u4x8<Type>(word(rQ[i], step), group[i], rB);
          mma_step<Tile, Type>(acc, i, rB, rA);
        }
      }
    }
  }

  W4_DEVICE void load_groups(GroupFragment<Type> (&group)[S::kN16], const char* smem_U, const char* smem_V, int row,
                             int rows) const {
#pragma unroll
    for (int i = 0; i < S::kN16; ++i) {
      const int at = (warp_n * S::kN16 + i) * rows + row;
      const uint32_t u = ptx::load_shared<uint32_t>(smem_U + at * layout::kScaleBytes);
      uint32_t v = kSymmetricZeros;
      if constexpr (!kSymmetric) v = ptx::load_shared<uint8_t>(smem_V + at * layout::kZeroBytes);
      group[i].load(u, v);
    }
  }

  W4_DEVICE static uint32_t word(const uint4& q, int step) {
    return step == 0 ? q.x : step == 1 ? q.y : step == 2 ? q.z : q.w;
  }
};

}  // namespace w4
