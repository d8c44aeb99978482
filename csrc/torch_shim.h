// The functions of LibTorch's stable C ABI that bindings.cpp uses, found at load time in the libtorch that the process
// already holds. Declared here by hand, so that no torch is needed to build and one binary serves torch 2.10 and newer.
//
// Sources of the signatures: torch/csrc/inductor/aoti_torch/c/shim.h (aoti_torch_*) and torch/csrc/stable/c/shim.h
// (torch_*), both plain C and append-only.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace w4::torch_shim {

using Error = int32_t;  // 0 is success
using Tensor = void*;  // AtenTensorHandle, an owned reference
using StableIValue = uint64_t;
using BoxedKernel = void (*)(StableIValue* stack, uint64_t inputs, uint64_t outputs);

struct Api {
  Error (*library_init_impl)(const char* ns, const char* key, const char* file, uint32_t line, void** library);
  Error (*library_impl)(void* library, const char* name, BoxedKernel kernel, uint64_t abi_version);
  Error (*get_dim)(Tensor, int64_t*);
  Error (*get_sizes)(Tensor, int64_t**);
  Error (*get_strides)(Tensor, int64_t**);
  Error (*get_dtype)(Tensor, int32_t*);
  Error (*get_device_type)(Tensor, int32_t*);
  Error (*get_device_index)(Tensor, int32_t*);
  Error (*get_data_ptr)(Tensor, void**);
  Error (*empty_strided)(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type,
                         int32_t device_index, Tensor*);
  Error (*delete_tensor)(Tensor);
  int32_t (*dtype_float16)();
  int32_t (*dtype_bfloat16)();
  int32_t (*dtype_float32)();
  int32_t (*dtype_int32)();
  int32_t (*dtype_uint8)();
  int32_t (*device_type_cuda)();
  // Absent before 2.13, where an optional's cell is freed with delete.
  Error (*delete_stable_ivalue)(StableIValue*);
  // In libtorch_cuda; absent in a CPU build, looked up at the first CUDA call.
  Error (*get_current_cuda_stream)(int32_t device, void** stream);
  Error (*create_cuda_guard)(int32_t device, void** guard);
  Error (*delete_cuda_guard)(void* guard);
};

inline constexpr uint64_t kAbiVersion = uint64_t{2} << 56 | uint64_t{10} << 48;  // 2.10.0

class Loader {
 public:
  explicit Loader(const char* library) : handle_(dlopen(library, RTLD_LAZY | RTLD_NOLOAD)), library_(library) {}

  template <class Function>
  void find(Function& function, const char* name) const {
    find_optional(function, name);
    if (function == nullptr) {
      throw std::runtime_error(std::string(name) + " is not in " + library_ + "; this torch is older than 2.10" +
                               (handle_ == nullptr ? " or was not imported first" : ""));
    }
  }
  template <class Function>
  void find_optional(Function& function, const char* name) const {
    function = handle_ == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(handle_, name));
  }

 private:
  void* handle_;
  std::string library_;
};

inline void find_cpu_part(Api& api) {
  const Loader torch("libtorch_cpu.so");
  torch.find(api.library_init_impl, "aoti_torch_library_init_impl");
  torch.find(api.library_impl, "torch_library_impl");
  torch.find(api.get_dim, "aoti_torch_get_dim");
  torch.find(api.get_sizes, "aoti_torch_get_sizes");
  torch.find(api.get_strides, "aoti_torch_get_strides");
  torch.find(api.get_dtype, "aoti_torch_get_dtype");
  torch.find(api.get_device_type, "aoti_torch_get_device_type");
  torch.find(api.get_device_index, "aoti_torch_get_device_index");
  torch.find(api.get_data_ptr, "aoti_torch_get_data_ptr");
  torch.find(api.empty_strided, "aoti_torch_empty_strided");
  torch.find(api.delete_tensor, "aoti_torch_delete_tensor_object");
  torch.find(api.dtype_float16, "aoti_torch_dtype_float16");
  torch.find(api.dtype_bfloat16, "aoti_torch_dtype_bfloat16");
  torch.find(api.dtype_float32, "aoti_torch_dtype_float32");
  torch.find(api.dtype_int32, "aoti_torch_dtype_int32");
  torch.find(api.dtype_uint8, "aoti_torch_dtype_uint8");
  torch.find(api.device_type_cuda, "aoti_torch_device_type_cuda");
  torch.find_optional(api.delete_stable_ivalue, "torch_delete_stable_ivalue");
}

inline void find_cuda_part(Api& api) {
  const Loader torch("libtorch_cuda.so");
  torch.find(api.get_current_cuda_stream, "aoti_torch_get_current_cuda_stream");
  torch.find(api.create_cuda_guard, "aoti_torch_create_cuda_guard");
  torch.find(api.delete_cuda_guard, "aoti_torch_delete_cuda_guard");
}

}  // namespace w4::torch_shim
