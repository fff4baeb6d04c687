// The backward pass of ranks 17 to 64, of one value at most, in float32 products: a block of rows in shared memory,
// where V = P L^-T and Q = V L^-1 take its place, and 8 x 4 numbers of these in the registers of a thread. A warp makes
// 8 columns, and leaves out the products with the zeros of L^-1.
#pragma once

#include "gradient_weights.cuh"
#include "row_parts.cuh"

namespace lrd::cuda {

// sum + a . (x, y, z, w), one product after the other, so that each is fused.
__device__ __forceinline__ float add_dot(float sum, float4 a, float x, float y, float z, float w) {
  sum += a.x * x;
  sum += a.y * y;
  sum += a.z * z;
  return sum + a.w * w;
}
__device__ __forceinline__ float add_dot(float sum, float4 a, float4 b) { return add_dot(sum, a, b.x, b.y, b.z, b.w); }

// Adds the pairs of the lanes that share a row; each gets the sum.
template <int kSharing>
__device__ __forceinline__ Pair add_sharing(Pair x) {
  if constexpr (kSharing == 2)
    add_to(x, {__shfl_xor_sync(0xffffffffu, x.hi, 16), __shfl_xor_sync(0xffffffffu, x.lo, 16)});
  return x;
}

// Block (run of blocks of rows, f); kWidth columns, of which R are there.
template <class T, int kWidth, bool kVector>
__global__ void __launch_bounds__(kThreads, 1) gradient_tiles_kernel(const BackwardArgs p) {
  constexpr int kPitch = kWidth + 4, kRows = gradient_rows(kWidth), kGroups = kWidth / 4;
  constexpr int kSharing = kThreads / kRows, kOwn = kWidth / kSharing;  // lanes of a row, and columns of each
  extern __shared__ double memory[];
  Arena arena(memory);
  const GradientShared shared(arena, kWidth);
  float *inverse = shared.inverse, *block = shared.block, *w = shared.w, *slope = shared.slope, *pull = shared.pull;
  float *coefficient = shared.coefficient, *of_diag = shared.of_diag;
  Pair *difference = shared.difference, *along = shared.along;
  const int tid = threadIdx.x, lane = tid % kWarp, warp = tid / kWarp, R = p.R;
  const int64_t b = blockIdx.x / p.blocks, run = blockIdx.x % p.blocks * p.block_rows, S = p.rows.S;
  const double growth = p.summary[2 * b];
  const bool good = isfinite(growth), used = good && p.rows.N > 0 && p.value_info[b] == 0;
  for (int e = tid; e < kWidth * kWidth; e += kThreads) {
    const int i = e / kWidth, j = e % kWidth;
    inverse[i * kPitch + j] = i < R && j <= i ? static_cast<float>(p.chol_inv[(b * R + i) * R + j]) : 0.0f;
  }
  if (tid < kWidth) along[tid] = split(used && tid < R ? p.z[b * R + tid] : 0.0);
  const float of_maha = used ? static_cast<float>(p.maha * grad_of(p, b, 0)) : 0.0f;
  const float of_logdet = p.need_logdet ? static_cast<float>(logdet_weight(p, b)) : 0.0f;
  const T* factor = static_cast<const T*>(p.factor) + b * p.factor_b;
  T* grad_factor = p.grad_factor ? static_cast<T*>(p.grad_factor) + b * p.out_b : nullptr;
  const RowReader<T> read(p.rows, b);

  // Of a product: eight rows, 16 apart, and four columns. Warps of one scheduler have many columns and few.
  constexpr int kAcross = kWidth / 8;
  const int place = warp % kAcross, eight = place < kAcross / 2 ? place : kAcross + kAcross / 2 - 1 - place;
  const int column = 8 * eight + 4 * (lane / 16), first_row = warp / kAcross * 128 + lane % 16;
  // Of a row's scalars: a row, shared with the lane 16 away where there are fewer rows than threads.
  const int row_of_thread = kSharing == 2 ? warp * 16 + lane % 16 : tid,
            first_own = kSharing == 2 ? lane / 16 * kOwn : 0;
  // Of loads and stores: four columns at a time, neighbouring threads along the rows where they are contiguous.
  const bool along_rows = !kVector && p.rank_major;
  const int row_moved = along_rows ? tid % kRows : tid / kGroups,
            column_moved = 4 * (along_rows ? tid / kRows : tid % kGroups);
  const int row_step = along_rows ? 0 : kThreads / kGroups, column_step = along_rows ? 4 * (kThreads / kRows) : 0;

  int imprecise = p.flag_uncertain && p.need_logdet && !certified(growth);
  const int64_t end = min(run + p.block_rows, S);
#pragma unroll 1
  for (int64_t begin = run; begin < end; begin += kRows) {
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < kRows; i += kThreads) {
      const int64_t row = begin + i;
      w[i] = -1.0f, slope[i] = 0.0f, difference[i] = {};
      if (good && row < end && read.is_present(row)) {
        float own;
        const Pair d = read.diag(row, &own);
        imprecise |= !is_ordinary(d.hi);
        w[i] = reciprocal(d).hi;
        slope[i] = own;
        difference[i] = read.difference(row);
      }
    }
    __syncthreads();
    const T* from = factor + (begin + row_moved) * p.factor_s + column_moved * p.factor_r;
#pragma unroll 1
    for (int row = row_moved, k = column_moved; row < kRows && k < kWidth; row += row_step, k += column_step) {
      float x[4] = {};
      if (!(w[row] < 0.0f)) load_row<T, 4, kVector>(from, p.factor_r, R - k, x);
      reinterpret_cast<float4*>(block + row * kPitch + k)[0] = make_float4(x[0], x[1], x[2], x[3]);
      from += row_step * p.factor_s + column_step * p.factor_r;
    }
    __syncthreads();

    const float4* own_row = reinterpret_cast<const float4*>(block + row_of_thread * kPitch + first_own);
    const float weight = fmaxf(w[row_of_thread], 0.0f);  // 0 where the row is not there
    Pair rest = first_own == 0 ? difference[row_of_thread] : Pair{};
#pragma unroll 2
    for (int k = 0; k < kOwn / 4; ++k) {
      const float4 x = own_row[k];
      const Pair* z = along + first_own + 4 * k;
      add_to(rest, scaled(z[0], -x.x));
      add_to(rest, scaled(z[1], -x.y));
      add_to(rest, scaled(z[2], -x.z));
      add_to(rest, scaled(z[3], -x.w));
    }
    rest = add_sharing<kSharing>(rest);
    const float a = weight * (rest.hi + rest.lo);
    if (first_own == 0) {
      coefficient[row_of_thread] = 2.0f * of_maha * a;
      of_diag[row_of_thread] = -of_maha * a * a;
      pull[row_of_thread] = 2.0f * of_logdet * weight;
    }

    float made[8][4] = {};
    if (p.need_logdet) {
#pragma unroll 1
      for (int k = 0; k < 8 * (eight + 1); k += 4) {
        float4 small[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) small[n] = *reinterpret_cast<const float4*>(inverse + (column + n) * kPitch + k);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float4 x = *reinterpret_cast<const float4*>(block + (first_row + 16 * i) * kPitch + k);
#pragma unroll
          for (int n = 0; n < 4; ++n) made[i][n] = add_dot(made[i][n], x, small[n]);
        }
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 8; ++i)
        *reinterpret_cast<float4*>(block + (first_row + 16 * i) * kPitch + column) =
            make_float4(made[i][0], made[i][1], made[i][2], made[i][3]);
      __syncthreads();
      float norm = 0.0f;
#pragma unroll 4
      for (int k = 0; k < kOwn / 4; ++k) norm = add_dot(norm, own_row[k], own_row[k]);
      if (kSharing == 2) norm += __shfl_xor_sync(0xffffffffu, norm, 16);
      const float leverage = weight * norm;
      imprecise |= p.flag_uncertain && !(leverage <= static_cast<float>(kHighLeverage));
      if (first_own == 0) of_diag[row_of_thread] += of_logdet * weight * (1.0f - leverage);
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n) made[i][n] = 0.0f;
      if (grad_factor) {
#pragma unroll 1
        for (int m = 8 * eight; m < kWidth; m += 4) {
          float4 small[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) small[n] = *reinterpret_cast<const float4*>(inverse + (m + n) * kPitch + column);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float4 v = *reinterpret_cast<const float4*>(block + (first_row + 16 * i) * kPitch + m);
            made[i][0] = add_dot(made[i][0], v, small[0].x, small[1].x, small[2].x, small[3].x);
            made[i][1] = add_dot(made[i][1], v, small[0].y, small[1].y, small[2].y, small[3].y);
            made[i][2] = add_dot(made[i][2], v, small[0].z, small[1].z, small[2].z, small[3].z);
            made[i][3] = add_dot(made[i][3], v, small[0].w, small[1].w, small[2].w, small[3].w);
          }
        }
      }
    }
    __syncthreads();
    if (grad_factor) {
      const float z[4] = {along[column].hi, along[column + 1].hi, along[column + 2].hi, along[column + 3].hi};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = first_row + 16 * i;
        const float of_q = pull[row], of_z = coefficient[row];
        *reinterpret_cast<float4*>(block + row * kPitch + column) =
            make_float4(of_q * made[i][0] - of_z * z[0], of_q * made[i][1] - of_z * z[1],
                        of_q * made[i][2] - of_z * z[2], of_q * made[i][3] - of_z * z[3]);
      }
      __syncthreads();
      T* to = grad_factor + (begin + row_moved) * p.out_s + column_moved * p.out_r;
#pragma unroll 1
      for (int row = row_moved, k = column_moved; row < kRows && k < kWidth; row += row_step, k += column_step) {
        const float4 x = *reinterpret_cast<const float4*>(block + row * kPitch + k);
        const float numbers[4] = {x.x, x.y, x.z, x.w};
        if (begin + row < end) store_row<T, 4, kVector>(to, p.out_r, R - k, numbers);
        to += row_step * p.out_s + column_step * p.out_r;
      }
    }
#pragma unroll 1
    for (int i = tid; i < kRows; i += kThreads) {
      if (begin + i >= end) break;
      if (p.grad_diag) static_cast<T*>(p.grad_diag)[b * S + begin + i] = narrow<T>(of_diag[i] * slope[i]);
      if (p.grad_loc) static_cast<T*>(p.grad_loc)[b * S + begin + i] = narrow<T>(-coefficient[i]);
    }
  }
  imprecise = __syncthreads_or(imprecise);
  if (p.flags && tid == 0) p.flags[blockIdx.x] = imprecise != 0;
}

}  // namespace lrd::cuda
