// Core on NumPy arrays, each instruction set by name. For the tests only.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../core/kernels.h"
#include "kernel_checks.h"

namespace py = pybind11;

void bind_plans(py::module_& m);   // plans.cpp
void bind_policy(py::module_& m);  // policy.cpp

namespace {

using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;

const lrd::Kernels& named(const std::string& isa) {
  for (const char* const* name = lrd::available_isas(); *name; ++name)
    if (isa == *name) return *lrd::kernels_named(*name);
  throw std::invalid_argument("this machine has no instruction set named " + isa);
}

lrd::DType dtype_named(const std::string& name) {
  if (name == "float32") return lrd::DType::f32;
  if (name == "float64") return lrd::DType::f64;
  if (name == "bfloat16") return lrd::DType::bf16;
  if (name == "float16") return lrd::DType::f16;
  throw std::invalid_argument("unknown dtype " + name);
}

int64_t stride(const py::array& array, int axis) { return array.strides(axis) / array.itemsize(); }

// The forward sums of one Gaussian: (gram [R, R] lower, u [N, R], quad [N], log_diag). Half types come as uint16 bits.
py::tuple gram(const std::string& isa, const std::string& dtype, bool float32, const py::array& factor,
               const py::array& diag, const py::array& value, int64_t rows_per_call) {
  const lrd::Kernels& kernels = named(isa);
  const lrd::DType type = dtype_named(dtype);
  const lrd::Compute compute = lrd::compute_for(type, float32);
  lrd::GaussianInputs g;
  const int64_t S = factor.shape(0), R = factor.shape(1);
  g.factor = {factor.data(), S, R, stride(factor, 0), stride(factor, 1)};
  g.N = value.shape(0);
  g.diag = {diag.data(), stride(diag, 0)};
  g.value = {value.data(), stride(value, 1)};
  g.value_stride_n = stride(value, 0);

  const int c = static_cast<int>(compute);
  const int64_t ld = kernels.padded_columns[c](R);
  std::vector<double> sums((R + g.N) * ld, 0.0);
  std::vector<double> quad(g.N, 0.0);
  double log_diag = 0.0;
  // Exactly as many bytes as the core asks for, so that a sanitizer or valgrind sees the first one too many.
  std::vector<char> scratch(kernels.gram_scratch[c](R, g.N) + 64);
  char* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64);
  const auto kernel = kernels.gram_rows[static_cast<int>(type)][c];
  for (int64_t begin = 0; begin < S; begin += rows_per_call)
    kernel(g, nullptr, begin, std::min(S, begin + rows_per_call), aligned, {sums.data(), ld, quad.data(), &log_diag});

  py::array_t<double> gram_out({R, R});
  py::array_t<double> u_out({g.N, R});
  for (int64_t j = 0; j < R; ++j)
    for (int64_t k = 0; k < R; ++k) gram_out.mutable_at(j, k) = k <= j ? sums[j * ld + k] : 0.0;
  for (int64_t n = 0; n < g.N; ++n)
    for (int64_t k = 0; k < R; ++k) u_out.mutable_at(n, k) = sums[(R + n) * ld + k];
  return py::make_tuple(gram_out, u_out, py::array_t<double>(g.N, quad.data()), log_diag);
}

py::tuple cholesky(const std::string& isa, const Doubles& gram) {
  const int64_t R = gram.shape(0);
  py::array_t<double> chol({R, R});
  py::array_t<double> chol_inv({R, R});
  std::vector<char> scratch(named(isa).cholesky_scratch(R));
  const double growth =
      named(isa).cholesky(gram.data(), chol.mutable_data(), chol_inv.mutable_data(), scratch.data(), R);
  return py::make_tuple(chol, chol_inv, growth);
}

}  // namespace

PYBIND11_MODULE(_core_testing, m) {
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (const char* const* name = lrd::available_isas(); *name; ++name) names.emplace_back(*name);
    return names;
  });
  m.def("gram", &gram, py::arg("isa"), py::arg("dtype"), py::arg("float32"), py::arg("factor"), py::arg("diag"),
        py::arg("value"), py::arg("rows_per_call"));
  m.def("cholesky", &cholesky, py::arg("isa"), py::arg("gram"));
  m.def("wrong_numbers", [](const std::string& isa, int64_t S, int64_t R, int64_t N) {
    return lrd_checks::check_all(named(isa), S, R, N);
  });
  m.def("block_rows", [](int64_t R, int64_t N) {
    const int64_t forward = lrd::gram_block_rows(R, N, lrd::Compute::f64);
    return std::vector<int64_t>{forward, lrd::gram_block_rows(R, N, lrd::Compute::f32), lrd::bwd_block_rows(R)};
  });
  bind_plans(m);
  bind_policy(m);
}
