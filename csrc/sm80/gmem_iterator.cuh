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

  W4_DEVICE GmemIteratorB(const GemmArgs& args, const WorkTile& work, int warp_n, int warp_m, int slice, int lane) {
    const int first = work.n16 + warp_n * S::kN16 + warp_m;
    const int k64 = work.k_tile_begin * (Tile::kTileK / 64) + slice * S::kK64;
    row_bytes = layout::piece_offset(1, 0, args.k64);
    gmem = static_cast<const char*>(args.B) + layout::piece_offset(first, k64, args.k64) + lane * layout::kLaneBytes;
    smem_offset = (warp_n * S::kN16 + warp_m) * S::kK64 * layout::kPieceBytes + lane * layout::kLaneBytes;
    n16_left = args.n16 - first;
    k64_left = min(args.k64, work.k_tile_end * (Tile::kTileK / 64)) - k64;
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
  static constexpr int kChunks = Tile::kTileM * 8;                               // of one 64-k block

  // A part is kRows rows of one 64-k block, so a thread's chunk is the same in all parts, and its swizzle too, but for
  // the slices of one warp: their parts have 4 rows, and every other one has bit 2 of r % 8 set.
  static constexpr int kRows = S::kSliceThreads / 8;
  static constexpr int kRowParts = (Tile::kTileM + kRows - 1) / kRows;
  static_assert(kRows % 4 == 0, "a slice is at least one warp");
  static_assert(kChunks % S::kSliceThreads == 0 || kRowParts == 1, "rows of a block are dealt evenly");
  static constexpr int kParts = S::kK64 * kRowParts;

  const char* gmem;  // this thread's row and chunk of part 0
  int64_t part_bytes;  // from kRows rows to the next
  int smem_offset;
  int rows_left, bytes_left;  // inside, from this thread's on
  bool has_row;  // fewer rows than threads: some idle

  W4_DEVICE GmemIteratorA(const GemmArgs& args, const WorkTile& work, int slice, int slice_thread) {
    const int row = slice_thread / 8, chunk = slice_thread % 8;
    const int k = work.k_tile_begin * Tile::kTileK + slice * S::kSliceK + chunk * 8;
    gmem = static_cast<const char*>(args.A) + ((work.m + row) * args.lda + k) * 2;
    part_bytes = args.lda * (2 * kRows);
    smem_offset = row * 128 + (chunk ^ (row % 8)) * 16;
    rows_left = args.m - work.m - row;
    bytes_left = (min(args.k, work.k_tile_end * Tile::kTileK) - k) * 2;
    has_row = row < Tile::kTileM;
  }

  W4_DEVICE void Prefetch(char* stage, int part) const {
    const int i = part % kRowParts, j = part / kRowParts;
    const int inside = i * kRows < rows_left ? max(0, min(16, bytes_left - j * 128)) : 0;
    const int flip = kRows % 8 == 4 && i % 2 == 1 ? 4 * 16 : 0;
    ptx::cp_async_16(stage + (smem_offset ^ flip) + (j * Tile::kTileM + i * kRows) * 128,
                     gmem + i * part_bytes + j * 128, inside, kRows <= Tile::kTileM || has_row);
  }
  W4_DEVICE void operator++() {
    gmem += Tile::kTileK * 2;
    bytes_left -= Tile::kTileK * 2;
  }
};

// U and V: the groups that the slice touches, for all n of the tile. kBytes is one group of 16 n, kCopy one copy.
template <class Tile, int kBytes, int kCopy>
struct GmemIteratorGroups {
  using S = Shapes<Tile>;
  static constexpr int kCopies = kBytes / kCopy;
  static constexpr int kRowCopies = S::kTileN16 * kCopies;  // of one group
  static constexpr int kParts = (kRowCopies + S::kSliceThreads - 1) / S::kSliceThreads;

  const char* gmem;  // this thread's bytes of group 0
  int64_t part_bytes;  // from one part to the next
  int smem_offset, rows;
  int groups, n16_left;
  int thread;

  W4_DEVICE GmemIteratorGroups(const GemmArgs& args, const void* operand, int n16, int slice_thread) {
    const int i = slice_thread / kCopies, piece = slice_thread % kCopies;
    gmem = static_cast<const char*>(operand) + static_cast<int64_t>(n16 + i) * args.groups * kBytes + piece * kCopy;
    part_bytes = static_cast<int64_t>(args.groups) * (S::kSliceThreads / kCopies) * kBytes;
    rows = S::group_rows(args.group_shift);
    smem_offset = i * rows * kBytes + piece * kCopy;
    groups = args.groups;
    n16_left = args.n16 - n16 - i;
    thread = slice_thread;
  }

  // Copies groups [group, group + rows) into the slot (n16, rows).
  W4_DEVICE void Prefetch(char* slot, int group) const {
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const bool active = part * S::kSliceThreads + thread < kRowCopies;
        const bool inside = part * (S::kSliceThreads / kCopies) < n16_left && group + row < groups;
        const char* const from = gmem + part * part_bytes + static_cast<int64_t>(group + row) * kBytes;
        char* const to = slot + smem_offset + (part * (S::kSliceThreads / kCopies) * rows + row) * kBytes;
        if constexpr (kCopy == 16) {
          ptx::cp_async_16(to, from, inside ? 16 : 0, active);
        } else {
          ptx::cp_async_8(to, from, inside ? 8 : 0, active);
        }
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
  int k;  // first k of the slice
  int group_shift;

  W4_DEVICE GmemIteratorSm80(const GemmArgs& args, const WorkTile& work, int warp_n, int warp_m, int slice, int lane)
      : gmem_A(args, work, slice, thread_of(warp_n, warp_m, lane)),
        gmem_B(args, work, warp_n, warp_m, slice, lane),
        gmem_U(args, args.U, work.n16, thread_of(warp_n, warp_m, lane)),
        gmem_V(args, args.V, work.n16, thread_of(warp_n, warp_m, lane)),
        k(work.k_tile_begin * Tile::kTileK + slice * S::kSliceK),
        group_shift(args.group_shift) {}

  W4_DEVICE static int thread_of(int warp_n, int warp_m, int lane) {
    return (warp_m * Tile::kWarpsN + warp_n) * 32 + lane;
  }

  // Issues part `part` of kParts: weights first, they come from the furthest. Past the last k tile the copies of A and
  // B read nothing and write zeros to stages that nobody reads, which costs less than a branch around each.
  W4_DEVICE void Prefetch(const SharedStorage<Tile>& shared, int part) {
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
  }
};

}  // namespace w4
