// lrd_cuda::capacitance_fwd.
#include "capacitance.cuh"
#include "capacitance_blocked.cuh"
#include "capacitance_library.cuh"
#include "ops.h"

namespace lrd::cuda {

// Block per matrix.
__global__ void __launch_bounds__(kThreads, 1) capacitance_kernel(const CapacitanceArgs p) {
  extern __shared__ double memory[];
  if (p.again && !p.again[blockIdx.x]) return;
  factorise(p, blockIdx.x, memory);
}

void launch_solve(const Gpu& gpu, int64_t B, const CapacitanceArgs& args) {
  CapacitancePlan plan = plan_capacitance(B, args.N, args.R, 0);
  gpu.launch(solve_kernel, plan.solve, args);
}

void launch_capacitance(const Gpu& gpu, const Tensor& like, int64_t B, CapacitanceArgs args) {
  const CapacitancePlan plan = plan_capacitance(B, args.N, args.R, gpu.shared_limit());
  if (plan.fused) {
    gpu.launch(capacitance_kernel, plan.whole, args);
  } else {
    std::optional<Tensor> chol;
    if (!args.chol) args.chol = doubles(chol.emplace(empty_doubles(like, {B, args.R, args.R})));
    if (args.R > kBlockedRank) factorise_by_library(gpu, like, B, plan, args);
    args.panels = static_cast<int>(plan.panels);
    for (args.panel = 0; args.panel < args.panels; ++args.panel) {
      gpu.launch(factor_panel_kernel, plan.factor(args.panel, B), args);
      gpu.launch(inverse_panel_kernel, plan.inverse, args);
    }
    gpu.launch(capacitance_finish_kernel, plan.finish, args);
  }
  if (!plan.solves) gpu.launch(solve_kernel, plan.solve, args);
}

Six capacitance_fwd_cuda(const Tensor& gram, const Tensor& u, const Tensor& quad, const Tensor& log_diag) {
  STD_TORCH_CHECK(gram.dim() == 3 && u.dim() == 3 && quad.dim() == 2 && log_diag.dim() == 1,
                  "lrd: capacitance_fwd wants gram [B, R, R], u [B, N, R], quad [B, N], log_diag [B]");
  const int64_t B = u.size(0), N = u.size(1), R = u.size(2);
  check_doubles(gram, gram, B * R * R, "gram");
  check_doubles(u, gram, B * N * R, "u");
  check_doubles(quad, gram, B * N, "quad");
  check_doubles(log_diag, gram, B, "log_diag");
  const Gpu gpu(gram);
  Tensor chol = empty_doubles(gram, {B, R, R}), chol_inv = empty_doubles(gram, {B, R, R});
  Tensor z = empty_doubles(gram, {B, N, R}), maha = empty_doubles(gram, {B, N});
  Tensor logdet = empty_doubles(gram, {B}), growth = empty_doubles(gram, {B});
  CapacitanceArgs args{};
  args.gram = const_doubles(gram);
  args.u = const_doubles(u);
  args.quad = const_doubles(quad);
  args.log_diag = const_doubles(log_diag);
  args.chol = doubles(chol);
  args.chol_inv = doubles(chol_inv);
  args.z = doubles(z);
  args.maha = doubles(maha);
  args.logdet = doubles(logdet);
  args.growth = doubles(growth);
  args.stride = 1;
  args.N = N;
  args.R = static_cast<int>(R);
  launch_capacitance(gpu, gram, B, args);
  return {chol, chol_inv, z, maha, logdet, growth};
}

}  // namespace lrd::cuda
