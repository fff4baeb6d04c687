// Backward pass: gradients of  sum_n cm_n M_n + cl logdet  in one read of P and one write of dP. With v_i = L^-1 p_i,
// q_i = L^-T v_i, h_i = w_i |v_i|^2 and a_ni = w_i (r_ni - p_i . z_n), row i gets
//   dP_i = 2 cl w_i q_i - 2 sum_n cm_n a_ni z_n,  dD_i = cl w_i (1 - h_i) - sum_n cm_n a_ni^2,  dloc_ni = -2 cm_n a_ni.
// Included only by the per-instruction-set sources.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "arena.h"
#include "columns.h"
#include "kernels.h"
#include "policy.h"
#include "rows.h"
#include "simd.h"
#include "small_backward.h"
#include "small_dense.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// out [R, ld] = b [R, R] x [R, ld] for n columns, b lower (k <= c) or upper (k >= c) triangular and zero-padded to
// whole tiles of rows. Columns up to the next whole tile exist in scratch.
template <class A, int kRows, int kVectors>
static void triangular_tiles(const A* b, int64_t ld_b, const A* x, A* out, int64_t n, int64_t R, int64_t ld,
                             bool lower) {
  Tile<A, kRows, kVectors> tile;
  for (int64_t panel = 0; panel < R; panel += kCachedColumns)
    for (int64_t c0 = 0; c0 < R; c0 += kRows) {
      const int64_t rows = R - c0 < kRows ? R - c0 : kRows;
      const int64_t start = lower || c0 < panel ? panel : c0;
      const int64_t reach = lower ? c0 + rows : R;
      const int64_t end = reach < panel + kCachedColumns ? reach : panel + kCachedColumns;
      if (start >= end) continue;
      const bool more = start > (lower ? 0 : c0);  // the sums have begun with an earlier panel
      for (int64_t i0 = 0; i0 < n; i0 += tile.kColumns) {
        tile.product(b + c0 * ld_b + start, ld_b, 1, x + start * ld + i0, ld, end - start);
        for (int64_t m = 0; more && m < rows; ++m) tile.add(m, out + (c0 + m) * ld + i0);
        if (rows == kRows)
          for (int64_t m = 0; m < kRows; ++m) tile.store(m, out + (c0 + m) * ld + i0);
        else
          for (int64_t m = 0; m < rows; ++m) tile.store(m, out + (c0 + m) * ld + i0);
      }
    }
}

// Small ranks take narrow tiles, which waste less on the triangle.
template <class A>
static void triangular_product(const A* b, int64_t ld_b, const A* x, A* out, int64_t n, int64_t R, int64_t ld,
                               bool lower) {
  if (R <= kSmallRank)
    triangular_tiles<A, 4, 2>(b, ld_b, x, out, n, R, ld, lower);
  else
    triangular_tiles<A, kTileRows, kTileVectors>(b, ld_b, x, out, n, R, ld, lower);
}

// v = L^-1 p of one row in double, stored to v; returns |v|^2. There are at most R / kHighLeverage such rows.
template <class A>
static double exact_row(const double* chol_inv, const A* x, A* v, int64_t ld, int64_t R, double* p) {
  for (int64_t j = 0; j < R; ++j) p[j] = double(x[j * ld]);
  double norm = 0.0;
  for (int64_t c = 0; c < R; ++c) {
    const double exact = dot(chol_inv + c * R, p, c + 1);
    v[c * ld] = A(exact);
    norm += exact * exact;
  }
  return norm;
}

// out[m, i] (+)= sum over k of a[m * a_row + k * a_step] * b[k, i] for m < M, i < n. `a` has three more rows of m.
template <class A>
static void multiply(const A* a, int64_t a_row, int64_t a_step, int64_t M, const A* b, int64_t ld, int64_t K, int64_t n,
                     A* out, bool accumulate) {
  Tile<A, 4, 2> tile;
  for (int64_t m0 = 0; m0 < M; m0 += 4)
    for (int64_t i0 = 0; i0 < n; i0 += tile.kColumns) {
      tile.product(a + m0 * a_row, a_row, a_step, b + i0, ld, K);
      for (int64_t m = 0; m < 4 && m0 + m < M; ++m) {
        A* to = out + (m0 + m) * ld + i0;
        if (accumulate) tile.add(m, to);
        tile.store(m, to);
      }
    }
}

// A chunk of values on their way through the backward pass: z [count, R] in A, zero-padded, and for each value the
// vector that multiplies it in the factor's gradient.
template <class A>
struct ValueChunk {
  static constexpr int64_t kPad = 4;
  A* z;  // [kValueChunk + kPad, ld_z]
  int64_t ld_z;
  A* scales;  // [kValueChunk, ld]
  int64_t count;

  void take(const double* from, int64_t R, int64_t values) {
    count = values;
    for (int64_t v = 0; v < kValueChunk + kPad; ++v)
      for (int64_t j = 0; j < ld_z; ++j) z[v * ld_z + j] = v < values && j < R ? A(from[v * R + j]) : A(0);
  }

  bool many() const { return count >= 4; }
};

// grad [R, ld] (+)= sum_v z_v scales_v^T + scale_q q: each value's outer product, and the log-determinant's part, which
// may be absent. The first contribution to a block overwrites what was there.
template <class A>
static void combine(A* grad, int64_t ld, int64_t R, int64_t n, const ValueChunk<A>& values, const A* scale_q,
                    const A* q, bool first) {
  for (int64_t j = 0; j < R; ++j) {
    A* to = grad + j * ld;
    if (first && values.count == 1 && scale_q) {
      const A zj = values.z[j];
      for (int64_t i = 0; i < n; ++i) to[i] = values.scales[i] * zj + scale_q[i] * q[j * ld + i];
      continue;
    }
    if (first)
      for (int64_t i = 0; i < n; ++i) to[i] = A(0);
    if (scale_q)
      for (int64_t i = 0; i < n; ++i) to[i] += scale_q[i] * q[j * ld + i];
    for (int64_t v = 0; v < values.count && !values.many(); ++v) {
      const A zj = values.z[v * values.ld_z + j];
      for (int64_t i = 0; i < n; ++i) to[i] += values.scales[v * ld + i] * zj;
    }
  }
  if (values.many()) multiply<A>(values.z, 1, values.ld_z, R, values.scales, ld, values.count, n, grad, true);
}

// The vector gradients of a failed item; to the factor's gradient it adds nothing.
template <class T>
static void write_zeros(const GaussianInputs& g, const GramGrads& to, int64_t begin, int64_t n) {
  for (int64_t i = 0; to.diag && i < n; ++i) store(static_cast<T*>(to.diag)[begin + i], 0.0);
  for (int64_t value = 0; to.loc && value < (to.sum_loc ? 1 : g.N); ++value)
    for (int64_t i = 0; i < n; ++i) store(static_cast<T*>(to.loc)[value * to.loc_stride_n + begin + i], 0.0);
}

template <class T>
static void write_vector(const double* from, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) store(to[i], from[i]);
}

template <class T, class A>
static void write_factor(const A* grad, int64_t ld, int64_t R, int64_t n, const GramGrads& to, int64_t begin) {
  T* out = static_cast<T*>(to.factor) + begin * to.factor_stride_s;
  write_columns<T, A>(grad, ld, R, n, out, to.factor_stride_s, to.factor_stride_r);
}

template <class T>
static void write_grad_diag(const GaussianInputs& g, RowScratch rows, int64_t begin, double* grad_diag, int64_t n,
                            T* to) {
  scale_grad_diag<T>(g, rows, begin, grad_diag, n);
  write_vector<T>(grad_diag, n, to);
}

template <class A>
struct BackwardScratch {
  int64_t ld;  // the rows of a block
  RowScratch rows;
  double *diff, *grad_diag, *projected, *sum_loc;  // [ld]
  double* one_row;                                 // [R]
  A* scale_q;                                      // [ld]
  A *x, *v, *grad;                                 // [R, ld]
  ValueChunk<A> values;

  template <class Memory>
  BackwardScratch(Memory& memory, int64_t R)
      : ld(bwd_block_rows(R)), rows(memory, ld), values{nullptr, R + ValueChunk<A>::kPad, nullptr, 0} {
    memory.take(diff, ld);
    memory.take(grad_diag, ld);
    memory.take(projected, ld);
    memory.take(sum_loc, ld);
    memory.take(values.scales, kValueChunk * ld);
    memory.take(scale_q, ld);
    memory.take(x, R * ld);
    memory.take(v, R * ld);
    memory.take(grad, R * ld);
    memory.take(values.z, (kValueChunk + ValueChunk<A>::kPad) * values.ld_z);
    memory.take(one_row, R);
  }
};

template <class A>
static int64_t bwd_scratch(int64_t R) {
  const int64_t bytes = bytes_of<BackwardScratch<A>>(R);
  return R <= kSmallRank ? std::max(bytes, bytes_of<SmallBackwardScratch<A>>(R)) : bytes;
}

template <class T, class A>
static void log_prob_bwd_rows(const GaussianInputs* gaussians, const GramGrads* grads, int64_t count, int64_t begin,
                              int64_t end, void* scratch) {
  if (backward_fits_registers(gaussians[0], grads[0], count) && !grads[0].failed) {
    log_prob_bwd_small<T, A>(gaussians[0], grads[0], begin, end, scratch);
    return;
  }
  const int64_t R = gaussians[0].factor.R;
  const int64_t n = end - begin;
  Arena arena(scratch);
  const BackwardScratch<A> held(arena, R);
  const int64_t ld = held.ld;
  const RowScratch rows = held.rows;
  double *diff = held.diff, *grad_diag = held.grad_diag, *projected = held.projected, *sum_loc = held.sum_loc;
  A *scale_q = held.scale_q, *x = held.x, *v = held.v, *grad = held.grad;
  ValueChunk<A> values = held.values;
  A* scales = values.scales;
  const bool need_factor = grads[0].factor != nullptr;
  bool first = true;  // nothing has been put into grad yet

  for (int64_t item = 0; item < count; ++item) {
    const GaussianInputs& g = gaussians[item];
    const GramGrads& to = grads[item];
    if (to.failed) {
      write_zeros<T>(g, to, begin, n);
      continue;
    }
    read_diag<T, false>(g, begin, n, rows);
    read_columns<T, A>(g.factor, g.mask, begin, n, x, ld);
    for (int64_t i = 0; i < n; ++i) grad_diag[i] = sum_loc[i] = 0.0;

    values.count = 0;
    for (int64_t value = 0; value < g.N; ++value) {
      const int64_t position = value % kValueChunk;
      if (position == 0) {
        if (value > 0 && need_factor) {  // the last chunk goes with the log-determinant's part
          combine<A>(grad, ld, R, n, values, nullptr, nullptr, first);
          first = false;
        }
        values.take(to.z + value * R, R, g.N - value < kValueChunk ? g.N - value : kValueChunk);
        if (std::is_same_v<A, double> && values.many())  // p . z of the chunk; in float it would lose too much
          multiply<A>(values.z, values.ld_z, 1, values.count, x, ld, R, n, scales, false);
      }
      A* scale = scales + position * ld;
      if (to.value_info[value] != 0) {
        for (int64_t i = 0; i < n; ++i) diff[i] = 0.0;
        for (int64_t i = 0; i < n; ++i) scale[i] = A(0);
      } else {
        const double cm = to.grad_maha[value];
        read_diff<T>(g, value, begin, n, diff);
        if (std::is_same_v<A, double> && values.many()) {
          for (int64_t i = 0; i < n; ++i) projected[i] = double(scale[i]);
        } else {
          for (int64_t i = 0; i < n; ++i) projected[i] = 0.0;
          add_projection(x, ld, to.z + value * R, R, n, projected);
        }
        for (int64_t i = 0; i < n; ++i) {
          const double a = rows.weight[i] * (diff[i] - projected[i]);
          grad_diag[i] -= cm * a * a;
          diff[i] = -2.0 * cm * a;
          scale[i] = A(diff[i]);
        }
      }
      if (to.sum_loc)
        for (int64_t i = 0; i < n; ++i) sum_loc[i] += diff[i];
      else if (to.loc)
        write_vector<T>(diff, n, static_cast<T*>(to.loc) + value * to.loc_stride_n + begin);
    }
    if (to.loc && to.sum_loc) write_vector<T>(sum_loc, n, static_cast<T*>(to.loc) + begin);

    const double cl = to.grad_logdet;
    const bool has_logdet = cl != 0.0 && (need_factor || to.diag);
    if (has_logdet) {
      triangular_product(static_cast<const A*>(to.chol_inv), to.ld, x, v, n, R, ld, true);
      for (int64_t i = 0; i < n; ++i) projected[i] = 0.0;
      for (int64_t j = 0; j < R; ++j)
        for (int64_t i = 0; i < n; ++i) projected[i] += double(v[j * ld + i]) * double(v[j * ld + i]);
      if (sizeof(A) < sizeof(double))
        for (int64_t i = 0; i < n; ++i)
          if (rows.weight[i] * projected[i] > kHighLeverage)
            projected[i] = exact_row(to.exact_chol_inv, x + i, v + i, ld, R, held.one_row);
      for (int64_t i = 0; i < n; ++i) {
        grad_diag[i] += cl * rows.weight[i] * (1.0 - rows.weight[i] * projected[i]);
        scale_q[i] = A(2.0 * cl * rows.weight[i]);
      }
      if (need_factor) triangular_product(static_cast<const A*>(to.chol_inv_t), to.ld, v, x, n, R, ld, false);
    }
    if (need_factor) {
      const A* q_scale = has_logdet ? scale_q : nullptr;
      combine<A>(grad, ld, R, n, values, q_scale, x, first);
      first = false;
    }

    if (to.diag) write_grad_diag<T>(g, rows, begin, grad_diag, n, static_cast<T*>(to.diag) + begin);
  }
  if (need_factor) {
    if (first)  // every item failed
      for (int64_t i = 0; i < R * ld; ++i) grad[i] = A(0);
    write_factor<T, A>(grad, ld, R, n, grads[0], begin);
  }
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
