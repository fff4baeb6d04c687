#include "tensors.h"

#include <algorithm>
#include <memory>
#include <new>

#include "errors.h"
#include "large_outputs.h"
#include "newer_torch.h"

namespace lrd {
namespace {

// A tensor on memory of one's own, from torch 2.11 on.
using FromBlob = AOTITorchError(void* data, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset,
                                int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle* result,
                                int32_t layout, const uint8_t* metadata, int64_t metadata_size,
                                void (*deleter)(void* data, void* context), void* context);
FromBlob* const from_blob = find_in_torch<FromBlob>("torch_from_blob");

// Whoever destroys the owner gives its piece back: the tensor, once there is one, before that `on_kept_memory`.
struct Owner {
  Piece piece;
  bool in_tensor = false;

  ~Owner() { give_back_memory(piece); }
};

// Torch runs the deleter of a tensor that it fails to finish, too, if it fails late enough.
void delete_owner(void*, void* context) {
  Owner* owner = static_cast<Owner*>(context);
  if (owner->in_tensor) delete owner;
}

// Null where there is no such memory, or none for what torch puts around it.
AtenTensorHandle on_kept_memory(size_t bytes, int64_t dims, const int64_t* sizes, const int64_t* strides,
                                int32_t dtype) {
  std::unique_ptr<Owner> owner(new (std::nothrow) Owner);
  if (!owner) return nullptr;
  owner->piece = take_memory(bytes);
  if (!owner->piece.data) return nullptr;
  AtenTensorHandle handle = nullptr;
  if (from_blob(owner->piece.data, dims, sizes, strides, 0, dtype, aoti_torch_device_type_cpu(), -1, &handle,
                aoti_torch_layout_strided(), nullptr, 0, delete_owner, owner.get()))
    return nullptr;
  owner.release()->in_tensor = true;
  return handle;
}

// Bytes of a tensor; more than there are addresses is memory that ran out.
size_t bytes_of_tensor(int64_t dims, const int64_t* sizes, int32_t dtype) {
  if (std::find(sizes, sizes + dims, 0) != sizes + dims) return 0;
  size_t bytes = aoti_torch_dtype_element_size(dtype);
  for (int64_t d = 0; d < dims; ++d)
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(sizes[d]), &bytes)) throw_out_of_memory(SIZE_MAX);
  return bytes;
}

}  // namespace

Tensor allocate(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  const size_t bytes = bytes_of_tensor(dims, sizes, dtype);
  if (bytes >= kLargeOutput && from_blob)
    if (AtenTensorHandle handle = on_kept_memory(bytes, dims, sizes, strides, dtype)) return Tensor(handle);
  const auto make = [&](AtenTensorHandle* handle) {
    return !aoti_torch_empty_strided(dims, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, handle);
  };
  AtenTensorHandle handle = nullptr;
  if (!make(&handle) && !(release_kept_memory() && make(&handle))) throw_out_of_memory(bytes);
  Tensor tensor(handle);
  if (bytes >= kLargeOutput) advise_huge_pages(tensor.mutable_data_ptr(), bytes);
  return tensor;
}

}  // namespace lrd
