// The backward pass of small ranks, for one Gaussian and at most one value: a vector of rows stays in registers from P
// to dP. Included only by the per-instruction-set sources.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "arena.h"
#include "kernels.h"
#include "policy.h"
#include "quads.h"
#include "rows.h"
#include "small_dense.h"
#include "small_rows.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// n rows, a multiple of the vectors' length. `diff` becomes the gradient for loc, `grad_diag` that for D.
template <class E, class A>
struct BackwardPass {
  const E* rows;
  int64_t stride;
  int64_t left;  // rows of the memory from there on
  int64_t n;
  E* out;  // dP, in the layout of the rows
  int64_t out_stride;
  const A* chol_inv;                    // L^-1 [R, R rounded up to 8]
  const double* z;                      // [R]
  const A* narrow_z;                    // the same
  const double* weight;                 // [n]
  double *diff, *grad_diag, *leverage;  // [n]; the leverage is wanted in float only
  double cm, cl;
  bool masked;  // rows of weight zero may hold anything
};

// Makes the compiler forget what it has read from there: L^-1 is read twice, not kept in registers that it lacks.
template <class A>
LRD_INLINE void hide(const A*& pointer) {
  asm("" : "+r"(pointer));
}

template <class E, class A, int R, bool kRowMajor>
static void backward_pass(const BackwardPass<E, A>& pass) {
  typedef RowVectors<E, A, R, kRowMajor> Rows;
  typedef Lanes<double, kDoubles> Wide;
  typedef typename Tile<A>::Vector Vector;
  constexpr int kLanes = Tile<A>::kLanes, kCount = kParts<A>, kLd = (R + 7) / 8 * 8;
  const A *inverse = pass.chol_inv, *narrow_z = pass.narrow_z;
  const double* z = pass.z;
  const double cm = pass.cm, cl = pass.cl, pull_scale = -2.0 * cm, weight_scale = 2.0 * cl;
  for (int64_t i = 0; i < pass.n; i += kLanes) {
    Rows::prefetch(pass.rows, pass.stride, i, pass.left);
    const E* from = pass.rows + i * (kRowMajor ? pass.stride : 1);
    Doubles weight[kCount], residual[kCount];
#pragma GCC unroll 2
    for (int part = 0; part < kCount; ++part) {
      weight[part] = Wide::load(pass.weight + i + part * kDoubles);
      residual[part] = Wide::load(pass.diff + i + part * kDoubles);
    }
    const Vector w = from_parts(weight);
    Vector x[R];
#pragma GCC unroll 4
    for (int c = 0; c < R; c += 4) {
      Rows::load(c, from, pass.stride, x);
#pragma GCC unroll 4
      for (int k = c; k < c + 4; ++k) {
        if (k >= R) continue;
        if (pass.masked) keep_weighted(w, x[k]);
#pragma GCC unroll 2
        for (int part = 0; part < kCount; ++part) residual[part] -= part_of(x[k], part) * z[k];
      }
    }
    // v = L^-1 p, last column first, then q = L^-T v, first column first: each takes the place of what it is made from.
#pragma GCC unroll 16
    for (int k = R - 1; k >= 0; --k) {
#pragma GCC unroll 16
      for (int c = k + 1; c < R; ++c) x[c] += x[k] * inverse[c * kLd + k];
      x[k] *= inverse[k * kLd + k];
    }
    hide(inverse);
    Vector norm = x[0] * x[0];
#pragma GCC unroll 16
    for (int c = 1; c < R; ++c) norm += x[c] * x[c];
#pragma GCC unroll 16
    for (int c = 0; c < R; ++c) {
#pragma GCC unroll 16
      for (int j = 0; j < c; ++j) x[j] += x[c] * inverse[c * kLd + j];
      x[c] *= inverse[c * kLd + c];
    }
    Doubles pulls[kCount];
#pragma GCC unroll 2
    for (int part = 0; part < kCount; ++part) {
      const Doubles a = weight[part] * residual[part], h = weight[part] * part_of(norm, part);
      pulls[part] = a * pull_scale;
      Wide::store(pass.diff + i + part * kDoubles, pulls[part]);
      Wide::store(pass.grad_diag + i + part * kDoubles, weight[part] * (1.0 - h) * cl - a * a * cm);
      if (kCount > 1) Wide::store(pass.leverage + i + part * kDoubles, h);
    }
    const Vector pull = from_parts(pulls), scale = w * A(weight_scale);
#pragma GCC unroll 16
    for (int j = 0; j < R; ++j) x[j] = pull * narrow_z[j] + scale * x[j];
    Rows::store(pass.out + i * (kRowMajor ? pass.out_stride : 1), pass.out_stride, x);
  }
}

template <class E, class A>
using BackwardKernel = void (*)(const BackwardPass<E, A>&);

template <class E, class A, bool kRowMajor, int... kLess>
static BackwardKernel<E, A> backward_kernel(int64_t R, std::integer_sequence<int, kLess...>) {
  static constexpr BackwardKernel<E, A> kernels[] = {backward_pass<E, A, kLess + 1, (kRowMajor && kLess > 0)>...};
  return kernels[R - 1];
}

template <class A>
struct SmallBackwardScratch {
  int64_t ld;  // the rows of a block
  RowScratch rows;
  double *diff, *grad_diag, *leverage;  // [ld]
  double *one_row, *z;                  // [R]
  A* narrow_z;                          // [R]
  A* buffer;                            // [R, ld] and kRowSlack: rows that cannot be loaded from where they lie
  A* out;                               // the same: rows that cannot be stored to where they belong
  A *rest, *rest_out;                   // [kRestElements]

  template <class Memory>
  SmallBackwardScratch(Memory& memory, int64_t R) : ld(bwd_block_rows(R)), rows(memory, ld) {
    memory.take(diff, ld);
    memory.take(grad_diag, ld);
    memory.take(leverage, ld);
    memory.take(one_row, R);
    memory.take(z, R);
    memory.take(narrow_z, R);
    memory.take(buffer, R * ld + kRowSlack);
    memory.take(out, R * ld + kRowSlack);
    memory.take(rest, kRestElements<A>);
    memory.take(rest_out, kRestElements<A>);
  }
};

// n numbers to contiguous memory in the input's dtype, through `stage`, room for as many of them, if they are
// converted.
template <class T, class From>
static void write_run(const From* from, int64_t n, T* to, bool streamed, T* stage) {
  if constexpr (std::is_same_v<T, From>) {
    copy_out(from, to, n, streamed);
  } else {
    T* out = streamed ? stage : to;
    for (int64_t i = 0; i < n; ++i) store(out[i], double(from[i]));
    if (streamed) copy_out(stage, to, n, true);
  }
}

// Row i of dP, and its entry of dD, once more and all in double: of high leverage, where 1 - h cancels, or of a weight
// that its square root in float could not bear.
template <class T, class E>
static void redo_row(const GaussianInputs& g, const GramGrads& to, const double* z, int64_t row, double weight,
                     double pull, double* p, double* grad_diag, E* out, int64_t step) {
  const int64_t R = g.factor.R;
  const T* from = static_cast<const T*>(g.factor.data) + row * g.factor.stride_s;
  const double *inverse = to.exact_chol_inv, cl = to.grad_logdet;
  const double cm = g.N > 0 ? to.grad_maha[0] : 0.0;
  double q[kSmallRank] = {}, norm = 0.0;
  for (int64_t j = 0; j < R; ++j) p[j] = double(load(from[j * g.factor.stride_r]));
  for (int64_t c = 0; c < R; ++c) {
    const double v = dot(inverse + c * R, p, c + 1);
    for (int64_t j = 0; j <= c; ++j) q[j] += inverse[c * R + j] * v;
    norm += v * v;
  }
  *grad_diag = cl * weight * (1.0 - weight * norm) - (cm == 0.0 ? 0.0 : pull * pull / (4.0 * cm));
  for (int64_t j = 0; j < R; ++j) out[j * step] = E(pull * z[j] + 2.0 * cl * weight * q[j]);
}

static inline bool backward_fits_registers(const GaussianInputs& g, const GramGrads& to, int64_t count) {
  return count == 1 && g.N <= 1 && g.factor.R >= 1 && g.factor.R <= kSmallRank && (g.N == 0 || to.value_info[0] == 0);
}

template <class T, class A>
static void log_prob_bwd_small(const GaussianInputs& g, const GramGrads& to, int64_t begin, int64_t end,
                               void* scratch) {
  typedef Wide<T> E;
  constexpr int64_t kLanes = Tile<A>::kLanes;
  constexpr auto kRanks = std::make_integer_sequence<int, kSmallRank>();
  const int64_t R = g.factor.R, n = end - begin, whole = (n + kLanes - 1) / kLanes * kLanes;
  Arena arena(scratch);
  const SmallBackwardScratch<A> held(arena, R);
  const int64_t ld = held.ld;
  const RowScratch rows = held.rows;
  double *diff = held.diff, *grad_diag = held.grad_diag;
  E *buffer = reinterpret_cast<E*>(held.buffer), *target = reinterpret_cast<E*>(held.out);
  T* stage = reinterpret_cast<T*>(held.buffer);  // when all has been read

  read_diag<T, false>(g, begin, n, rows);
  if (g.N > 0)
    read_diff<T>(g, 0, begin, n, diff);
  else
    std::fill_n(diff, n, 0.0);
  for (int64_t i = n; i < whole; ++i) rows.weight[i] = diff[i] = 0.0;
  for (int64_t j = 0; j < R; ++j) held.narrow_z[j] = A(held.z[j] = g.N > 0 ? to.z[j] : 0.0);

  const RowBlock<E> block = row_block<T>(g.factor, begin, n, kLanes, buffer, ld);
  const bool by_rows = block.by_rows;
  T* factor = static_cast<T*>(to.factor);
  if (factor) factor += begin * to.factor_stride_s;
  // Where whole vectors can be stored, they are.
  bool direct = false;
  int64_t target_stride = by_rows ? R : ld;
  if constexpr (std::is_same_v<T, E>) {
    const bool collide = !by_rows && columns_collide(R, to.factor_stride_r, kLanes * sizeof(T), sizeof(T));
    direct =
        factor && !to.streamed && (by_rows ? to.factor_stride_r == 1 && R >= 4 : to.factor_stride_s == 1 && !collide);
    if (direct) target = factor, target_stride = by_rows ? to.factor_stride_s : to.factor_stride_r;
  }
  const int64_t row = by_rows ? target_stride : 1, column = by_rows ? 1 : target_stride;

  const BackwardKernel<E, A> kernel =
      by_rows ? backward_kernel<E, A, true>(R, kRanks) : backward_kernel<E, A, false>(R, kRanks);
  BackwardPass<E, A> pass{block.data,
                          block.stride,
                          block.rows,
                          block.whole,
                          target,
                          target_stride,
                          static_cast<const A*>(to.chol_inv),
                          held.z,
                          held.narrow_z,
                          rows.weight,
                          diff,
                          grad_diag,
                          held.leverage,
                          g.N > 0 ? to.grad_maha[0] : 0.0,
                          to.grad_logdet,
                          g.mask.data != nullptr};
  kernel(pass);
  if (const int64_t at = block.whole; at < n) {
    const RowBlock<E> rest = rest_of(block, R, n, kLanes, reinterpret_cast<E*>(held.rest));
    const E* out = pass.out = reinterpret_cast<E*>(held.rest_out);
    pass.rows = rest.data, pass.stride = pass.out_stride = rest.stride, pass.left = 0, pass.n = rest.whole;
    pass.weight += at, pass.diff += at, pass.grad_diag += at, pass.leverage += at;
    kernel(pass);
    for (int64_t i = at; i < n; ++i)
      for (int64_t j = 0; j < R; ++j)
        target[i * row + j * column] = out[by_rows ? (i - at) * rest.stride + j : j * rest.stride + i - at];
  }
  if (sizeof(A) < sizeof(double)) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += !(held.leverage[i] <= kHighLeverage) | (rows.weight[i] > kFloat32Weight);
    for (int64_t i = 0; count > 0 && i < n; ++i)
      if (!(held.leverage[i] <= kHighLeverage) || rows.weight[i] > kFloat32Weight)
        redo_row<T>(g, to, held.z, begin + i, rows.weight[i], diff[i], held.one_row, grad_diag + i, target + i * row,
                    column);
  }

  if (to.loc && (g.N > 0 || to.sum_loc)) write_run<T>(diff, n, static_cast<T*>(to.loc) + begin, to.streamed, stage);
  if (to.diag) {
    scale_grad_diag<T>(g, rows, begin, grad_diag, n);
    write_run<T>(grad_diag, n, static_cast<T*>(to.diag) + begin, to.streamed, stage);
  }
  if (factor && !direct) {
    if (by_rows && to.factor_stride_r == 1 && to.factor_stride_s == R) {
      write_run<T>(target, n * R, factor, to.streamed, stage);
    } else {
      for (int64_t j = 0; j < R; ++j) {
        T* out = factor + j * to.factor_stride_r;
        if (!by_rows && to.factor_stride_s == 1)
          write_run<T>(target + j * ld, n, out, to.streamed, stage);
        else
          for (int64_t i = 0; i < n; ++i) store(out[i * to.factor_stride_s], double(target[i * row + j * column]));
      }
    }
  }
  if (to.streamed) end_streaming();
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
