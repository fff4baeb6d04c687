// The Gram pass of ranks 17 to 64, of one value at most, in float32 products: a block of rows in shared memory, times
// sqrt(1 / D), and tiles of 8 x 8 numbers of G in the registers of a thread; half of G only.
//
// Eight lanes side by side add different rows to the same tile. Before their sums go to float64 they are added to one
// another, and each lane keeps 8 of the 64 sums.
#pragma once

#include "row_parts.cuh"

namespace lrd::cuda {

constexpr int kSlices = 8;  // lanes of a tile

// One step of it: half of the sums for those of the lane `kHalf` / 8 away.
template <int kHalf>
__device__ __forceinline__ void give_half(float (&sums)[64]) {
  const bool upper = threadIdx.x & (kHalf / 8);
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
    const float kept = upper ? sums[k + kHalf] : sums[k], given = upper ? sums[k] : sums[k + kHalf];
    sums[k] = kept + __shfl_xor_sync(0xffffffffu, given, kHalf / 8);
  }
}

// Adds the sums of eight neighbouring lanes: number k of `sums` becomes number 8 (lane % 8) + k of the tile.
__device__ __forceinline__ void add_slices(float (&sums)[64]) {
  give_half<32>(sums);
  give_half<16>(sums);
  give_half<8>(sums);
}

// Tile (i, j) of a slot of four by four lanes: those on the diagonal fill the first kAcross / 4 warps.
template <int kAcross>
__device__ __forceinline__ void find_tile(int slot, int& i, int& j) {
  if (slot < kAcross) {
    i = j = slot;
  } else {
    for (i = 1, j = slot - kAcross; j >= i; ++i) j -= i;
  }
}

// Adds the products of row a and row c of a tile, or those at or below its diagonal.
template <bool kHalfOnly>
__device__ __forceinline__ void add_products(const float* from, int ti, int tj, float (&sums)[64]) {
  const float4* row = reinterpret_cast<const float4*>(from);
  const float4 a0 = row[2 * ti], a1 = row[2 * ti + 1], c0 = row[2 * tj], c1 = row[2 * tj + 1];
  const float a[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
  const float c[8] = {c0.x, c0.y, c0.z, c0.w, c1.x, c1.y, c1.z, c1.w};
#pragma unroll
  for (int m = 0; m < 8; ++m)
#pragma unroll
    for (int n = 0; n < (kHalfOnly ? m + 1 : 8); ++n) sums[8 * m + n] += a[m] * c[n];
}

// Block (split, b); kAcross tiles along a side of G.
template <class T, int kAcross, bool kVector>
__global__ void __launch_bounds__(kTileThreads, 1) gram_tiles_kernel(const GramArgs p) {
  constexpr int kWidth = 8 * kAcross, kTiles = kAcross * (kAcross + 1) / 2;
  constexpr int kPitch = tiles_pitch(kWidth), kRows = tiles_rows(kWidth);
  constexpr int kWarpsOfG = (kTiles + 3) / 4, kSets = kTileThreads / kWarp / kWarpsOfG;  // which divide the rows
  constexpr int kRowStep = kSets * kSlices, kStep = kRowStep * kPitch, kTurns = kFlushRows / (kRows / kRowStep);
  constexpr int kGroups = kWidth / 4, kUSlices = 256 / kWidth;
  extern __shared__ double memory[];
  Arena arena(memory);
  const TilesShared shared(arena, kWidth);
  float *block = shared.block, *scale = shared.scale, *differences = shared.differences;
  double* room = shared.room;
  const Rows& rows = p.rows;
  const int tid = threadIdx.x, lane = tid % kWarp, warp = tid / kWarp, R = p.columns.total;
  const int64_t split_of = blockIdx.x % p.splits, b = blockIdx.x / p.splits;
  reset_tickets(p.tickets, p.B);
  const T* factor = static_cast<const T*>(p.columns.factors) + b / p.columns.per_factor * p.columns.factor_b;
  const RowReader<T> read(rows, b);

  const int tile = warp % kWarpsOfG * 4 + lane / kSlices, row_of_thread = warp / kWarpsOfG * kSlices + lane % kSlices;
  const bool on_diagonal = warp % kWarpsOfG < kAcross / 4;
  int ti, tj;
  find_tile<kAcross>(tile < kTiles ? tile : kAcross, ti, tj);  // one beyond the last is not stored
  // Four columns at a time: neighbouring threads along the rows where they are contiguous, and along a row elsewhere.
  const bool along_rows = !kVector && p.columns.rank_major;
  const int first_row = along_rows ? tid % kRows : tid / kGroups;
  const int first_column = 4 * (along_rows ? tid / kRows : tid % kGroups);
  const int row_step = along_rows ? 0 : kTileThreads / kGroups;
  const int column_step = along_rows ? 4 * (kTileThreads / kRows) : 0;
  const int64_t step = row_step * p.columns.factor_s + column_step * p.columns.factor_r;
  const int u_column = tid % kWidth, u_slice = tid / kWidth;

  float sums[64] = {};
  double totals[8] = {}, u = 0.0;
  ScalarSums scalars;
  int odd = 0;
  const int64_t end = min((split_of + 1) * p.rows_per_split, rows.S);
  for (int64_t span = split_of * p.rows_per_split; span < end; span += kTurns * kRows) {
    const int64_t until = min(span + kTurns * kRows, end);
#pragma unroll 1
    for (int64_t begin = span; begin < until; begin += kRows) {
      __syncthreads();
#pragma unroll 1
      for (int i = tid; i < kRows; i += kTileThreads) {
        const int64_t row = begin + i;
        float own = -1.0f, y = 0.0f;  // -1: the row is not there, and nothing of it is read
        if (row < end && read.is_present(row)) {
          float slope;
          const Pair d = read.diag(row, &slope), r = read.difference(row), w = reciprocal(d);
          odd |= !is_ordinary(d.hi);
          scalars.add(d, w, product(product(w, r), r));
          own = rsqrtf(d.hi);
          own = __fmaf_rn(0.5f * own, __fmaf_rn(-d.hi * own, own, 1.0f), own);
          y = own * r.hi;
        }
        scale[i] = own;
        differences[i] = y;
      }
      __syncthreads();
      if (!along_rows || tid < kRows * (kTileThreads / kRows)) {
        const T* from = factor + (begin + first_row) * p.columns.factor_s + first_column * p.columns.factor_r;
#pragma unroll 1
        for (int row = first_row, column = first_column; row < kRows && column < kWidth;
             row += row_step, column += column_step, from += step) {
          const float own = scale[row], kept = fmaxf(own, 0.0f);
          float x[4] = {};
          if (own >= 0.0f) load_row<T, 4, kVector>(from, p.columns.factor_r, R - column, x);
          reinterpret_cast<float4*>(block + row * kPitch + column)[0] =
              make_float4(x[0] * kept, x[1] * kept, x[2] * kept, x[3] * kept);
        }
      }
      __syncthreads();
      // The end is by an argument, which is 1: otherwise compilers take turns out of the loops.
      const float* last_row = block + kRows * kPitch * p.pairs;
#pragma unroll 1
      for (const float* row = block + row_of_thread * kPitch; row < last_row && !on_diagonal; row += 2 * kStep) {
        add_products<false>(row, ti, tj, sums);
        add_products<false>(row + kStep, ti, tj, sums);
      }
#pragma unroll 1
      for (const float* row = block + row_of_thread * kPitch; row < last_row && on_diagonal; row += 2 * kStep) {
        add_products<true>(row, ti, ti, sums);
        add_products<true>(row + kStep, ti, ti, sums);
      }
      if (p.values > 0 && tid < 256) {
        float sum = 0.0f;
#pragma unroll 4
        for (int k = 0; k < kRows / kUSlices; ++k) {
          const int row = u_slice + k * kUSlices;
          sum += block[row * kPitch + u_column] * differences[row];
        }
        u += static_cast<double>(sum);
      }
    }
    add_slices(sums);
#pragma unroll
    for (int k = 0; k < 8; ++k) totals[k] += static_cast<double>(sums[k]);
#pragma unroll
    for (int k = 0; k < 64; ++k) sums[k] = 0.0f;
    scalars.settle();
  }

  // Through shared memory to the slot: G of the sets, then u of the slices, then the scalars of the warps.
  odd = __syncthreads_or(odd);
  const SlotLayout at(R, rows.N);
  double* slot = p.slots + (b * p.splits + split_of) * at.numbers;
#pragma unroll
  for (int k = 0; k < 8; ++k)
    room[(warp / kWarpsOfG * 4 * kWarpsOfG + tile) * 64 + 8 * (lane % kSlices) + k] = totals[k];
  __syncthreads();
  for (int e = tid; e < kTiles * 64; e += kTileThreads) {
    double sum = 0.0;
    for (int set = 0; set < kSets; ++set) sum += room[set * 4 * kWarpsOfG * 64 + e];
    int si, sj;
    find_tile<kAcross>(e / 64, si, sj);
    const int i = 8 * si + e / 8 % 8, j = 8 * sj + e % 8;
    if (j <= i && i < R) slot[i * (i + 1) / 2 + j] = sum;
  }
  __syncthreads();
  if (tid < 256) room[tid] = u;
  scalars.add_threads(room + 256);
  __syncthreads();
  if (tid < R && p.values > 0) {
    double sum = 0.0;
    for (int k = 0; k < kUSlices; ++k) sum += room[k * kWidth + tid];
    slot[at.u + tid] = sum;
  }
  if (tid == 0) {
    if (p.values > 0) slot[at.quad] = scalars.quad;
    slot[at.log_diag] = scalars.rest;
    slot[at.odd] = odd != 0;
  }
}

}  // namespace lrd::cuda
