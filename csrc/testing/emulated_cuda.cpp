// The CUDA ops on CPU tensors, for the tests: linked from the very objects of the library, with this file in place of
// the CUDA runtime and of torch's CUDA half. A launch is handed to a function that the tests set, with the kernel's
// name and its arguments; what memory the op has taken pointers to is remembered, as what its kernels may touch.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>

#include "../cuda/implement.h"

namespace {

using Hook = int(const char* kernel, const unsigned* grid, const unsigned* block, void* const* arguments,
                 uint64_t shared);

struct Memory {
  const char* base;
  int64_t bytes;
  bool writable;
};

Hook* hook = nullptr;
int shared_limit = 0, float64_ratio = 0;
std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> names;
  return names;
}
std::map<const char*, Memory>& memory() {
  static std::map<const char*, Memory> pieces;
  return pieces;
}

AOTITorchError remember(AtenTensorHandle tensor, const void* data, bool writable) {
  int64_t bytes = 0, offset = 0;
  int32_t dtype = 0;
  if (AOTITorchError error = aoti_torch_get_storage_size(tensor, &bytes)) return error;
  if (AOTITorchError error = aoti_torch_get_storage_offset(tensor, &offset)) return error;
  if (AOTITorchError error = aoti_torch_get_dtype(tensor, &dtype)) return error;
  if (!data || bytes == 0) return AOTI_TORCH_SUCCESS;
  const char* base =
      static_cast<const char*>(data) - offset * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  Memory& piece = memory().try_emplace(base, Memory{base, bytes, false}).first->second;
  if (piece.bytes != bytes) piece = {base, bytes, false};  // of memory that was freed, and is used anew
  piece.writable = piece.writable || writable;
  return AOTI_TORCH_SUCCESS;
}

}  // namespace

#define VISIBLE extern "C" __attribute__((visibility("default")))

// For the tests.
VISIBLE void lrd_emulate(Hook* launch, int shared_bytes, int ratio_of_float64) {
  hook = launch;
  shared_limit = shared_bytes;
  float64_ratio = ratio_of_float64;
}
VISIBLE void lrd_forget_memory() { memory().clear(); }
VISIBLE int64_t lrd_known_memory(Memory* to, int64_t room) {
  int64_t count = 0;
  for (const auto& [base, piece] : memory())
    if (count++ < room) to[count - 1] = piece;
  return count;
}

// Of torch's stable interface; the linker sends the ops' calls here (--wrap).
extern "C" AOTITorchError __real_torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);
extern "C" AOTITorchError __real_torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data);
extern "C" AOTITorchError __wrap_torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data) {
  if (AOTITorchError error = __real_torch_get_const_data_ptr(tensor, data)) return error;
  return remember(tensor, *data, false);
}
extern "C" AOTITorchError __wrap_torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data) {
  if (AOTITorchError error = __real_torch_get_mutable_data_ptr(tensor, data)) return error;
  return remember(tensor, *data, true);
}

// New memory holds no number before a kernel writes one: every byte is 255, which is NaN in all four dtypes.
extern "C" AOTITorchError __real_aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                                                          int32_t dtype, int32_t device, int32_t index,
                                                          AtenTensorHandle* tensor);
extern "C" AOTITorchError __wrap_aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                                                          int32_t dtype, int32_t device, int32_t index,
                                                          AtenTensorHandle* tensor) {
  if (AOTITorchError error = __real_aoti_torch_empty_strided(dims, sizes, strides, dtype, device, index, tensor))
    return error;
  void* data = nullptr;
  int64_t bytes = 0;
  if (AOTITorchError error = aoti_torch_get_data_ptr(*tensor, &data)) return error;
  if (AOTITorchError error = aoti_torch_get_storage_size(*tensor, &bytes)) return error;
  if (bytes > 0) std::memset(data, 255, static_cast<size_t>(bytes));
  return AOTI_TORCH_SUCCESS;
}

// Of torch's CUDA half.
extern "C" AOTITorchError aoti_torch_create_cuda_guard(int32_t, CUDAGuardHandle*) { return AOTI_TORCH_SUCCESS; }
extern "C" AOTITorchError aoti_torch_delete_cuda_guard(CUDAGuardHandle) { return AOTI_TORCH_SUCCESS; }
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

// Of the CUDA runtime: what nvcc's objects call when they are loaded, and what the launchers call.
extern "C" void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
extern "C" void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" void __cudaUnregisterFatBinary(void**) {}
extern "C" char __cudaInitModule(void**) { return 1; }
extern "C" void __cudaRegisterFunction(void**, const char* entry, char*, const char* name, int, void*, void*, void*,
                                       void*, int*) {
  kernels()[entry] = name;
}
extern "C" void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
extern "C" unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 1; }
extern "C" cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorUnknown; }
extern "C" cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorUnknown;
}
extern "C" cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorUnknown; }

const char* cudaGetErrorString(cudaError_t) { return "the emulated launch has failed"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrSingleToDoublePrecisionPerfRatio ? float64_ratio : shared_limit;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  return bytes <= shared_limit ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaLaunchKernel(const void* entry, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  const auto found = kernels().find(entry);
  if (!hook || found == kernels().end() || static_cast<int64_t>(shared) > shared_limit) return cudaErrorInvalidValue;
  const unsigned extents[2][3] = {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}};
  return hook(found->second.c_str(), extents[0], extents[1], arguments, shared) ? cudaErrorLaunchFailure : cudaSuccess;
}

STABLE_TORCH_LIBRARY_IMPL(lrd_cuda, CPU, m) { lrd::cuda::implement(m); }
