// Every kernel of an instruction set on memory of exactly the right size and no alignment, beside plain loops in
// double. The sanitizers find the first byte too many; without them the end of the memory borders on a page that is not
// there.
#include "kernel_checks.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

namespace lrd_checks {
namespace {

using lrd::Compute;
using lrd::DType;

#ifdef __SANITIZE_ADDRESS__
// A heap block of exactly `bytes`, its data pushed to an odd element by one in front.
class Exact {
 public:
  Exact(int64_t count, int64_t element) : memory_(std::malloc((count + 1) * element)), element_(element) {}
  ~Exact() { std::free(memory_); }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  char* data() const { return static_cast<char*>(memory_) + element_; }

 private:
  void* memory_;
  int64_t element_;
};
#else
// Memory of exactly so many bytes in front of a page that must not be touched.
class Exact {
 public:
  Exact(int64_t count, int64_t element) {
    const int64_t page = sysconf(_SC_PAGESIZE), bytes = count * element;
    bytes_ = (bytes + page - 1) / page * page + page;
    void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) std::abort();
    memory_ = static_cast<char*>(mapped);
    if (mprotect(memory_ + bytes_ - page, page, PROT_NONE)) std::abort();
    data_ = memory_ + bytes_ - page - bytes;
  }
  ~Exact() { munmap(memory_, bytes_); }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  char* data() const { return data_; }

 private:
  char *memory_, *data_;
  int64_t bytes_;
};
#endif

int64_t element_bytes(DType dtype) { return dtype == DType::f64 ? 8 : (dtype == DType::f32 ? 4 : 2); }

// Small multiples of 1/8: exact in every dtype.
void put(Exact& to, int64_t at, DType dtype, double x) {
  char* p = to.data() + at * element_bytes(dtype);
  const float narrow = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &narrow, 4);
  uint16_t half = 0;
  if (dtype == DType::bf16) half = static_cast<uint16_t>(bits >> 16);
  if (dtype == DType::f16 && narrow != 0)
    half =
        static_cast<uint16_t>(((bits >> 16) & 0x8000u) | (((bits >> 23 & 0xff) - 112) << 10) | ((bits >> 13) & 0x3ff));
  if (dtype == DType::f64) std::memcpy(p, &x, 8);
  if (dtype == DType::f32) std::memcpy(p, &narrow, 4);
  if (element_bytes(dtype) == 2) std::memcpy(p, &half, 2);
}

double get(const Exact& from, int64_t at, DType dtype) {
  const char* p = from.data() + at * element_bytes(dtype);
  double wide;
  float narrow;
  uint16_t half;
  if (dtype == DType::f64) return std::memcpy(&wide, p, 8), wide;
  if (dtype == DType::f32) return std::memcpy(&narrow, p, 4), narrow;
  std::memcpy(&half, p, 2);
  if (dtype == DType::bf16) {
    const uint32_t bits = uint32_t(half) << 16;
    return std::memcpy(&narrow, &bits, 4), narrow;
  }
  const int exponent = half >> 10 & 31;
  const double magnitude = std::ldexp(exponent ? 1024 + (half & 1023) : half & 1023, (exponent ? exponent : 1) - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

int failures = 0;

void expect_near(double actual, double wanted, double tolerance, const char* what) {
  if (std::abs(actual - wanted) <= tolerance * (1 + std::abs(wanted))) return;
  if (++failures < 20) std::printf("%s: %.9g, not %.9g\n", what, actual, wanted);
}

}  // namespace

int check(const lrd::Kernels& isa, const Problem& problem) {
  const auto [dtype, compute, layout, masked, S, R, N] = problem;
  const bool rank_major = layout == Layout::rank, streamed = (S + R) % 2 == 0;
  failures = 0;
  std::mt19937 random(static_cast<unsigned>(S * 1000 + R * 10 + N));
  const auto eighth = [&] { return double(int(random() % 33) - 16) / 8; };
  const int64_t element = element_bytes(dtype);
  // A row of a wider matrix ends with it; what is between the rows is not a number.
  const int64_t stride_s = rank_major ? 1 : (layout == Layout::wide ? R + 3 : R), stride_r = rank_major ? S : 1;
  const int64_t factor_size = R > 0 ? (S - 1) * stride_s + (R - 1) * stride_r + 1 : 0;
  Exact factor(factor_size, element), diag(S, element), value(N * S, element), mask(S, 1);
  for (int64_t i = 0; i < factor_size * element; ++i) factor.data()[i] = char(0xff);
  std::vector<double> P(S * R), D(S), r(N * S), w(S);
  for (int64_t i = 0; i < S; ++i) {
    const bool kept = !masked || random() % 4 != 0;
    mask.data()[i] = kept;
    put(diag, i, dtype, D[i] = 0.5 + double(random() % 16) / 8);
    w[i] = kept ? 1 / D[i] : 0;
    for (int64_t j = 0; j < R; ++j) {
      P[i * R + j] = eighth();
      if (kept) put(factor, i * stride_s + j * stride_r, dtype, P[i * R + j]);
    }
    for (int64_t n = 0; n < N; ++n) {
      r[n * S + i] = eighth();
      if (kept)
        put(value, n * S + i, dtype, r[n * S + i]);
      else  // what is masked may hold anything
        std::memset(value.data() + (n * S + i) * element, 0xff, element);
    }
  }
  lrd::GaussianInputs g;
  g.factor = {factor.data(), S, R, stride_s, stride_r};
  g.N = N;
  g.diag = {diag.data(), 1};
  g.value = {value.data(), 1}, g.value_stride_n = S;
  if (masked) g.mask = {mask.data(), 1};

  const int d = static_cast<int>(dtype), c = static_cast<int>(compute);
  const int64_t ld = isa.padded_columns[c](R);
  const std::unique_ptr<double[]> sums(new double[(R + N) * ld]()), quad(new double[N]());
  double log_diag = 0;
  const auto scratch = [](int64_t bytes) { return std::unique_ptr<char[]>(new char[bytes]); };
  const auto forward = scratch(isa.gram_scratch[c](R, N));
  isa.gram_rows[d][c](g, nullptr, 0, S, forward.get(), {sums.get(), ld, quad.get(), &log_diag});

  const double tolerance = compute == Compute::f64 ? 1e-11 : 1e-4;
  std::vector<double> gram(R * R), u(N * R);
  double wanted_log = 0;
  for (int64_t i = 0; i < S; ++i) wanted_log += w[i] > 0 ? std::log(D[i]) : 0;
  for (int64_t j = 0; j < R; ++j)
    for (int64_t k = 0; k < R; ++k) {
      for (int64_t i = 0; i < S; ++i) gram[j * R + k] += w[i] * P[i * R + j] * P[i * R + k];
      if (k <= j) expect_near(sums[j * ld + k], gram[j * R + k], tolerance * 10, "gram");
    }
  for (int64_t n = 0; n < N; ++n)
    for (int64_t k = 0; k < R; ++k) {
      for (int64_t i = 0; i < S; ++i) u[n * R + k] += w[i] * r[n * S + i] * P[i * R + k];
      expect_near(sums[(R + n) * ld + k], u[n * R + k], tolerance * 10, "u");
    }
  expect_near(log_diag, wanted_log, 1e-12, "log_diag");

  std::vector<double> chol(R * R), chol_inv(R * R), z(N * R);
  const auto panel = scratch(isa.cholesky_scratch(R));
  isa.cholesky(gram.data(), chol.data(), chol_inv.data(), panel.get(), R);
  for (int64_t n = 0; n < N; ++n)  // z = L^-T L^-1 u
    for (int64_t k = 0; k < R; ++k)
      for (int64_t m = k; m < R; ++m)
        for (int64_t j = 0; j <= m; ++j) z[n * R + k] += chol_inv[m * R + k] * chol_inv[m * R + j] * u[n * R + j];

  if (N == 1 && R > lrd::kSmallRank) {  // the same again, relative to a shift: z takes all of u but itself
    const std::unique_ptr<double[]> again(new double[(R + N) * ld]()), square(new double[N]());
    isa.gram_rows[d][c](g, z.data(), 0, S, forward.get(), {again.get(), ld, square.get(), &log_diag});
    for (int64_t k = 0; k < R; ++k) expect_near(again[R * ld + k], z[k], tolerance * 100, "P^T w (r - P z) = z");
  }
  const auto second = scratch(isa.residual_scratch(R));
  const std::unique_ptr<double[]> rest(new double[N * R]()), squares(new double[N]());
  isa.residual_rows[d](g, z.data(), 0, S, second.get(), {rest.get(), R, squares.get(), nullptr});
  for (int64_t n = 0; n < N * R; ++n) expect_near(rest[n], z[n], 1e-9, "P^T w (r - P z) = z");

  // Gradients, block by block, into memory of their exact size.
  const int64_t ld_inv = (R + 7) / 8 * 8, inverse_rows = R + lrd::kMaxTileRows;
  std::vector<double> plain(inverse_rows * ld_inv), transposed(inverse_rows * ld_inv);
  std::vector<float> plain_f(inverse_rows * ld_inv), transposed_f(inverse_rows * ld_inv);
  for (int64_t i = 0; i < R; ++i)
    for (int64_t j = 0; j <= i; ++j) {
      plain[i * ld_inv + j] = transposed[j * ld_inv + i] = chol_inv[i * R + j];
      plain_f[i * ld_inv + j] = transposed_f[j * ld_inv + i] = static_cast<float>(chol_inv[i * R + j]);
    }
  const int64_t out_s = rank_major ? 1 : R, out_r = rank_major ? S : 1;
  Exact grad_factor(S * R, element), grad_diag(S, element), grad_loc(N * S, element);
  const std::vector<double> cm(N, -0.5);
  const std::vector<int32_t> value_info(N, 0);
  const double cl = -0.5;
  const bool wide = compute == Compute::f64;
  const lrd::GramGrads to{wide ? static_cast<void*>(plain.data()) : plain_f.data(),
                          wide ? static_cast<void*>(transposed.data()) : transposed_f.data(),
                          ld_inv,
                          z.data(),
                          cm.data(),
                          cl,
                          grad_factor.data(),
                          out_s,
                          out_r,
                          grad_diag.data(),
                          grad_loc.data(),
                          S,
                          false,
                          chol_inv.data(),
                          false,
                          value_info.data(),
                          streamed};
  const auto backward = scratch(isa.bwd_scratch[c](R));
  const int64_t block = lrd::bwd_block_rows(R);
  for (int64_t begin = 0; begin < S; begin += block)
    isa.log_prob_bwd_rows[d][c](&g, &to, 1, begin, std::min(S, begin + block), backward.get());
  const double rounding = element == 2 ? (dtype == DType::bf16 ? 1e-2 : 2e-3) : (element == 4 ? 1e-4 : tolerance * 10);
  for (int64_t i = 0; i < S; ++i) {
    std::vector<double> v(R), dP(R);
    double norm = 0, dD = 0;
    for (int64_t m = 0; m < R; ++m) {
      for (int64_t j = 0; j <= m; ++j) v[m] += chol_inv[m * R + j] * P[i * R + j];
      norm += v[m] * v[m];
    }
    for (int64_t k = 0; k < R; ++k)
      for (int64_t m = k; m < R; ++m) dP[k] += 2 * cl * w[i] * chol_inv[m * R + k] * v[m];
    dD += cl * w[i] * (1 - w[i] * norm);
    for (int64_t n = 0; n < N; ++n) {
      double a = r[n * S + i];
      for (int64_t j = 0; j < R; ++j) a -= P[i * R + j] * z[n * R + j];
      a *= w[i];
      for (int64_t k = 0; k < R; ++k) dP[k] -= 2 * cm[n] * a * z[n * R + k];
      dD -= cm[n] * a * a;
      expect_near(get(grad_loc, n * S + i, dtype), -2 * cm[n] * a, rounding, "grad_loc");
    }
    expect_near(get(grad_diag, i, dtype), dD, rounding, "grad_diag");
    for (int64_t k = 0; k < R; ++k)
      expect_near(get(grad_factor, i * out_s + k * out_r, dtype), dP[k], rounding, "grad_factor");
  }

  if (masked) return failures;  // a stack has no mask

  // The factor in two blocks of half its columns, if it has so many, and the values as vectors of a stack.
  lrd::Stack stack;
  stack.S = S;
  stack.T = R % 2 == 0 ? 2 : 1;
  stack.R = R / stack.T;
  stack.V = N;
  stack.factors = factor.data();
  stack.factor_stride_t = stack.R * stride_r;
  stack.factor_stride_s = stride_s;
  stack.factor_stride_r = stride_r;
  stack.factor_scale = 0.5;
  stack.vectors = value.data();
  stack.vector_stride_v = S;
  stack.vector_stride_s = 1;
  stack.centre = true;
  const int64_t columns = R + N, gram_ld = isa.padded_columns[c](columns);
  std::vector<double> X(S * columns), products(columns * gram_ld);
  for (int64_t i = 0; i < S; ++i) {
    double mean = 0;
    for (int64_t n = 0; n < N; ++n) mean += get(value, n * S + i, dtype) / double(N);
    for (int64_t j = 0; j < R; ++j) X[i * columns + j] = 0.5 * get(factor, i * stride_s + j * stride_r, dtype);
    for (int64_t n = 0; n < N; ++n) X[i * columns + R + n] = get(value, n * S + i, dtype) - mean;
  }
  const auto joint = scratch(isa.joint_gram_scratch[c](columns));
  isa.joint_gram_rows[d][c](stack, 0, S, joint.get(), lrd::GramSums{products.data(), gram_ld, nullptr, nullptr});
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t k = 0; k <= j; ++k) {
      double sum = 0;
      for (int64_t i = 0; i < S; ++i) sum += X[i * columns + j] * X[i * columns + k];
      expect_near(products[j * gram_ld + k], sum, wide ? 1e-9 : 1e-4, "joint gram");
    }

  // The first K columns as they are, and the others folded, into memory of their exact size.
  const int64_t K = (columns + 1) / 2;
  std::vector<double> basis((K + lrd::kMaxTileRows) * columns);
  std::vector<float> basis_f(basis.size());
  for (int64_t k = 0; k < K; ++k) basis[k * columns + k] = basis_f[k * columns + k] = k < R ? 0.5f : 1.0f;
  Exact kept(S * K, element), folded(S, element);
  const int64_t kept_s = rank_major ? 1 : K, kept_r = rank_major ? S : 1;
  const lrd::Projection project{wide ? static_cast<void*>(basis.data()) : basis_f.data(),
                                columns,
                                K,
                                true,
                                kept.data(),
                                kept_s,
                                kept_r,
                                g.diag,
                                folded.data()};
  const auto third = scratch(isa.project_scratch[c](columns, K));
  const int64_t rows = lrd::project_block_rows(columns, K);
  for (int64_t begin = 0; begin < S; begin += rows)
    isa.project_fold_rows[d][c](stack, project, begin, std::min(S, begin + rows), third.get());
  for (int64_t i = 0; i < S; ++i) {
    double lost = 0;
    for (int64_t j = 0; j < columns; ++j) {
      const double entry = X[i * columns + j];
      if (j < K)
        expect_near(get(kept, i * kept_s + j * kept_r, dtype), entry, rounding, "kept");
      else
        lost += entry * entry;
    }
    expect_near(get(folded, i, dtype), D[i] + lost, rounding, "folded");
  }

  // Back again, with what was kept for the gradient of it and the folded diagonal for its own: X^T pull, and the
  // gradient for X where that for the Gram matrix is twice the identity of the columns kept.
  const lrd::Pull pull{{kept.data(), S, K, kept_s, kept_r}, {kept.data(), S, K, kept_s, kept_r}, {folded.data(), 1}};
  const int64_t basis_ld = isa.padded_columns[static_cast<int>(Compute::f64)](columns);
  std::vector<double> basis_sums(K * basis_ld);
  const auto fourth = scratch(isa.project_basis_bwd_scratch(columns, K));
  isa.project_basis_bwd_rows[d](stack, pull, 0, S, fourth.get(),
                                lrd::GramSums{basis_sums.data(), basis_ld, nullptr, nullptr});
  std::vector<double> turn((K + lrd::kMaxTileRows) * columns), back((columns + lrd::kMaxTileRows) * 2 * K);
  for (int64_t k = 0; k < K; ++k)
    turn[k * columns + k] = back[k * 2 * K + k] = back[k * 2 * K + K + k] = k < R ? 0.5 : 1.0;
  Exact grad_stack(S * R, element), grad_vectors(S * N, element);
  const int64_t back_s = rank_major ? 1 : stack.R, back_r = rank_major ? S : 1;
  const lrd::StackGrads grads{turn.data(),
                              back.data(),
                              grad_stack.data(),
                              S * stack.R,
                              back_s,
                              back_r,
                              N > 0 ? grad_vectors.data() : nullptr,
                              S};
  const auto fifth = scratch(isa.project_fold_bwd_scratch(columns, K));
  const int64_t back_rows = lrd::project_bwd_block_rows(columns, K);
  for (int64_t begin = 0; begin < S; begin += back_rows)
    isa.project_fold_bwd_rows[d](stack, pull, grads, begin, std::min(S, begin + back_rows), fifth.get());
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t k = 0; k < K; ++k) {
      double sum = 0;
      for (int64_t i = 0; i < S; ++i) {
        const double y = get(kept, i * kept_s + k * kept_r, dtype);
        sum += X[i * columns + j] * y * (1 - 2 * get(folded, i, dtype));
      }
      expect_near(basis_sums[k * basis_ld + j], sum, 1e-9, "grad_basis");
    }
  for (int64_t i = 0; i < S; ++i) {
    const double pulled = get(folded, i, dtype);
    std::vector<double> dX(columns);
    double mean = 0;
    for (int64_t j = 0; j < columns; ++j) {
      const double y = j < K ? get(kept, i * kept_s + j * kept_r, dtype) : 0.0;
      dX[j] = 2 * pulled * X[i * columns + j] + (j < K ? y * (1 - 2 * pulled) + X[i * columns + j] + y : 0.0);
      if (j >= R) mean += dX[j] / double(N);
    }
    for (int64_t j = 0; j < R; ++j)
      expect_near(get(grad_stack, j / stack.R * S * stack.R + i * back_s + j % stack.R * back_r, dtype), 0.5 * dX[j],
                  rounding, "grad_stack");
    for (int64_t n = 0; n < N; ++n)
      expect_near(get(grad_vectors, n * S + i, dtype), dX[R + n] - mean, rounding, "grad_vectors");
  }
  return failures;
}

int check_all(const lrd::Kernels& isa, int64_t S, int64_t R, int64_t N) {
  int wrong = 0;
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16})
    for (const bool float32 : {false, true})
      for (const Layout layout : {Layout::row, Layout::rank, Layout::wide})
        for (const bool masked : {false, true})
          if (!float32 || dtype != DType::f64)
            wrong += check(isa, {dtype, lrd::compute_for(dtype, float32), layout, masked, S, R, N});
  return wrong;
}

}  // namespace lrd_checks
