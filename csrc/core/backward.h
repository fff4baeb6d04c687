// Backward pass: gradients of  sum_n cm_n M_n + cl logdet  in one read of P and one write of dP. With v_i = L^-1 p_i,
// q_i = L^-T v_i, h_i = w_i |v_i|^2 and a_ni = w_i (r_ni - p_i . z_n), row i gets
//   dP_i = 2 cl w_i q_i - 2 sum_n cm_n a_ni z_n,   dD_i = cl w_i (1 - h_i) - sum_n cm_n a_ni^2,   dloc_ni = -2 cm_n
//   a_ni.
// Included only by the per-instruction-set sources.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "rows.h"
#include "simd.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// out [n, ld] = x [n, ld] times b [R, ld_b], b upper (k <= c) or lower (k >= c) triangular. Rows of x and out up to
// the next multiple of kTileRows, and columns of b and out up to whole tiles, exist in scratch.
template <class A>
static void triangular_product(const A* x, const A* b, A* out, int64_t n, int64_t R, int64_t ld, int64_t ld_b,
                               bool upper) {
  Tile<A> tile;
  for (int64_t c0 = 0; c0 < R; c0 += Tile<A>::kColumns) {
    const int64_t reach = c0 + Tile<A>::kColumns < R ? c0 + Tile<A>::kColumns : R;
    const int64_t first = upper ? 0 : c0;
    const int64_t last = upper ? reach : R;
    for (int64_t i0 = 0; i0 < n; i0 += kTileRows) {
      tile.product(x + i0 * ld + first, ld, 1, b + first * ld_b + c0, ld_b, last - first);
      for (int64_t m = 0; m < kTileRows; ++m)
        for (int64_t v = 0; v < kTileVectors; ++v)
          for (int64_t lane = 0; lane < Tile<A>::kLanes; ++lane)
            out[(i0 + m) * ld + c0 + v * Tile<A>::kLanes + lane] = tile.acc[m][v][lane];
    }
  }
}

template <class T>
static void write_factor(const double* grad, int64_t ld, const Gaussian& g, const GramGrads& to, int64_t begin,
                         int64_t n) {
  T* out = static_cast<T*>(to.factor) + begin * to.factor_stride_s;
  if (to.factor_stride_s == 1 && to.factor_stride_r != 1) {  // rank-major: write along the columns
    for (int64_t j = 0; j < g.R; ++j)
      for (int64_t i = 0; i < n; ++i) store(out[i + j * to.factor_stride_r], grad[i * ld + j]);
  } else {
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < g.R; ++j) store(out[i * to.factor_stride_s + j * to.factor_stride_r], grad[i * ld + j]);
  }
}

// The vector gradients of a failed item; to the factor's gradient it adds nothing.
template <class T>
static void write_zeros(const Gaussian& g, const GramGrads& to, int64_t begin, int64_t n) {
  for (int64_t i = 0; to.diag && i < n; ++i) store(static_cast<T*>(to.diag)[begin + i], 0.0);
  for (int64_t value = 0; to.loc && value < g.N; ++value)
    for (int64_t i = 0; i < n; ++i) store(static_cast<T*>(to.loc)[value * to.loc_stride_n + begin + i], 0.0);
}

// Scratch: grad [rows, ld] and four vectors of rows in double, then x, v and q [rows, ld] in A.
template <class T, class A>
static void log_prob_bwd_rows(const Gaussian* gaussians, const GramGrads* grads, int64_t count, int64_t begin,
                              int64_t end, void* scratch) {
  constexpr Compute compute = sizeof(A) == sizeof(double) ? Compute::f64 : Compute::f32;
  const int64_t R = gaussians[0].R;
  const int64_t n = end - begin;
  const int64_t ld = grads[0].ld;
  const int64_t capacity = bwd_block_rows(R, compute) + kMaxTileRows;
  double* grad = static_cast<double*>(scratch);
  double* diag = grad + capacity * ld;
  RowScratch rows{diag, diag + capacity};
  double* diff = diag + 2 * capacity;
  double* grad_diag = diag + 3 * capacity;
  A* x = reinterpret_cast<A*>(diag + 4 * capacity);
  A* v = x + capacity * ld;
  A* q = v + capacity * ld;
  for (int64_t i = n * ld; i < (n + kTileRows) * ld; ++i) x[i] = A(0);
  if (grads[0].factor)
    for (int64_t i = 0; i < n * ld; ++i) grad[i] = 0.0;

  for (int64_t item = 0; item < count; ++item) {
    const Gaussian& g = gaussians[item];
    const GramGrads& to = grads[item];
    if (to.info != 0) {
      write_zeros<T>(g, to, begin, n);
      continue;
    }
    read_diag<T>(g, begin, n, rows);
    read_factor<T, A>(g, begin, n, nullptr, x, ld);
    for (int64_t i = 0; i < n; ++i) grad_diag[i] = 0.0;

    const double cl = to.grad_logdet;
    if (cl != 0.0 && (to.factor || to.diag)) {
      triangular_product(x, static_cast<const A*>(to.chol_inv_t), v, n, R, ld, ld, true);
      for (int64_t i = 0; i < n; ++i) {
        double norm = 0.0;
        for (int64_t j = 0; j < R; ++j) norm += double(v[i * ld + j]) * double(v[i * ld + j]);
        grad_diag[i] = cl * rows.weight[i] * (1.0 - rows.weight[i] * norm);
      }
      if (to.factor) {
        triangular_product(v, static_cast<const A*>(to.chol_inv), q, n, R, ld, ld, false);
        for (int64_t i = 0; i < n; ++i)
          for (int64_t j = 0; j < R; ++j) grad[i * ld + j] += 2.0 * cl * rows.weight[i] * double(q[i * ld + j]);
      }
    }

    for (int64_t value = 0; value < g.N; ++value) {
      const double cm = to.grad_maha[value];
      const double* z = to.z + value * R;
      read_diff<T>(g, value, begin, n, diff);
      const bool failed = to.value_info[value] != 0;
      for (int64_t i = 0; i < n && failed; ++i) diff[i] = 0.0;
      for (int64_t i = 0; i < n && !failed; ++i) {
        double projected = 0.0;
        for (int64_t j = 0; j < R; ++j) projected += double(x[i * ld + j]) * z[j];
        const double a = rows.weight[i] * (diff[i] - projected);
        diff[i] = 2.0 * cm * a;
        grad_diag[i] -= cm * a * a;
        if (to.factor)
          for (int64_t j = 0; j < R; ++j) grad[i * ld + j] -= diff[i] * z[j];
      }
      if (to.loc) {
        T* out = static_cast<T*>(to.loc) + value * to.loc_stride_n + begin;
        for (int64_t i = 0; i < n; ++i) store(out[i], -diff[i]);
      }
    }

    if (to.diag) {
      if (g.exp_diag)  // d/d raw = dD * exp(raw) = dD (D - eps); a masked row has D = 1 and dD = 0
        for (int64_t i = 0; i < n; ++i) grad_diag[i] *= rows.diag[i] - g.eps;
      T* out = static_cast<T*>(to.diag) + begin;
      for (int64_t i = 0; i < n; ++i) store(out[i], grad_diag[i]);
    }
  }
  if (grads[0].factor) write_factor<T>(grad, ld, gaussians[0], grads[0], begin, n);
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
