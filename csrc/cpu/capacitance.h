// The R-sized solves that both forward ops need, in double.
#pragma once

#include <cstdint>

namespace lrd {

// Solves L y = u and L^T z = y; returns |y|^2 = u^T C^-1 u.
inline double solve_capacitance(const double* chol, const double* u, double* z, int64_t R) {
  double norm = 0.0;
  for (int64_t i = 0; i < R; ++i) {
    double sum = u[i];
    for (int64_t k = 0; k < i; ++k) sum -= chol[i * R + k] * z[k];
    z[i] = sum / chol[i * R + i];
    norm += z[i] * z[i];
  }
  for (int64_t i = R - 1; i >= 0; --i) {
    z[i] /= chol[i * R + i];
    for (int64_t k = 0; k < i; ++k) z[k] -= chol[i * R + k] * z[i];
  }
  return norm;
}

}  // namespace lrd
