// The launch plans of the CUDA ops, for the tests: each as a dictionary.
#include "../cuda/plans.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;
using namespace lrd::cuda;

namespace {

py::tuple shown(const Launch& launch) { return py::make_tuple(launch.grid, launch.block, launch.shared); }

py::dict gram(int64_t B, int64_t S, int64_t columns, int64_t N, bool wide, bool want_gram) {
  const GramPlan plan = plan_gram(B, S, columns, N, wide, want_gram);
  py::dict to;
  to["tile"] = plan.tile;
  to["pairs"] = plan.pairs;
  to["splits"] = plan.splits;
  to["rows_per_split"] = plan.rows_per_split;
  to["sums"] = shown(plan.sums);
  to["add"] = shown(plan.add);
  return to;
}

py::dict fast_sums(int64_t B, int64_t S, int64_t R) {
  const FastPlan plan = plan_fast_sums(B, S, R);
  py::dict to;
  to["width"] = plan.width;
  to["splits"] = plan.splits;
  to["rows_per_split"] = plan.rows_per_split;
  to["sums"] = shown(plan.sums);
  return to;
}

py::dict fast_gradients(int64_t B, int64_t S, int64_t R, int64_t shared_limit) {
  const FastGradientPlan plan = plan_fast_gradients(B, S, R, shared_limit);
  py::dict to;
  to["width"] = plan.width;
  to["rows"] = plan.rows;
  to["blocks"] = plan.blocks;
  to["launch"] = shown(plan.launch);
  return to;
}

py::tuple finish(int64_t B, int64_t S, int64_t N, int64_t R, int64_t shared_limit) {
  const FinishPlan plan = plan_finish(B, N, R, plan_gram(B, S, R, N, true, true), shared_limit);
  return py::make_tuple(shown(plan.finish), shown(plan.again));
}

py::dict capacitance(int64_t B, int64_t N, int64_t R, int64_t shared_limit) {
  const CapacitancePlan plan = plan_capacitance(B, N, R, shared_limit);
  py::dict to;
  to["fused"] = plan.fused;
  to["panels"] = plan.panels;
  to["whole"] = shown(plan.whole);
  to["inverse"] = shown(plan.inverse);
  to["entries"] = shown(plan.entries);
  to["finish"] = shown(plan.finish);
  to["solve"] = shown(plan.solve);
  if (!plan.fused) to["factor"] = shown(plan.factor(0, B));
  return to;
}

py::dict rows(const RowsPlan& plan) {
  py::dict to;
  to["rows"] = plan.rows;
  to["width"] = plan.width;
  to["pitch"] = plan.pitch;
  to["blocks"] = plan.blocks;
  to["launch"] = shown(plan.launch);
  return to;
}

}  // namespace

void bind_plans(py::module_& m) {
  m.def("plan_gram", &gram);
  m.def("plan_fast_sums", &fast_sums);
  m.def("plan_fast_gradients", &fast_gradients);
  m.def("plan_finish", &finish);
  m.def("plan_mean", [](int64_t B, int64_t S) { return shown(plan_mean(B, S)); });
  m.def("plan_capacitance", &capacitance);
  m.def("plan_log_prob_fwd", [](int64_t B) { return py::make_tuple(shown(plan_judge(B)), shown(plan_settle(B))); });
  m.def("plan_log_prob_bwd",
        [](int64_t F, int64_t per_factor, int64_t S, int64_t R, int64_t N, bool wide, int64_t shared_limit) {
          return rows(plan_backward(F, per_factor, S, R, N, wide, shared_limit));
        });
  m.def("plan_project_fold", [](int64_t B, int64_t S, int64_t columns, int64_t K, bool wide, int64_t shared_limit) {
    return rows(plan_project(B, S, columns, K, wide, shared_limit));
  });
}
