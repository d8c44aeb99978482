// GemmDesc -> LaunchPlan: every (instance, splits) pair that can run the request is scored by a cost model, and the
// least modelled time wins. explain() prints the scores.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "gemm.h"
#include "sm80/shapes.cuh"

namespace w4 {
namespace {

struct Instance {
  InstanceInfo info;
  int (*smem_bytes)(int group_shift, bool symmetric);
  cudaError_t (*launch[2])(const GemmArgs&, cudaStream_t);  // F16, BF16
};

template <int TileN, int TileM, int TileK, int WarpsN, int WarpsM, int WarpsK, int Stages>
Instance make_instance(const char* name) {
  using Tile = TileConfig<TileN, TileM, TileK, WarpsN, WarpsM, WarpsK, Stages>;
  return {{name, TileN, TileM, TileK, WarpsN, WarpsM, WarpsK, Stages},
          &Shapes<Tile>::smem_bytes,
          {&launch_instance<Tile, F16>, &launch_instance<Tile, BF16>}};
}

#define W4_TILE_M 0
#define W4_NAME(n, m, k, wn, wm, wk, stages) "n" #n "_m" #m "_k" #k "_w" #wn "x" #wm "x" #wk "_s" #stages
#define W4_INSTANCE(...) make_instance<__VA_ARGS__>(W4_NAME(__VA_ARGS__)),
const Instance kInstances[] = {
#include "sm80/instances.def"
};
constexpr int kInstanceCount = sizeof(kInstances) / sizeof(kInstances[0]);

constexpr int kMaxSplits = 16;
constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;

// What the model knows of a card. Fitted to 72 shapes times all candidates on one H200 (benchmarks/LOG.md): the chosen
// plan is within 8% of the best one in 93% of them, 1.2% off on the geometric mean. Rates are per multiprocessor and
// ns.
constexpr double kDramBytes = 26.8;             // drawn by these kernels together, not the card's peak
constexpr double kL2Bytes = 35.1;               // activations come from here
constexpr double kMmaFlops = 3220;              // mma.sync
constexpr double kIssue = 13.7;                  // warp instructions, once there are
constexpr double kIssueWarps = 17;              // that many warps
constexpr double kLaunchNs = 4140;              // start, first bytes, epilogue
constexpr double kWaveNs = 1770;                // the same for each further wave
constexpr double kLatencyNs = 1920;             // of a k tile that nothing hides; kStages share it
constexpr double kReduceNs = 2120;              // the second kernel
constexpr double kReduceBytes = 2190;           // of partials, written and read, per ns of the whole card
constexpr double kDequantInstructions = 12.3;     // per 256 weights: lop, sub, mul and their share of loads
constexpr double kMmaInstructions = 2.7;        // per mma.sync, its share of ldmatrix included
constexpr double kOverlap = 4.2;  // the terms of a k tile add up as this norm: mostly the largest counts
constexpr double kMmaOperations = 2 * 16 * 8 * 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

double modelled_ns(const GemmDesc& d, const LaunchPlan& plan) {
  const InstanceInfo& t = kInstances[plan.instance].info;
  const int64_t k_tiles = ceil_div(d.k, t.tile_k);
  const int64_t ctas = ceil_div(d.n, t.tile_n) * ceil_div(d.m, t.tile_m) * plan.splits;
  const int smem = kInstances[plan.instance].smem_bytes(d.group_shift, d.symmetric) + 1024;
  // Registers: 128 a thread for small m tiles, up to 255 where a thread holds more sums.
  const int registers = t.tile_m <= 32 ? 128 : 255;
  const int64_t per_sm = std::max<int64_t>(1, std::min(d.smem_per_sm / smem, 65536 / (registers * t.threads())));
  const double weights = static_cast<double>(t.tile_n) * t.tile_k;
  const double rows = static_cast<double>(std::min<int64_t>(d.m, t.tile_m));
  const double dram = weights * (0.5 + 2.5 / std::min<double>(128, 1 << std::min(d.group_shift, 20)));
  const double l2 = dram + rows * t.tile_k * 2;
  const double flops = 2 * weights * t.tile_m;
  const double instructions =
      weights / 256 * kDequantInstructions * t.warps_m + flops / kMmaOperations * kMmaInstructions;
  const double tiles = static_cast<double>(ceil_div(k_tiles, plan.splits));
  double total = kLaunchNs - kWaveNs;
  for (int64_t left = ctas; left > 0;) {
    const int64_t wave = std::min(left, per_sm * d.sm_count);
    // All full waves are alike.
    const int64_t repeat = wave == per_sm * d.sm_count ? left / wave : 1;
    const double share = static_cast<double>(ceil_div(wave, d.sm_count));  // CTAs on the busiest multiprocessor
    // DRAM is shared by all, so an uneven wave pays for its bytes, not for its busiest multiprocessor.
    const double even = static_cast<double>(wave) / d.sm_count;
    const double issue = kIssue * std::min(1.0, share * t.threads() / 32 / kIssueWarps);
    double sum = 0;
    for (const double term : {even * dram / kDramBytes, share * l2 / kL2Bytes, share * flops / kMmaFlops,
                              share * instructions / issue, kLatencyNs / t.stages}) {
      sum += std::pow(term, kOverlap);
    }
    const double step = std::pow(sum, 1 / kOverlap);
    total += static_cast<double>(repeat) * (kWaveNs + step * tiles);
    left -= wave * repeat;
  }
  if (plan.splits > 1) {
    total += kReduceNs + 8.0 * static_cast<double>(d.m) * static_cast<double>(d.n) * plan.splits / kReduceBytes;
  }
  return total;
}

struct Candidate {
  LaunchPlan plan;
  double ns;
};

std::vector<Candidate> candidates(const GemmDesc& desc) {
  std::vector<Candidate> found;
  for (int i = 0; i < kInstanceCount; ++i) {
    for (int splits = 1; splits <= kMaxSplits; ++splits) {
      const LaunchPlan plan{i, splits};
      if (unsupported(desc, plan).empty()) found.push_back({plan, modelled_ns(desc, plan)});
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.ns < b.ns; });
  return found;
}

std::string describe(const GemmDesc& d) {
  return "m=" + std::to_string(d.m) + ", n=" + std::to_string(d.n) + ", k=" + std::to_string(d.k) +
         ", groups=" + std::to_string(d.groups);
}

bool same(const GemmDesc& a, const GemmDesc& b) {
  return a.m == b.m && a.n == b.n && a.k == b.k && a.groups == b.groups && a.group_shift == b.group_shift &&
         a.bf16 == b.bf16 && a.symmetric == b.symmetric && a.sm_count == b.sm_count && a.smem_per_sm == b.smem_per_sm &&
         a.smem_per_cta == b.smem_per_cta;
}

}  // namespace

const std::vector<InstanceInfo>& instances() {
  static const std::vector<InstanceInfo> all = [] {
    std::vector<InstanceInfo> list;
    for (const Instance& instance : kInstances) list.push_back(instance.info);
    return list;
  }();
  return all;
}

std::string unsupported(const GemmDesc& d, const LaunchPlan& plan) {
  if (plan.instance < 0 || plan.instance >= kInstanceCount) {
    return "instance " + std::to_string(plan.instance) + ", expected 0 to " + std::to_string(kInstanceCount - 1);
  }
  const Instance& chosen = kInstances[plan.instance];
  const int64_t k_tiles = ceil_div(d.k, chosen.info.tile_k);
  if (plan.splits < 1 || plan.splits > std::min<int64_t>(k_tiles, kMaxSplits)) {
    return std::to_string(plan.splits) + " splits, expected 1 to " +
           std::to_string(std::min<int64_t>(k_tiles, kMaxSplits)) + " (k tiles of " + chosen.info.name + ")";
  }
  const int smem = chosen.smem_bytes(d.group_shift, d.symmetric);
  if (smem > d.smem_per_cta) {
    return std::string(chosen.info.name) + " needs " + std::to_string(smem) +
           " bytes of shared memory, the device has " + std::to_string(d.smem_per_cta);
  }
  if (ceil_div(d.m, chosen.info.tile_m) * ceil_div(d.n, chosen.info.tile_n) > kMaxGridX) {
    return std::string(chosen.info.name) + " would need more than 2^31 - 1 CTAs";
  }
  return "";
}

LaunchPlan choose_plan(const GemmDesc& desc) {
  // Scoring all candidates takes some 10 us, a model asks for a few dozen shapes over and over: a small direct-mapped
  // cache per thread, so that no lock is needed.
  struct Entry {
    GemmDesc desc;
    LaunchPlan plan;
    bool used;
  };
  constexpr size_t kEntries = 256;
  thread_local Entry cache[kEntries] = {};
  const size_t hash =
      static_cast<size_t>(desc.m * 31 + desc.n * 1009 + desc.k * 7919 + desc.groups) * 0x9e3779b97f4a7c15u;
  Entry& entry = cache[hash >> 56];
  static_assert(kEntries == 1 << (64 - 56), "the hash's top bits index the cache");
  if (entry.used && same(entry.desc, desc)) return entry.plan;
  const std::vector<Candidate> all = candidates(desc);
  if (all.empty()) throw std::runtime_error("no kernel instance can run " + describe(desc) + " on this device");
  entry = {desc, all.front().plan, true};
  return entry.plan;
}

std::string explain(const GemmDesc& desc) {
  std::string text = describe(desc) + "\n";
  for (const Candidate& c : candidates(desc)) {
    char line[160];
    std::snprintf(line, sizeof(line), "%9.2f us  %-28s splits %d\n", c.ns / 1000, kInstances[c.plan.instance].info.name,
                  c.plan.splits);
    text += line;
  }
  return text;
}

int64_t workspace_elements(const GemmDesc& desc, const LaunchPlan& plan) {
  return plan.splits == 1 ? 0 : plan.splits * desc.m * ceil_div(desc.n, layout::kGrainN) * layout::kGrainN;
}

void launch(const GemmDesc& desc, const LaunchPlan& plan, const GemmArgs& args, cudaStream_t stream) {
  if (const std::string why = unsupported(desc, plan); !why.empty()) throw std::invalid_argument(why);
  cudaError_t error = kInstances[plan.instance].launch[desc.bf16 ? 1 : 0](args, stream);
  if (error == cudaSuccess && plan.splits > 1) {
    launch_reduce(desc.bf16, args, stream);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(kInstances[plan.instance].info.name) + " did not launch for " +
                             describe(desc) + ": " + cudaGetErrorString(error));
  }
}

}  // namespace w4
