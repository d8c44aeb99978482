// The host side of a GEMM: GemmDesc (what is asked) -> LaunchPlan (what was chosen) -> launch().
//
//     D (m,n) = A (m,k) W (n,k)^T + bias,   W = (q - z) s from the packed B, U, V (sm80/layout.cuh)
//
// No torch here. Errors are std::invalid_argument or std::runtime_error with values in the message.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace w4 {

// Element types of A, U, bias and D; accumulation is float in all of them.
struct F16;
struct BF16;

// One kernel instance: what one CTA computes per k tile and how its warps share it. One line of instances.def.
template <int TileN, int TileM, int TileK, int WarpsN, int WarpsM, int WarpsK, int Stages>
struct TileConfig {
  static constexpr int kTileN = TileN, kTileM = TileM, kTileK = TileK;
  static constexpr int kWarpsN = WarpsN, kWarpsM = WarpsM, kWarpsK = WarpsK;
  static constexpr int kStages = Stages;
};

// What is asked, as far as the choice of a plan depends on it.
struct GemmDesc {
  int64_t m, n, k;   // tokens, out features, packed in features (a multiple of 64)
  int64_t groups;    // (s, z) pairs along k
  int group_shift;   // log2 of the group; kOneGroup where one group spans all k
  bool bf16;
  bool symmetric;    // no V
  int sm_count;      // multiprocessors of the device
  int smem_per_sm;   // bytes of shared memory a multiprocessor has
  int smem_per_cta;  // bytes a CTA may use
};

constexpr int kOneGroup = 31;

// What was chosen.
struct LaunchPlan {
  int instance;  // index into instances()
  int splits;    // parts of k that different CTAs take; above 1 needs a (splits, m, padded n) float workspace
};

struct GemmArgs {
  const void* A;        // (m, lda) 16 bit; 16-byte aligned base and rows
  const void* B;        // (n16, k64, 32, 4) int32
  const void* U;        // (n16, groups, 16) 16 bit
  const void* V;        // (n16, groups, 8) uint8, or null: z = 8
  const void* bias;     // (n) 16 bit, or null
  void* D;              // (m, n) 16 bit
  float* partials;      // (splits, m, n16 * 16), or null where splits == 1
  int64_t lda;
  int m, n, k;          // k: columns of A that exist; columns up to k64 * 64 read as 0
  int n16, k64, groups;
  int group_shift;
  int splits;
};

// Static facts of an instance.
struct InstanceInfo {
  const char* name;
  int tile_n, tile_m, tile_k, warps_n, warps_m, warps_k, stages;

  int threads() const { return 32 * warps_n * warps_m * warps_k; }
};

const std::vector<InstanceInfo>& instances();

// Why the instance cannot run desc with that many splits, or "".
std::string unsupported(const GemmDesc& desc, const LaunchPlan& plan);

// The plan for desc: the feasible candidate with the least modelled time. Throws where none is feasible.
LaunchPlan choose_plan(const GemmDesc& desc);

// The modelled time of each feasible candidate, best first, one a line.
std::string explain(const GemmDesc& desc);

// Elements of the float workspace that the plan needs.
int64_t workspace_elements(const GemmDesc& desc, const LaunchPlan& plan);

// Enqueues the GEMM on the stream of the current device; nothing is allocated and nothing waits.
void launch(const GemmDesc& desc, const LaunchPlan& plan, const GemmArgs& args, cudaStream_t stream);

// Copies x (m, k) with row stride ldx into out (m, packed_k), column j from perm[j] (j where perm is null), 0 where
// there is none: what the kernels read where x is act-ordered or not 16-byte aligned.
void launch_gather(const void* x, int64_t ldx, const int32_t* perm, void* out, int64_t m, int64_t k, int64_t packed_k,
                   cudaStream_t stream);

// D (m, n) = partials summed over splits in order, plus bias.
void launch_reduce(bool bf16, const GemmArgs& args, cudaStream_t stream);

// One instance's kernel; defined in the generated instance files.
template <class Tile, class Type>
cudaError_t launch_instance(const GemmArgs& args, cudaStream_t stream);

}  // namespace w4
