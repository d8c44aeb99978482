// u4, U, V -> 16-bit fragments in registers:
//
//     w = (q - z) * s,   rounded once
//
// OR-ing a nibble into the mantissa of fp16 1024.0 (or bf16 128.0) makes magic + q without a convert, exactly.
// Taking magic + z from it leaves a small integer, exact too, so only the product rounds, and a one-hot activation
// must give CanonicalW4.dequant() bit for bit. Rejected: one fma with -z * s folded into the addend; it saves the
// subtraction but rounds twice, and 34% of (q, z, s) then differ (simulated, fp16).
#pragma once

#include "layout.cuh"
#include "ptx.cuh"

namespace w4 {

// Scale and zero point of one row in one group, both halves of a word alike.
struct RowGroup {
  uint32_t scale;                                                                // (s, s)
  uint32_t zero;                                                                 // what takes magic + z off
  uint32_t zero_high;  // the same for nibbles read in place
};

struct F16 {
  static constexpr uint32_t kMagic = 0x64006400;  // (1024, 1024)

  // z: the zero point in both halves.
  W4_DEVICE static RowGroup row_group(uint32_t scale, uint32_t z) {
    return {scale, kMagic | z, 0xd400d400 | (z << 4)};  // 1024 + z, -(64 + z)
  }

  // q - z for the nibbles `pair` and `pair + 4` of q8. Odd pairs stay where they are, four bits up: they read as
  // 1024 + 16 q, and the fma that takes 64 + z from a sixteenth of it is exact and saves the shift.
  template <int pair>
  W4_DEVICE static uint32_t difference(uint32_t q8, const RowGroup& g) {
    const uint32_t bits = pair < 2 ? q8 : q8 >> 8;
    if constexpr (pair % 2 == 0) {
      return ptx::sub_f16x2(ptx::and_or(bits, 0x000f000f, kMagic), g.zero);
    } else {
      constexpr uint32_t kSixteenth = 0x2c002c00;
      return ptx::fma_f16x2(ptx::and_or(bits, 0x00f000f0, kMagic), kSixteenth, g.zero_high);
    }
  }
  W4_DEVICE static uint32_t multiply(uint32_t a, uint32_t b) { return ptx::mul_f16x2(a, b); }
  W4_DEVICE static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
  W4_DEVICE static uint16_t from_float(float v) { return ptx::float_to_f16(v); }
  W4_DEVICE static float to_float(uint16_t v) { return ptx::f16_to_float(v); }
};

struct BF16 {
  static constexpr uint32_t kMagic = 0x43004300;  // (128, 128)

  W4_DEVICE static RowGroup row_group(uint32_t scale, uint32_t z) {
    return {scale, 0xc300c300 | z, 0};  // -(128 + z)
  }

  // bf16 has no mantissa bit to spare for nibbles read in place: each pair is shifted down.
  template <int pair>
  W4_DEVICE static uint32_t difference(uint32_t q8, const RowGroup& g) {
    constexpr uint32_t kOne = 0x3f803f80;
    return ptx::fma_bf16x2(ptx::and_or(q8 >> (4 * pair), 0x000f000f, kMagic), kOne, g.zero);
  }
  W4_DEVICE static uint32_t multiply(uint32_t a, uint32_t b) {
    constexpr uint32_t kMinusZero = 0x80008000;  // a * b + -0 is a * b, sign of 0 included
    return ptx::fma_bf16x2(a, b, kMinusZero);
  }
  W4_DEVICE static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  }
  W4_DEVICE static uint16_t from_float(float v) { return ptx::float_to_bf16(v); }
  W4_DEVICE static float to_float(uint16_t v) { return ptx::bf16_to_float(v); }
};

// Scales and zeros of rows g and g + 8 (half 0 and 1) of one 16-row block in one group.
template <class Type>
struct GroupFragment {
  RowGroup half[2];

  // u: U's word of lane group g. v: V's byte, z of row g low and of g + 8 high.
  W4_DEVICE void load(uint32_t u, uint32_t v) {
    half[0] = Type::row_group(ptx::broadcast_low(u), (v & 15) * 0x00010001);
    half[1] = Type::row_group(ptx::broadcast_high(u), (v >> 4) * 0x00010001);
  }
};

constexpr uint32_t kSymmetricZeros = 0x88;

// q8 (one word of B) -> the four registers of the 16-row operand: register j is row g + 8 (j % 2).
template <class Type>
W4_DEVICE void dequant_u4x8(uint32_t q8, const GroupFragment<Type>& g, uint32_t (&rB)[layout::kRegisters]) {
  rB[0] = Type::multiply(Type::template difference<0>(q8, g.half[0]), g.half[0].scale);
  rB[1] = Type::multiply(Type::template difference<1>(q8, g.half[1]), g.half[1].scale);
  rB[2] = Type::multiply(Type::template difference<2>(q8, g.half[0]), g.half[0].scale);
  rB[3] = Type::multiply(Type::template difference<3>(q8, g.half[1]), g.half[1].scale);
}

}  // namespace w4
