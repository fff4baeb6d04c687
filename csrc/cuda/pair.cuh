// Numbers of about 48 bits as unevaluated sums of two float32 numbers, for GPUs whose float64 is slow. The intrinsics
// keep the compiler from fusing what has to be rounded.
#pragma once

#include <cstdint>

namespace lrd::cuda {

struct Pair {
  float hi = 0.0f, lo = 0.0f;
  __device__ __forceinline__ double wide() const { return static_cast<double>(hi) + static_cast<double>(lo); }
};

__device__ __forceinline__ Pair split(double x) {
  const float hi = static_cast<float>(x);
  return {hi, static_cast<float>(x - static_cast<double>(hi))};
}

// a + b exactly.
__device__ __forceinline__ Pair two_sum(float a, float b) {
  const float s = __fadd_rn(a, b), t = __fsub_rn(s, a);
  return {s, __fadd_rn(__fsub_rn(a, __fsub_rn(s, t)), __fsub_rn(b, t))};
}

// The same with three additions: the comparison and the two selections take the integer pipe.
__device__ __forceinline__ Pair sorted_sum(float a, float b) {
  const bool larger = fabsf(a) >= fabsf(b);
  const float big = larger ? a : b, small = larger ? b : a, s = __fadd_rn(big, small);
  return {s, __fsub_rn(small, __fsub_rn(s, big))};
}

// a b exactly.
__device__ __forceinline__ Pair two_product(float a, float b) {
  const float p = __fmul_rn(a, b);
  return {p, __fmaf_rn(a, b, -p)};
}

__device__ __forceinline__ Pair scaled(Pair a, float b) {
  const Pair p = two_product(a.hi, b);
  return {p.hi, __fmaf_rn(a.lo, b, p.lo)};
}

__device__ __forceinline__ Pair product(Pair a, Pair b) {
  const Pair p = two_product(a.hi, b.hi);
  return {p.hi, __fmaf_rn(a.hi, b.lo, __fmaf_rn(a.lo, b.hi, p.lo))};
}

__device__ __forceinline__ void add_to(Pair& sum, Pair x) {
  const Pair s = sorted_sum(sum.hi, x.hi);
  sum = {s.hi, __fadd_rn(sum.lo, __fadd_rn(s.lo, x.lo))};
}

// 1 / d to about 2^-46, for |d| within the limits of kPairLeast and kPairMost.
__device__ __forceinline__ Pair reciprocal(Pair d) {
  float w;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"(d.hi));
  w = __fmaf_rn(w, __fmaf_rn(-d.hi, w, 1.0f), w);
  return {w, __fmul_rn(w, __fmaf_rn(-d.lo, w, __fmaf_rn(-d.hi, w, 1.0f)))};
}

// exp(x) to about 2^-28, x at most 80 or so: 1 + r + r^2 (1/2 + ...) of the remainder r of a power of two; only the
// last term is rounded to float32.
__device__ __forceinline__ Pair exponential(float x) {
  const float n = rintf(__fmul_rn(x, 1.442695041f));
  const Pair r = two_sum(__fmaf_rn(n, -0.693145752f, x), __fmul_rn(n, -1.42860682e-6f));  // ln 2: 16 bits, the rest
  float tail = __fmaf_rn(r.hi, 1.0f / 5040.0f, 1.0f / 720.0f);
  tail = __fmaf_rn(r.hi, tail, 1.0f / 120.0f);
  tail = __fmaf_rn(r.hi, tail, 1.0f / 24.0f);
  tail = __fmaf_rn(r.hi, tail, 1.0f / 6.0f);
  tail = __fmaf_rn(r.hi, tail, 0.5f);
  tail = __fmaf_rn(__fmul_rn(r.hi, r.hi), tail, __fmaf_rn(r.hi, r.lo, r.lo));
  const Pair one = two_sum(1.0f, r.hi), sum = two_sum(one.hi, __fadd_rn(one.lo, tail));
  const float power = n < -126.0f ? 0.0f : __int_as_float((static_cast<int>(n) + 127) << 23);
  return {__fmul_rn(sum.hi, power), __fmul_rn(sum.lo, power)};
}

}  // namespace lrd::cuda
