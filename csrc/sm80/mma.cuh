// Shared memory -> MMA operands, and the MMAs of one k step. The weights are the 16-row operand (D^T = W A^T), so m <=
// 8 wastes nothing and the packed B needs no ldmatrix.
#pragma once

#include "dequant.cuh"
#include "smem_iter.cuh"

namespace w4 {

// A's operand registers for one 64-k block of a warp's m: [k step][m8][k half].
template <class Tile>
struct FragmentA {
  using S = Shapes<Tile>;
  // Which row and chunk this lane addresses for ldmatrix: rows of 8 m (or 8 m of another k half) by lane / 8.
  const char* row;  // of the slice's stage 0, k64 block 0
  int swizzle, half;

  W4_DEVICE FragmentA(const char* smem_A, int warp_m, int lane) {
    // m8 pairs: matrices are (m8, k half) = (0,0) (0,1) (1,0) (1,1). A single m8 takes two k steps at once instead:
    // matrices are the four chunks of 32 k.
    const int m = warp_m * S::kWarpM + (S::kM8 == 1 ? lane % 8 : lane / 16 * 8 + lane % 8);
    row = smem_A + m * 128;
    swizzle = m % 8;
    half = S::kM8 == 1 ? lane / 8 : lane / 8 % 2;
  }

  // Registers of k step `step` of the 64-k block at `offset` bytes from stage 0; rA[m8][k half].
  W4_DEVICE void load(uint32_t (&rA)[S::kM8][2], int offset, int step) const {
    static_assert(S::kM8 > 1, "pairs of m8");
#pragma unroll
    for (int j = 0; j < S::kM8 / 2; ++j) {
      uint32_t r[4];
      ptx::ldmatrix_x4(r, row + offset + j * 16 * 128 + ((2 * step + half) ^ swizzle) * 16);
      rA[2 * j][0] = r[0], rA[2 * j][1] = r[1];
      rA[2 * j + 1][0] = r[2], rA[2 * j + 1][1] = r[3];
    }
  }

  // A single m8: k steps 2 pair and 2 pair + 1 at once; r[2 (step % 2) + k half].
  W4_DEVICE void load_pair(uint32_t (&r)[4], int offset, int pair) const {
    ptx::ldmatrix_x4(r, row + offset + ((4 * pair + half) ^ swizzle) * 16);
  }
};

// acc[n16][m8] += W (16,16) A (8,16)^T for all blocks of the warp in one k step.
template <class Tile, class Type>
W4_DEVICE void mma_step(float (&acc)[Shapes<Tile>::kN16][Shapes<Tile>::kM8][4], int i,
                        const uint32_t (&rB)[layout::kRegisters], const uint32_t (&rA)[Shapes<Tile>::kM8][2]) {
#pragma unroll
  for (int j = 0; j < Shapes<Tile>::kM8; ++j) Type::mma(acc[i][j], rB, rA[j][0], rA[j][1]);
}

}  // namespace w4
