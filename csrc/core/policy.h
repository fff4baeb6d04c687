// The numerical policy: every constant that decides in which precision something is computed, and the certificates
// built from them. Shared by the CPU and the CUDA kernels; lrd_kernels/_policy.py has the same numbers, and a test
// compares the two.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace lrd {

// The `precision` argument of the ops. `declining` is "auto", except that an item whose growth exceeds kCholeskyGrowth,
// or the diagonal of whose Gram matrix exceeds kExplainedRatio, is reported as failed, so that the caller can look into
// it and compute it by QR (log_prob_fwd on the CPU).
enum class Precision : int64_t { automatic = 0, float64 = 1, float32 = 2, declining = 3 };

// ---- sums of float32 products ----

// Float32 partial sums are added to a float64 sum after at most this many rows.
constexpr int64_t kFlushRows = 128;
// The error of such a sum, relative to sqrt(G_jj G_kk); it grows with kFlushRows.
constexpr double kFloat32SumError = 0x1p-22;
// The same of sums in float64.
constexpr double kFloat64SumError = 0x1p-50;
// The same of sums of pairs of float32, as the CUDA kernels form them. A product of a pair and a number errs by 2^-47.
// The lower half of a sum, about 2^-21 of it after 64 rows, is rounded by 2^-24 at each addition.
constexpr double kPairSumError = 0x1p-42;
// Diagonal entries of which pairs are formed: their reciprocals, and the lower halves, are normal float32 numbers.
constexpr float kPairLeast = 0x1p-80f;
constexpr float kPairMost = 0x1p+80f;
// r^T w r is always summed in float64: its error relative to the sum error above.
constexpr double kQuadError = 0x1p-29;
// The rounding error of M computed with L^-1, relative to its terms.
constexpr double kInverseError = 0x1p-46;
// The largest error of M, relative to M and to the log-density.
constexpr double kTolerance = 2.5e-7;

// From this rank on, the CPU tries float32 products. Below it float64 costs too little to matter.
constexpr int64_t kFloat32Rank = 32;
// The largest growth for which L^-1 from float32 products is accurate enough. The growth is the factor by which an
// error of the Gram sums is larger in L^-1 than it would be for orthogonal columns.
constexpr double kFloat32Growth = 8.0;
// Rows of higher leverage h are computed in float64, because 1 - h cancels.
constexpr double kHighLeverage = 0.1;
// So are rows of a larger weight 1 / D, and every row where the diagonal of L^-1 has a smaller entry: they come near
// the limits of float32's range.
constexpr double kFloat32Weight = 1e18;
constexpr double kFloat32Inverse = 1e-18;

// ---- the Cholesky factorisation of the capacitance ----

// The largest growth for which it gives the log-density to 1e-7.
constexpr double kCholeskyGrowth = 1e10;
// An output of this squared signal-to-noise ratio, w |p|^2, takes nearly all digits from the gradients of the others.
// The diagonal of the Gram matrix bounds it.
constexpr double kExplainedRatio = 1e10;
// Times R and the diagonal entry: added to the diagonal when rounding has made a pivot negative.
constexpr double kPivotNudge = 0x1p-50;
// The largest rank that one launch factorises in shared memory, and the largest one of the CUDA kernels. Above, torch's
// routines are used.
constexpr int64_t kFusedRank = 128;
constexpr int64_t kBlockedRank = 1024;

// ---- the diagonal eps + exp(raw) ----

// The exponential is constant above this limit, by the dtype of `raw`: there it is finite in that dtype, and its square
// in float64.
constexpr double kExpLimitFloat64 = 350.0;
constexpr double kExpLimitFloat32 = 80.0;
constexpr double kExpLimitBFloat16 = 80.0;
constexpr double kExpLimitFloat16 = 11.0;

constexpr double kLog2Pi = 1.8378770664093453;

// ---- certificates ----

// Whether float32 products were accurate enough for L^-1.
LRD_HOST_DEVICE bool certified(double growth) { return growth <= kFloat32Growth; }

// The error of M = quad - u^T C^-1 u with sums of this relative error, `weighted` being sum_j z_j^2 G_jj.
LRD_HOST_DEVICE double maha_error(double sum_error, double weighted, double quad) {
  return sum_error * (weighted + 2.0 * std::sqrt(weighted * quad) + quad * kQuadError);
}

// The same where M = quad - |y|^2, y = L^-1 u, `norm` being |y|^2, and L^-1 was computed from sums of this error.
LRD_HOST_DEVICE double maha_error_by_inverse(double sum_error, double norm, double growth, double quad) {
  return sum_error * norm * growth + kInverseError * (norm * growth + quad);
}

// Whether an error of M is small relative to M and to the log-density of S outputs.
LRD_HOST_DEVICE bool tolerable(double error, double maha, double logdet, int64_t S) {
  const double density = 0.5 * std::fabs(maha + logdet + static_cast<double>(S) * kLog2Pi);
  return error <= kTolerance * maha && error <= kTolerance * density;
}

}  // namespace lrd
