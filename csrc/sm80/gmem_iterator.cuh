// cp.async of one slice's A, B, U and V into one stage. What lies outside the matrices is written as 0 by the copy
// itself (which then reads nothing), so no load is branched around and no stage is cleared first.
//
// Each iterator stands at one k tile; Prefetch issues one part of the copies, ++ moves to the next k tile.
#pragma once

#include "scheduler.cuh"
#include "smem_iter.cuh"

namespace w4 {

// B: warps of one slice copy the pieces they compute; each lane copies the 16 bytes that it will read.
template <class Tile>
struct GmemIteratorB {
  using S = Shapes<Tile>;
  // Warps along m read the same pieces and share their copying.
  static_assert(Tile::kWarpsM == 1 || (S::kK64 == 1 && S::kN16 % Tile::kWarpsM == 0), "pieces split over warps of m");
  static constexpr int kParts = S::kN16 * S::kK64 / Tile::kWarpsM;               // pieces of 512 bytes

  const char* gmem;                                                              // this lane's bytes of part 0
  int64_t row_bytes;                                                             // from one n16 to the next
  int smem_offset;
  int n16_left, k64_left;                                                        // blocks inside, from part 0 on

  W4_DEVICE GmemIteratorB(const GemmArgs& args, int n16, int k_tile, int warp_n, int warp_m, int slice, int lane) {
    const int first = n16 + warp_n * S::kN16 + warp_m;
    const int k64 = k_tile * (Tile::kTileK / 64) + slice * S::kK64;
    row_bytes = layout::piece_offset(1, 0, args.k64);
    gmem = static_cast<const char*>(args.B) + layout::piece_offset(first, k64, args.k64) + lane * layout::kLaneBytes;
    smem_offset = (warp_n * S::kN16 + warp_m) * S::kK64 * layout::kPieceBytes + lane * layout::kLaneBytes;
    n16_left = args.n16 - first;
    k64_left = args.k64 - k64;
  }

  W4_DEVICE void Prefetch(char* stage, int part) const {
    const int i = part / S::kK64 * Tile::kWarpsM, j = part % S::kK64;            // (n16, k64) of the slice
    const bool inside = i < n16_left && j < k64_left;
    ptx::cp_async_16(stage + smem_offset + (i * S::kK64 + j) * layout::kPieceBytes,
                     gmem + i * row_bytes + j * layout::kPieceBytes, inside ? layout::kLaneBytes : 0);
  }
  W4_DEVICE void operator++() {
    gmem += Tile::kTileK / 64 * layout::kPieceBytes;
    k64_left -= Tile::kTileK / 64;
  }
};

// A: the slice's threads copy rows of 64 k as eight 16-byte chunks; chunk c of row r lies at c ^ (r % 8), so that
// ldmatrix's eight rows of one chunk cover all banks.
template <class Tile>
struct GmemIteratorA {
  using S = Shapes<Tile>;
  static constexpr int kChunks = S::kK64 * Tile::kTileM * 8;
  static constexpr int kParts = (kChunks + S::kSliceThreads - 1) / S::kSliceThreads;

  const char* gmem;                                                              // row m, first k of the slice
  int64_t row_bytes;
  int thread;
  int m_left, k_left;                                                            // rows and columns inside

  W4_DEVICE GmemIteratorA(const GemmArgs& args, int m, int k_tile, int slice, int slice_thread) {
    const int k = k_tile * Tile::kTileK + slice * S::kSliceK;
    row_bytes = args.lda * 2;
    gmem = static_cast<const char*>(args.A) + m * row_bytes + static_cast<int64_t>(k) * 2;
    thread = slice_thread;
    m_left = args.m - m;
    k_left = args.k - k;
  }

  W4_DEVICE void Prefetch(char* stage, int part) const {
    const int c = part * S::kSliceThreads + thread;
    if (kChunks % S::kSliceThreads != 0 && c >= kChunks) return;
    const int row = c / 8 % Tile::kTileM, chunk = c % 8, j = c / 8 / Tile::kTileM;
    const int inside = row < m_left ? max(0, min(16, 2 * (k_left - j * 64 - chunk * 8))) : 0;
    ptx::cp_async_16(stage + (j * Tile::kTileM + row) * 128 + (chunk ^ (row % 8)) * 16,
                     gmem + row * row_bytes + j * 128 + chunk * 16, inside);
  }
  W4_DEVICE void operator++() {
    gmem += Tile::kTileK * 2;
    k_left -= Tile::kTileK;
  }
};

// U and V: the groups that the slice touches, for all n of the tile. kBytes is one group of 16 n, kCopy one copy.
template <class Tile, int kBytes, int kCopy>
struct GmemIteratorGroups {
  using S = Shapes<Tile>;
  static constexpr int kCopies = kBytes / kCopy;

  const char* gmem;                                                              // n16, group 0
  int groups, n16_left, rows, copies;
  int thread;

  W4_DEVICE GmemIteratorGroups(const GemmArgs& args, const void* operand, int n16, int slice_thread) {
    groups = args.groups;
    gmem = static_cast<const char*>(operand) + static_cast<int64_t>(n16) * args.groups * kBytes;
    n16_left = args.n16 - n16;
    rows = S::group_rows(args.group_shift);
    copies = S::kTileN16 * rows * kCopies;
    thread = slice_thread;
  }

  // Copies groups [group, group + rows) into the slot.
  W4_DEVICE void Prefetch(char* slot, int group) const {
    for (int c = thread; c < copies; c += S::kSliceThreads) {
      const int piece = c % kCopies, at = c / kCopies;
      const int i = at / rows, row = at % rows;
      const bool inside = i < n16_left && group + row < groups;
      const char* from = gmem + (static_cast<int64_t>(i) * groups + group + row) * kBytes + piece * kCopy;
      char* to = slot + at * kBytes + piece * kCopy;
      if constexpr (kCopy == 16) {
        ptx::cp_async_16(to, from, inside ? 16 : 0);
      } else {
        ptx::cp_async_8(to, from, inside ? 8 : 0);
      }
    }
  }
};

template <class Tile>
using GmemIteratorU = GmemIteratorGroups<Tile, layout::kScaleBytes, 16>;
template <class Tile>
using GmemIteratorV = GmemIteratorGroups<Tile, layout::kZeroBytes, 8>;

// The four operands of one slice together: what is still to be issued of the stage in the making.
template <class Tile, bool kSymmetric>
struct GmemIteratorSm80 {
  using S = Shapes<Tile>;
  static constexpr int kPartsA = GmemIteratorA<Tile>::kParts;
  static constexpr int kParts = GmemIteratorB<Tile>::kParts + kPartsA + 1;

  GmemIteratorA<Tile> gmem_A;
  GmemIteratorB<Tile> gmem_B;
  GmemIteratorU<Tile> gmem_U;
  GmemIteratorV<Tile> gmem_V;
  GroupIter<Tile::kStages> groups;
  SmemIter<Tile::kStages> stage;
  int k, k_tiles_left;                                                           // first k of the slice; tiles to issue
  int group_shift;

  W4_DEVICE GmemIteratorSm80(const GemmArgs& args, const WorkTile& work, int warp_n, int warp_m, int slice, int lane)
      : gmem_A(args, work.m, work.k_tile_begin, slice, thread_of(warp_n, warp_m, lane)),
        gmem_B(args, work.n16, work.k_tile_begin, warp_n, warp_m, slice, lane),
        gmem_U(args, args.U, work.n16, thread_of(warp_n, warp_m, lane)),
        gmem_V(args, args.V, work.n16, thread_of(warp_n, warp_m, lane)),
        k(work.k_tile_begin * Tile::kTileK + slice * S::kSliceK),
        k_tiles_left(work.k_tile_end - work.k_tile_begin),
        group_shift(args.group_shift) {}

  W4_DEVICE static int thread_of(int warp_n, int warp_m, int lane) {
    return (warp_m * Tile::kWarpsN + warp_n) * 32 + lane;
  }

  // Issues part `part` of kParts: weights first, they come from the furthest.
  W4_DEVICE void Prefetch(const SharedStorage<Tile>& shared, int part) {
    if (k_tiles_left <= 0) return;
    if (part < GmemIteratorB<Tile>::kParts) {
      gmem_B.Prefetch(shared.B + stage.at * S::kSliceBBytes, part);
    } else if (part < GmemIteratorB<Tile>::kParts + kPartsA) {
      gmem_A.Prefetch(shared.A + stage.at * S::kSliceABytes, part - GmemIteratorB<Tile>::kParts);
    } else if (groups.advance(k, group_shift)) {
      gmem_U.Prefetch(shared.U + groups.slot.at * S::slot_u_bytes(group_shift), groups.group);
      if constexpr (!kSymmetric) {
        gmem_V.Prefetch(shared.V + groups.slot.at * S::slot_v_bytes(group_shift), groups.group);
      }
    }
  }

  // Closes the stage (one group per k tile, also when it is empty) and moves to the next.
  W4_DEVICE void commit() {
    ptx::cp_async_commit();
    ++stage;
    ++gmem_A;
    ++gmem_B;
    k += Tile::kTileK;
    --k_tiles_left;
  }
};

}  // namespace w4
