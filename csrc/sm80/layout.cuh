// Where every packed nibble, scale and zero lives. The packing itself is w4linear/packing.py; docs/layouts.md draws it.
//
//   B (n16, k64, 32, 4) int32   one 16-byte piece per lane holds its fragments of four m16k16 MMA operands, so a warp
//                               reads 512 contiguous bytes for 16 rows and 64 k, with no ldmatrix and no swizzle
//   U (n16, groups, 16)         16 bit, rows g and g + 8 side by side: lane (g, t) reads both as one word
//   V (n16, groups, 8)          uint8, row g in the low nibble, g + 8 in the high one
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define W4_HOST_DEVICE __host__ __device__
#else
#define W4_HOST_DEVICE
#endif

namespace w4::layout {

constexpr int kGrainN = 16, kGrainK = 64;
constexpr int kStepK = 16;  // k of one MMA
constexpr int kPieceBytes = 512;  // B: 16 n x 64 k
constexpr int kLaneBytes = 16;  // of a piece
constexpr int kScaleBytes = 32;  // U: one group of 16 n
constexpr int kZeroBytes = 8;  // V: one group of 16 n

// Nibble j and j + 4 of a word are elements 0 and 1 of register j of the 16-row operand: row g + 8 (j % 2),
// k = 2 t + 8 (j / 2) + {0, 1}.
constexpr int kRegisters = 4;

W4_HOST_DEVICE constexpr int64_t piece_offset(int64_t n16, int64_t k64, int64_t k64_count) {
  return (n16 * k64_count + k64) * kPieceBytes;
}

}  // namespace w4::layout
