// Launches of the backward pass for one value at most, at ranks up to 64.
#include "dtypes.cuh"
#include "gradient_tiles.cuh"
#include "ops.h"
#include "row_grads.cuh"

namespace lrd::cuda {
namespace {

template <class T, bool kVector>
auto choose(int width) -> void (*)(BackwardArgs) {
  if (width == 4) return row_grads_kernel<T, 4, kVector>;
  if (width == 8) return row_grads_kernel<T, 8, kVector>;
  if (width == 16) return row_grads_kernel<T, 16, kVector>;
  return width == 32 ? gradient_tiles_kernel<T, 32, kVector> : gradient_tiles_kernel<T, 64, kVector>;
}

}  // namespace

void launch_fast_gradients(const Gpu& gpu, const Tensor& like, const FastGradientPlan& plan, const BackwardArgs& args) {
  const int64_t size = element_size(like);
  const bool vector = args.R == plan.width &&
                      is_aligned(args.factor, args.factor_b, args.factor_s, args.factor_r, size) &&
                      (!args.grad_factor || is_aligned(args.grad_factor, args.out_b, args.out_s, args.out_r, size));
  with_dtype(like, [&](auto types) {
    using T = typename decltype(types)::T;
    if constexpr (sizeof(T) < 8)
      gpu.launch(vector ? choose<T, true>(plan.width) : choose<T, false>(plan.width), plan.launch, args);
  });
}

}  // namespace lrd::cuda
