// What kernels with a thread per row share: the scalars of a row as pairs, its columns in registers, logarithms.
#pragma once

#include <type_traits>

#include "common.cuh"
#include "pair.cuh"

namespace lrd::cuda {

// Rows that a thread adds up before its sums go to float64.
template <class Sum>
constexpr int kFlushTurns = 64;
template <>
inline constexpr int kFlushTurns<float> = kFlushRows / 4;  // and then four lanes are added in float32

// D for which numbers and their reciprocals are within the range of pairs. Others, NaN among them, are not ordinary:
// the item is computed again in float64.
__device__ __forceinline__ bool is_ordinary(float d) { return d >= kPairLeast && d <= kPairMost; }

// The sum of the logarithms of ordinary numbers: the product of their mantissas, within [1/sqrt 2, sqrt 2), and a sum
// of exponents. After at most 128 numbers the product is to be brought back to this range.
struct LogProduct {
  Pair mantissa = {1.0f, 0.0f};
  int exponents = 0;  // at most 80 a number

  __device__ __forceinline__ void add(float d) {
    const int bits = __float_as_int(d), exponent = (bits - 0x3f3504f3) >> 23;
    mantissa = scaled(mantissa, __int_as_float(bits - (exponent << 23)));
    exponents += exponent;
  }
  __device__ __forceinline__ void renormalise() {
    const int exponent = (__float_as_int(mantissa.hi) - 0x3f3504f3) >> 23;
    const float power = __int_as_float((127 - exponent) << 23);
    mantissa = {mantissa.hi * power, mantissa.lo * power};
    exponents += exponent;
  }
  // The product of all lanes.
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const Pair other = {__shfl_xor_sync(0xffffffffu, mantissa.hi, offset),
                          __shfl_xor_sync(0xffffffffu, mantissa.lo, offset)};
      mantissa = product(mantissa, other);
      exponents += __shfl_xor_sync(0xffffffffu, exponents, offset);
    }
    renormalise();
  }
  __device__ double value() const {
    return log(mantissa.wide()) + static_cast<double>(exponents) * 0.69314718055994530942;
  }
};

// Per-row scalars that a block sums. quad and the logarithms leave float32 with `settle`, every 128 rows at the latest.
struct ScalarSums {
  Pair quads;
  LogProduct product_of_d;
  float log_rest = 0.0f;
  double quad = 0.0, rest = 0.0;

  __device__ __forceinline__ void add(Pair d, Pair w, Pair square) {
    add_to(quads, square);
    product_of_d.add(d.hi);
    log_rest = __fmaf_rn(d.lo, w.hi, log_rest);
  }
  __device__ __forceinline__ void settle() {
    quad += quads.wide();
    rest += static_cast<double>(log_rest);
    quads = {}, log_rest = 0.0f;
    product_of_d.renormalise();
  }
  // Over the block: r^T w r and sum log D to quad and rest of thread 0. `room` has 4 numbers for each warp.
  __device__ __forceinline__ void add_threads(double* room) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    quad = warp_sum(quad), rest = warp_sum(rest);
    product_of_d.add_lanes();
    if (lane == 0) {
      room[4 * warp] = quad, room[4 * warp + 1] = rest;
      room[4 * warp + 2] = product_of_d.mantissa.wide();
      room[4 * warp + 3] = static_cast<double>(product_of_d.exponents);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    double mantissa = 1.0, exponents = 0.0;
    quad = rest = 0.0;
    for (int k = 0; k < warps; ++k) {
      quad += room[4 * k], rest += room[4 * k + 1];
      mantissa *= room[4 * k + 2], exponents += room[4 * k + 3];
    }
    rest += log(mantissa) + exponents * 0.69314718055994530942;
  }
};

// Reads the scalars of one item's rows, of the value `n`.
template <class T>
class RowReader {
 public:
  __device__ __forceinline__ RowReader(const Rows& rows, int64_t b, int64_t n = 0) : rows_(rows) {
    diag_ = static_cast<const T*>(rows.diag) + b * rows.diag_b;
    mask_ = rows.mask ? rows.mask + b * rows.mask_b : nullptr;
    value_ = rows.value ? static_cast<const T*>(rows.value) + b * rows.value_b + n * rows.value_n : nullptr;
    loc_ = rows.loc ? static_cast<const T*>(rows.loc) + b * rows.loc_b + n * rows.loc_n : nullptr;
  }
  __device__ __forceinline__ bool is_present(int64_t row) const { return !mask_ || mask_[row * rows_.mask_s] != 0; }
  // D, and its derivative for the stored number.
  __device__ __forceinline__ Pair diag(int64_t row, float* slope) const {
    const float raw = widen<float>(diag_[row * rows_.diag_s]);
    *slope = 1.0f;
    if (!rows_.exp_diag) return {raw, 0.0f};
    const float limit = rows_.narrow_limit;
    const Pair grown = exponential(raw > limit && raw < __int_as_float(0x7f800000) ? limit : raw);
    *slope = grown.hi;
    const Pair d = two_sum(rows_.narrow_eps[0], grown.hi);
    return {d.hi, __fadd_rn(d.lo, __fadd_rn(rows_.narrow_eps[1], grown.lo))};
  }
  // value - loc, exactly; 0 without values.
  __device__ __forceinline__ Pair difference(int64_t row) const {
    const float value = value_ ? widen<float>(value_[row * rows_.value_s]) : 0.0f;
    return two_sum(value, loc_ ? -widen<float>(loc_[row * rows_.loc_s]) : 0.0f);
  }

 private:
  const Rows& rows_;
  const T *diag_, *value_, *loc_;
  const uint8_t* mask_;
};

// kR numbers from aligned memory, 16 bytes at a time, or 8 where there are no more.
template <class T, int kR>
union RowWords {
  static constexpr int kBytes = kR * static_cast<int>(sizeof(T));
  using Word = std::conditional_t<kBytes % 16 == 0, uint4, uint2>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  Word words[kWords];
  T numbers[kR];
  __device__ RowWords() {}
};

// A row of R <= kR columns, zeros beyond: contiguous and aligned where kVector, else `step` apart.
template <class T, int kR, bool kVector>
__device__ __forceinline__ void load_row(const T* from, int64_t step, int R, float (&to)[kR]) {
  if constexpr (kVector) {
    RowWords<T, kR> row;
#pragma unroll
    for (int k = 0; k < row.kWords; ++k)
      row.words[k] = reinterpret_cast<const typename RowWords<T, kR>::Word*>(from)[k];
#pragma unroll
    for (int k = 0; k < kR; ++k) to[k] = widen<float>(row.numbers[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kR; ++k) to[k] = k < R ? widen<float>(from[k * step]) : 0.0f;
  }
}

template <class T, int kR, bool kVector>
__device__ __forceinline__ void store_row(T* to, int64_t step, int R, const float (&from)[kR]) {
  if constexpr (kVector) {
    RowWords<T, kR> row;
#pragma unroll
    for (int k = 0; k < kR; ++k) row.numbers[k] = narrow<T>(from[k]);
#pragma unroll
    for (int k = 0; k < row.kWords; ++k) reinterpret_cast<typename RowWords<T, kR>::Word*>(to)[k] = row.words[k];
  } else {
#pragma unroll
    for (int k = 0; k < kR; ++k)
      if (k < R) to[k * step] = narrow<T>(from[k]);
  }
}

}  // namespace lrd::cuda
