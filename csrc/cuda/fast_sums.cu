// Launches of the Gram pass for one value at most, at ranks up to 64.
#include "dtypes.cuh"
#include "gram_tiles.cuh"
#include "ops.h"
#include "row_sums.cuh"

namespace lrd::cuda {
namespace {

template <class T, bool kVector>
auto choose(int width, Sums64 quality) -> void (*)(GramArgs) {
  const bool doubles = quality == Sums64::native;
  if (width == 4) return doubles ? row_sums_kernel<T, 4, kVector, double> : row_sums_kernel<T, 4, kVector, Pair>;
  if (width == 8) return doubles ? row_sums_kernel<T, 8, kVector, double> : row_sums_kernel<T, 8, kVector, Pair>;
  if (width == 16) return row_sums_kernel<T, 16, kVector, float>;
  return width == 32 ? gram_tiles_kernel<T, 4, kVector> : gram_tiles_kernel<T, 8, kVector>;
}

}  // namespace

void launch_fast_sums(const Gpu& gpu, const Tensor& like, const FastPlan& plan, const GramArgs& args) {
  const bool vector = args.columns.total == plan.width && is_aligned(args.columns, like);
  with_dtype(like, [&](auto types) {
    using T = typename decltype(types)::T;
    if constexpr (sizeof(T) < 8) {
      const auto kernel =
          vector ? choose<T, true>(plan.width, gpu.sums64()) : choose<T, false>(plan.width, gpu.sums64());
      gpu.launch(kernel, plan.sums, args);
    }
  });
}

}  // namespace lrd::cuda
