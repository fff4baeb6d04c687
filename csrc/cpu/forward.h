// What the forward ops share: sums over rows (gram.cpp), and what becomes of them in R dimensions (capacitance.cpp).
#pragma once

#include <cstdint>
#include <vector>

#include "sum_chunks.h"
#include "tensors.h"

namespace lrd {

// The inputs item by item, without asking torch for strides each time: of many small items that would take longest.
class Items {
 public:
  explicit Items(const Inputs& in) : shared_(in.items_per_factor()) {
    if (in.B == 0) return;
    first_ = in.item(0);
    factor_ = step(in.factor);
    diag_ = step(in.diag);
    if (in.mask) mask_ = step(*in.mask);
    if (in.value) value_ = step(*in.value);
    if (in.loc) loc_ = step(*in.loc);
  }

  GaussianInputs operator[](int64_t b) const {
    GaussianInputs g = first_;
    g.factor.data = static_cast<const char*>(g.factor.data) + b / shared_ * factor_;
    move(g.diag, b * diag_);
    move(g.mask, b * mask_);
    move(g.value, b * value_);
    move(g.loc, b * loc_);
    return g;
  }

 private:
  static int64_t step(const Tensor& tensor) { return tensor.stride(0) * static_cast<int64_t>(tensor.element_size()); }
  static void move(VectorView& view, int64_t bytes) {
    if (view.data) view.data = static_cast<const char*>(view.data) + bytes;
  }

  GaussianInputs first_;
  int64_t shared_, factor_ = 0, diag_ = 0, mask_ = 0, value_ = 0, loc_ = 0;  // bytes from one item to the next
};

// Sums over rows of each Gaussian b and value n, in double.
struct Sums {
  double* gram;      // [B, R, R], of which the lower triangle is written; null where it is not wanted
  double* u;         // [B, N, R]
  double* quad;      // [B, N]
  double* log_diag;  // [B]
};

// Sums the rows of the given items. With a shift [B, R] (one value, a rank above kSmallRank) the differences are
// r - P shift, and u and quad are put relative to it as described at sum_residuals.
void sum_gram(const Inputs& in, const std::vector<int64_t>& items, Compute compute, const Chunks& chunks,
              const double* shift, const Sums& out);

// Puts u and quad of the given items relative to a shift s [B, N, R]: u = P^T w (r - P s) - s and
// quad = (r - P s)^T w (r - P s) + |s|^2. Then M = quad - u^T C^-1 u and z = s + C^-1 u, as without a shift, and where
// s is near z nothing cancels.
void sum_residuals(const Inputs& in, const std::vector<int64_t>& items, const double* shift, const Sums& out);

// A row of the ops' `summary`.
struct Summary {
  double growth;  // infinity where a number was not finite
  double logdet;  // of Sigma
};

// C = I + gram -> L and L^-1, which may overwrite gram. `scratch` as for Kernels::cholesky.
Summary factorise(const double* gram, double log_diag, double* chol, double* chol_inv, void* scratch, int64_t R);

// z = C^-1 u by way of L y = u; returns |y|^2 = u^T C^-1 u.
double solve_capacitance(const double* chol, const double* u, double* z, int64_t R);

}  // namespace lrd
