// The CUDA kernels of torch.ops.w4linear.gemm and gemm_with_plan: tensor checks, stream and device, then gemm.h. The
// op's schema is w4linear/ops.py's. Also the plain C functions through which w4linear/backends/cuda.py asks about
// instances and plans.
#include <cstring>
#include <exception>
#include <initializer_list>
#include <mutex>
#include <utility>

#include "gemm.h"
#include "sm80/layout.cuh"
#include "torch_shim.h"

namespace w4 {
namespace {

using torch_shim::Error;
using torch_shim::StableIValue;

torch_shim::Api api;

void check(Error error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string("w4linear.gemm: torch failed to ") + what);
}

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error("w4linear.gemm: " + message); }

// An owned tensor handle, or none.
class TensorRef {
 public:
  TensorRef() = default;
  explicit TensorRef(torch_shim::Tensor handle) : handle_(handle) {
    check(api.get_dim(handle, &dim_), "read a tensor's rank");
    check(api.get_sizes(handle, &sizes_), "read a tensor's sizes");
    check(api.get_strides(handle, &strides_), "read a tensor's strides");
    check(api.get_dtype(handle, &dtype_), "read a tensor's dtype");
    check(api.get_device_type(handle, &device_type_), "read a tensor's device");
    check(api.get_device_index(handle, &device_index_), "read a tensor's device");
    check(api.get_data_ptr(handle, &data_), "read a tensor's address");
  }
  TensorRef(TensorRef&& other) noexcept { *this = std::move(other); }
  TensorRef& operator=(TensorRef&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(dim_, other.dim_);
    std::swap(sizes_, other.sizes_);
    std::swap(strides_, other.strides_);
    std::swap(dtype_, other.dtype_);
    std::swap(device_type_, other.device_type_);
    std::swap(device_index_, other.device_index_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~TensorRef() {
    if (handle_ != nullptr) api.delete_tensor(handle_);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  torch_shim::Tensor release() { return std::exchange(handle_, nullptr); }
  void* data() const { return data_; }
  int64_t dim() const { return dim_; }
  int64_t size(int64_t d) const { return sizes_[d < 0 ? d + dim_ : d]; }
  int64_t stride(int64_t d) const { return strides_[d < 0 ? d + dim_ : d]; }
  const int64_t* sizes() const { return sizes_; }
  int32_t dtype() const { return dtype_; }
  int32_t device() const { return device_index_; }
  bool on_cuda() const { return device_type_ == api.device_type_cuda(); }

  bool contiguous() const {
    int64_t expected = 1;
    for (int64_t d = dim_ - 1; d >= 0; --d) {
      if (sizes_[d] != 1 && strides_[d] != expected) return false;
      expected *= sizes_[d];
    }
    return true;
  }
  std::string shape() const {
    std::string text = "(";
    for (int64_t d = 0; d < dim_; ++d) text += (d ? ", " : "") + std::to_string(sizes_[d]);
    return text + ")";
  }

 private:
  torch_shim::Tensor handle_ = nullptr;
  int64_t dim_ = 0;
  int64_t* sizes_ = nullptr;
  int64_t* strides_ = nullptr;
  int32_t dtype_ = 0, device_type_ = 0, device_index_ = 0;
  void* data_ = nullptr;
};

TensorRef take_tensor(StableIValue value) {
  torch_shim::Tensor handle;
  std::memcpy(&handle, &value, sizeof(handle));
  return TensorRef(handle);
}

// An absent Tensor? is 0, a present one a heap cell that holds the handle; both are ours.
TensorRef take_optional(StableIValue value) {
  if (value == 0) return {};
  StableIValue* cell;
  std::memcpy(&cell, &value, sizeof(cell));
  const StableIValue inner = *cell;
  if (api.delete_stable_ivalue != nullptr) {
    api.delete_stable_ivalue(cell);
  } else {
    delete cell;
  }
  return take_tensor(inner);
}

TensorRef empty(std::initializer_list<int64_t> sizes, int32_t dtype, int32_t device) {
  int64_t strides[8], stride = 1;
  const int64_t dim = static_cast<int64_t>(sizes.size());
  for (int64_t d = dim - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes.begin()[d];
  }
  torch_shim::Tensor handle;
  check(api.empty_strided(dim, sizes.begin(), strides, dtype, api.device_type_cuda(), device, &handle), "allocate");
  return TensorRef(handle);
}

// The device of x as torch's current one for this scope: launches and allocations go there.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) { check(api.create_cuda_guard(device, &guard_), "set the device"); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { api.delete_cuda_guard(guard_); }

 private:
  void* guard_ = nullptr;
};

struct DeviceLimits {
  int sm_count, smem_per_sm, smem_per_cta;
};

const DeviceLimits& limits_of(int device) {
  constexpr int kMaxDevices = 64;
  static std::once_flag once[kMaxDevices];
  static DeviceLimits limits[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) fail("device " + std::to_string(device) + " is beyond the 64 supported");
  std::call_once(once[device], [&] {
    DeviceLimits& l = limits[device];
    int major = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&l.sm_count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&l.smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    }
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&l.smem_per_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (error != cudaSuccess) fail(std::string("cannot read the device: ") + cudaGetErrorString(error));
    if (major < 8) fail("compute capability " + std::to_string(major) + ".x; the kernels need 8.0 or newer");
  });
  return limits[device];
}

struct Operands {
  TensorRef x, B, U, V, bias, perm;
  int64_t n, k, group;
};

// The stack owns its inputs: all are taken first, so that an error later leaks none.
Operands take_operands(StableIValue* stack) {
  Operands o;
  o.x = take_tensor(stack[0]);
  o.B = take_tensor(stack[1]);
  o.U = take_tensor(stack[2]);
  o.V = take_optional(stack[3]);
  o.bias = take_optional(stack[4]);
  o.perm = take_optional(stack[5]);
  o.n = static_cast<int64_t>(stack[6]);
  o.k = static_cast<int64_t>(stack[7]);
  o.group = static_cast<int64_t>(stack[8]);
  return o;
}

void check_shape(const TensorRef& t, const char* name, int32_t dtype, std::initializer_list<int64_t> sizes,
                 const TensorRef& x) {
  bool fits = t.dim() == static_cast<int64_t>(sizes.size()) && t.contiguous();
  std::string want = "(";
  for (size_t d = 0; d < sizes.size(); ++d) {
    fits = fits && t.size(static_cast<int64_t>(d)) == sizes.begin()[d];
    want += (d ? ", " : "") + std::to_string(sizes.begin()[d]);
  }
  if (!fits) fail(std::string(name) + " is " + t.shape() + ", expected contiguous " + want + ")");
  if (t.dtype() != dtype) fail(std::string(name) + " has another dtype than the layer needs with this x");
  if (!t.on_cuda() || t.device() != x.device()) {
    fail(std::string(name) + " is on another device than x; move the layer or x");
  }
}

int group_shift_of(int64_t group, int64_t groups) {
  if (groups == 1) return kOneGroup;
  for (int shift = 4; shift <= 8; ++shift) {
    if (group == int64_t{1} << shift) return shift;
  }
  fail("group=" + std::to_string(group) + " with " + std::to_string(groups) +
       " groups, expected 16, 32, 64, 128 or 256, or one group for all k");
}

TensorRef gemm(Operands& o, const LaunchPlan* forced) {
  const TensorRef& x = o.x;
  if (x.dim() == 0 || x.size(-1) != o.k) {
    fail("x is " + x.shape() + ", expected (..., k) with k = in_features = " + std::to_string(o.k));
  }
  if (!x.on_cuda()) fail("x is on the CPU, the layer on CUDA; move one of them");
  const bool bf16 = x.dtype() == api.dtype_bfloat16();
  if (!bf16 && x.dtype() != api.dtype_float16()) fail("x must be float16 or bfloat16; W4Linear casts others");
  const int64_t groups = o.U.dim() == 3 ? o.U.size(1) : 0;
  const int64_t n16 = (o.n + layout::kGrainN - 1) / layout::kGrainN;
  const int64_t k64 = o.B.dim() == 4 ? o.B.size(1) : 0;
  check_shape(o.B, "B", api.dtype_int32(), {n16, k64, 32, 4}, x);
  check_shape(o.U, "U", x.dtype(), {n16, groups, 16}, x);
  if (o.V) check_shape(o.V, "V", api.dtype_uint8(), {n16, groups, 8}, x);
  if (o.bias) check_shape(o.bias, "bias", x.dtype(), {o.n}, x);
  if (o.perm) check_shape(o.perm, "perm", api.dtype_int32(), {k64 * layout::kGrainK}, x);
  if (!o.perm && (o.k + layout::kGrainK - 1) / layout::kGrainK != k64) {
    fail("B is " + o.B.shape() + ", too few or too many columns for k = " + std::to_string(o.k));
  }
  const int group_shift = group_shift_of(o.group, groups);

  int64_t m = 1, lda = o.k;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) m *= x.size(d);
  if (!x.contiguous()) {
    if (x.dim() != 2 || x.stride(1) != 1) fail("x is not contiguous; call x.contiguous() first");
    lda = x.stride(0);
  }
  constexpr int64_t kMaxM = (int64_t{1} << 31) - 1;
  if (m > kMaxM) fail("x has " + std::to_string(m) + " rows, expected at most 2^31 - 1");

  const DeviceGuard guard(x.device());
  int64_t sizes[64], strides[64];
  if (x.dim() > 64) fail("x has more than 64 dimensions");
  int64_t stride = 1;
  for (int64_t d = x.dim() - 1; d >= 0; --d) {
    sizes[d] = d + 1 == x.dim() ? o.n : x.size(d);
    strides[d] = stride;
    stride *= sizes[d];
  }
  torch_shim::Tensor handle;
  check(api.empty_strided(x.dim(), sizes, strides, x.dtype(), api.device_type_cuda(), x.device(), &handle), "allocate");
  TensorRef D(handle);
  if (m == 0) return D;

  void* stream_pointer = nullptr;
  check(api.get_current_cuda_stream(x.device(), &stream_pointer), "read the current stream");
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);

  const DeviceLimits& device = limits_of(x.device());
  const int64_t packed_k = k64 * layout::kGrainK;
  const GemmDesc desc{
      m, o.n, packed_k, groups, group_shift, bf16, !o.V, device.sm_count, device.smem_per_sm, device.smem_per_cta};
  const LaunchPlan plan = forced != nullptr ? *forced : choose_plan(desc);
  if (const std::string why = unsupported(desc, plan); !why.empty()) fail(why);

  GemmArgs args{};
  args.A = x.data();
  args.lda = lda;
  args.k = static_cast<int>(o.k);
  // cp.async takes 16 bytes at 16-byte addresses.
  constexpr int64_t kAlignment = 16;
  TensorRef gathered;
  if (o.perm || lda * 2 % kAlignment != 0 || reinterpret_cast<uintptr_t>(x.data()) % kAlignment != 0) {
    gathered = empty({m, packed_k}, x.dtype(), x.device());
    launch_gather(x.data(), lda, o.perm ? static_cast<const int32_t*>(o.perm.data()) : nullptr, gathered.data(), m, o.k,
                  packed_k, stream);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
      fail(std::string("the copy of x did not launch: ") + cudaGetErrorString(error));
    }
    args.A = gathered.data();
    args.lda = packed_k;
    args.k = static_cast<int>(packed_k);
  }
  TensorRef workspace;
  if (plan.splits > 1) workspace = empty({workspace_elements(desc, plan)}, api.dtype_float32(), x.device());
  args.B = o.B.data();
  args.U = o.U.data();
  args.V = o.V ? o.V.data() : nullptr;
  args.bias = o.bias ? o.bias.data() : nullptr;
  args.D = D.data();
  args.partials = workspace ? static_cast<float*>(workspace.data()) : nullptr;
  args.m = static_cast<int>(m);
  args.n = static_cast<int>(o.n);
  args.n16 = static_cast<int>(n16);
  args.k64 = static_cast<int>(k64);
  args.groups = static_cast<int>(groups);
  args.group_shift = group_shift;
  args.splits = plan.splits;
  launch(desc, plan, args, stream);
  return D;
}

void find_cuda_part() {
  static std::once_flag once;
  std::call_once(once, [] { torch_shim::find_cuda_part(api); });
}

void return_tensor(StableIValue* stack, TensorRef result) {
  const torch_shim::Tensor handle = result.release();
  stack[0] = 0;
  std::memcpy(stack, &handle, sizeof(handle));
}

void gemm_boxed(StableIValue* stack, uint64_t, uint64_t) {
  Operands operands = take_operands(stack);
  find_cuda_part();
  return_tensor(stack, gemm(operands, nullptr));
}

void gemm_with_plan_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const LaunchPlan plan{static_cast<int>(static_cast<int64_t>(stack[9])),
                        static_cast<int>(static_cast<int64_t>(stack[10]))};
  Operands operands = take_operands(stack);
  find_cuda_part();
  return_tensor(stack, gemm(operands, &plan));
}

}  // namespace
}  // namespace w4

#define W4_EXPORT extern "C" __attribute__((visibility("default")))

// Adds the kernels to the op that w4linear/ops.py has defined. Null, or why it failed.
W4_EXPORT const char* w4_register() {
  static std::string message;
  try {
    w4::torch_shim::find_cpu_part(w4::api);
    void* library = nullptr;
    w4::check(w4::api.library_init_impl("w4linear", "CUDA", __FILE__, __LINE__, &library), "open the op library");
    w4::check(w4::api.library_impl(library, "gemm", &w4::gemm_boxed, w4::torch_shim::kAbiVersion), "add gemm");
    w4::check(w4::api.library_impl(library, "gemm_with_plan", &w4::gemm_with_plan_boxed, w4::torch_shim::kAbiVersion),
              "add gemm_with_plan");
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

W4_EXPORT int w4_cuda_version() { return CUDART_VERSION; }

W4_EXPORT int w4_instance_count() { return static_cast<int>(w4::instances().size()); }

W4_EXPORT const char* w4_instance_name(int index) { return w4::instances().at(static_cast<size_t>(index)).name; }

// Writes explain()'s text for a card with that many multiprocessors into `text`; returns its full length.
W4_EXPORT int w4_explain(int64_t m, int64_t n, int64_t k, int64_t group, int bf16, int symmetric, int sm, int sm_count,
                         char* text, int size) {
  constexpr int kKilobyte = 1024;
  std::string out;
  try {
    const int64_t packed_k = (k + w4::layout::kGrainK - 1) / w4::layout::kGrainK * w4::layout::kGrainK;
    const int64_t groups = group >= k ? 1 : (k + group - 1) / group;
    // Shared memory of compute capability 9.0, 8.0 and the smaller 8.6 and 8.9.
    const int smem = sm >= 90 ? 228 * kKilobyte : sm == 80 || sm == 87 ? 164 * kKilobyte : 100 * kKilobyte;
    out = w4::explain({m, n, packed_k, groups, w4::group_shift_of(group, groups), bf16 != 0, symmetric != 0, sm_count,
                       smem, smem - kKilobyte});
  } catch (const std::exception& error) {
    out = error.what();
  }
  std::strncpy(text, out.c_str(), static_cast<size_t>(size) - 1);
  text[size - 1] = 0;
  return static_cast<int>(out.size());
}
