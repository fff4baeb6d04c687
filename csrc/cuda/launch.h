// Launches on the current stream of the tensors' GPU. Nothing here waits for the GPU.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <limits>

#include "plans.h"

namespace lrd::cuda {

constexpr int kFastFloat64 = 4;  // float64 is fast at up to this ratio: 2 on data centre GPUs, 32 or 64 on others

inline void check(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "lrd: CUDA error: ", cudaGetErrorString(error));
}

// How sums of the quality of float64 are formed: in float64 where that is fast, elsewhere as pairs of float32.
enum class Sums64 { native, pairs };

// The GPU of a tensor is the current one for as long as this lives.
class Gpu {
 public:
  explicit Gpu(const torch::stable::Tensor& tensor) {
    const int32_t index = tensor.get_device_index();
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_cuda_guard(index, &guard_));
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
    int bytes = 0;
    check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
    shared_limit_ = bytes;
    int ratio = 0;  // of the speeds of float32 and float64
    check(cudaDeviceGetAttribute(&ratio, cudaDevAttrSingleToDoublePrecisionPerfRatio, index));
    sums64_ = ratio <= kFastFloat64 ? Sums64::native : Sums64::pairs;
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu() { aoti_torch_delete_cuda_guard(guard_); }

  // Bytes of shared memory that a block may have.
  int64_t shared_limit() const { return shared_limit_; }
  Sums64 sums64() const { return sums64_; }

  template <class Args>
  void launch(void (*kernel)(Args), const Launch& plan, const Args& args) const {
    if (plan.grid == 0) return;
    STD_TORCH_CHECK(plan.grid <= std::numeric_limits<int32_t>::max(), "lrd: too many blocks for one launch");
    const void* entry = reinterpret_cast<const void*>(kernel);
    if (plan.shared > kDefaultShared)
      check(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(plan.shared)));
    void* arguments[] = {const_cast<Args*>(&args)};
    check(cudaLaunchKernel(entry, dim3(static_cast<unsigned>(plan.grid)), dim3(plan.block), arguments,
                           static_cast<size_t>(plan.shared), stream_));
  }

 private:
  CUDAGuardHandle guard_ = nullptr;
  cudaStream_t stream_ = nullptr;
  int64_t shared_limit_ = 0;
  Sums64 sums64_ = Sums64::pairs;
};

}  // namespace lrd::cuda
