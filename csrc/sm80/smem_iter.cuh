// The shared-memory ring: where each operand of a stage lies, which stage is read and written, and which slot of U and
// V the current k belongs to.
//
// The warps of one k slice (same warp_k) form a unit: they share A, U and V of their own part of the k tile and only
// ever wait for each other. A slice of one warp needs no barrier but its own.
#pragma once

#include "ptx.cuh"
#include "shapes.cuh"

namespace w4 {

// Bases of this slice's rings: A and B by stage, U and V by slot.
template <class Tile>
struct SharedStorage {
  using S = Shapes<Tile>;
  char* A;                                                                       // (kStages)(k64, m, 64) swizzled
  char* B;                                                                       // (kStages)(n16, k64, 32, 16 bytes)
  char* U;                                                                       // (kStages)(n16, rows, 32 bytes)
  char* V;                                                                       // (kStages)(n16, rows, 8 bytes)

  W4_DEVICE SharedStorage(char* base, int slice, int group_shift) {
    const int u = S::slot_u_bytes(group_shift), v = S::slot_v_bytes(group_shift);
    char* const rings_b = base + Tile::kStages * S::kStageABytes;
    char* const rings_u = rings_b + Tile::kStages * S::kStageBBytes;
    A = base + slice * Tile::kStages * S::kSliceABytes;
    B = rings_b + slice * Tile::kStages * S::kSliceBBytes;
    U = rings_u + slice * Tile::kStages * u;
    V = rings_u + Tile::kWarpsK * Tile::kStages * u + slice * Tile::kStages * v;
  }
};

// A position in a ring of kStages.
template <int kStages>
struct SmemIter {
  int at = 0;
  W4_DEVICE void operator++() { at = at + 1 == kStages ? 0 : at + 1; }
};

// Walks the groups of one slice: `slot` moves on exactly when the slice's k enters another group, so a group wider than
// the k tile stays where it is. A slot is written again only kStages groups, so at least kStages k tiles, later.
template <int kStages>
struct GroupIter {
  SmemIter<kStages> slot;
  int group = -1;                                                                // first group of the current k tile

  // Moves to the k tile whose slice starts at k; true where that enters another group.
  W4_DEVICE bool advance(int k, int group_shift) {
    const int next = k >> group_shift;
    if (next == group) return false;
    if (group >= 0) ++slot;
    group = next;
    return true;
  }
};

}  // namespace w4
