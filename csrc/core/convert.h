// Conversion between stored elements and the arithmetic types. Included only by the per-instruction-set sources.
#pragma once

#include <cstdint>
#include <cstring>

#include "types.h"

namespace lrd {
namespace LRD_ISA_NAMESPACE {

template <class To, class From>
static inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

static inline float load(const float& x) { return x; }
static inline double load(const double& x) { return x; }
static inline float load(const BFloat16& x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

// Branch-free: shift the magnitude into float's fields, rescale by 2^112, then repair infinities and NaN.
static inline float load(const Half& x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t(x.bits & 0x7fffu) << 13;
  const float scaled = bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return bit_cast<float>(bit_cast<uint32_t>(scaled) | special | sign);
}

static inline void store(float& out, double x) { out = float(x); }
static inline void store(double& out, double x) { out = x; }

// Round to nearest, ties to even; NaN stays NaN.
static inline void store(BFloat16& out, double wide) {
  const float x = float(wide);
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out.bits = uint16_t(x != x ? 0x7fc0u : rounded);
}

static inline void store(Half& out, double wide) {
  const float x = float(wide);
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Subnormal halves: adding 0.5 leaves the rounded half in the low bits of the float.
  const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t half = magnitude < 0x38800000u ? small : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  out.bits = uint16_t(half | sign);
}

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
