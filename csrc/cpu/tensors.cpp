#include "tensors.h"

#include <dlfcn.h>

#include "large_outputs.h"

namespace lrd {
namespace {

// torch_from_blob, a tensor on memory of one's own: in the stable ABI from torch 2.11 on, so looked up, not linked.
using FromBlob = AOTITorchError(void* data, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset,
                                int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle* result,
                                int32_t layout, const uint8_t* metadata, int64_t metadata_size,
                                void (*deleter)(void* data, void* context), void* context);

FromBlob* find_from_blob() {
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return library ? reinterpret_cast<FromBlob*>(dlsym(library, "torch_from_blob")) : nullptr;
}

void give_back(void* data, void* bytes) { give_back_memory({data, reinterpret_cast<size_t>(bytes)}); }

}  // namespace

Tensor allocate(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  static FromBlob* const from_blob = find_from_blob();
  size_t bytes = aoti_torch_dtype_element_size(dtype);
  for (int64_t d = 0; d < dims; ++d) bytes *= static_cast<size_t>(sizes[d]);
  const int32_t cpu = aoti_torch_device_type_cpu();
  AtenTensorHandle handle = nullptr;
  if (bytes >= kLargeOutput && from_blob) {
    const Piece piece = take_memory(bytes);
    if (piece.data) {
      const AOTITorchError failed =
          from_blob(piece.data, dims, sizes, strides, 0, dtype, cpu, -1, &handle, aoti_torch_layout_strided(), nullptr,
                    0, give_back, reinterpret_cast<void*>(piece.bytes));
      if (failed) give_back_memory(piece);
      STABLE_TORCH_ERROR_CODE_CHECK(failed);
      return Tensor(handle);
    }
  }
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes, strides, dtype, cpu, 0, &handle));
  Tensor tensor(handle);
  if (bytes >= kLargeOutput) advise_huge_pages(tensor.mutable_data_ptr(), bytes);
  return tensor;
}

}  // namespace lrd
