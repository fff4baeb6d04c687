// The numerical policy, for the tests: its numbers by name, and its certificates.
#include "../core/policy.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

py::dict numbers() {
  py::dict to;
#define SHOW(name) to[#name] = lrd::name
  SHOW(kFlushRows);
  SHOW(kFloat32SumError);
  SHOW(kFloat64SumError);
  SHOW(kPairSumError);
  SHOW(kPairLeast);
  SHOW(kPairMost);
  SHOW(kQuadError);
  SHOW(kInverseError);
  SHOW(kTolerance);
  SHOW(kFloat32Rank);
  SHOW(kFloat32Growth);
  SHOW(kHighLeverage);
  SHOW(kFloat32Weight);
  SHOW(kFloat32Inverse);
  SHOW(kCholeskyGrowth);
  SHOW(kExplainedRatio);
  SHOW(kPivotNudge);
  SHOW(kFusedRank);
  SHOW(kBlockedRank);
  SHOW(kExpLimitFloat64);
  SHOW(kExpLimitFloat32);
  SHOW(kExpLimitBFloat16);
  SHOW(kExpLimitFloat16);
  SHOW(kLog2Pi);
#undef SHOW
  return to;
}

py::dict precisions() {
  py::dict to;
#define SHOW(name) to[#name] = static_cast<int64_t>(lrd::Precision::name)
  SHOW(automatic);
  SHOW(float64);
  SHOW(float32);
  SHOW(declining);
#undef SHOW
  return to;
}

}  // namespace

void bind_policy(py::module_& m) {
  m.def("policy", &numbers);
  m.def("precisions", &precisions);
  m.def("certified", [](double growth) { return lrd::certified(growth); });
  m.def("tolerable", [](double sum_error, double weighted, double quad, double maha, double logdet, int64_t S) {
    return lrd::tolerable(lrd::maha_error(sum_error, weighted, quad), maha, logdet, S);
  });
}
