// How every kernel is launched, and how its shared memory is laid out: grid, threads and arrays from the sizes alone.
// Plain C++: the kernels, the launchers and the tests use the same functions. Nothing here depends on the GPU but the
// shared memory that a block of it may have, so that sums are split the same way, and give the same bits, everywhere.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../core/arena.h"
#include "../core/policy.h"
#include "args.h"

namespace lrd::cuda {

// One-dimensional; nothing is launched where `grid` is 0.
struct Launch {
  int64_t grid = 0;
  int block = 0;
  int64_t shared = 0;  // bytes
};

constexpr int kWarp = 32;
constexpr int kThreads = 256;                  // of the S-sized kernels
constexpr int64_t kDefaultShared = 48 * 1024;  // what a block has on any GPU without asking
constexpr int64_t kStaticReserve = 1024;       // of the limit, left for arrays of fixed size

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The bytes of a layout in a compute type.
template <template <class> class Layout, class... Sizes>
int64_t shared_bytes(bool wide, Sizes... sizes) {
  return wide ? bytes_of<Layout<double>>(sizes...) : bytes_of<Layout<float>>(sizes...);
}

// ---- gram_fwd and joint_gram_fwd ----

constexpr int kGramValues = 4;        // values that one launch of the Gram kernel takes along
constexpr int64_t kGramBlocks = 512;  // so many blocks where there are rows enough

// Rows that the Gram kernel holds at a time: 16 KB of a tile in either compute type.
constexpr int gram_rows(int tile, bool wide) { return (wide ? 2048 : 4096) / tile; }
// Distance of rows in shared memory: whole 16 bytes, and not a multiple of 32 banks.
constexpr int gram_pitch(int tile, bool wide) { return tile + (wide ? 2 : 4); }

template <class A>
struct GramShared {
  double* differences;  // [kGramValues, rows]
  A* scale;             // [rows], in room for doubles
  A *left, *right;      // [rows, pitch]; the right one only where `two`, otherwise the left one serves as both

  template <class Memory>
  LRD_HOST_DEVICE GramShared(Memory& memory, int rows, int pitch, bool two) {
    double* room;
    memory.take(differences, kGramValues * rows);
    memory.take(room, rows);
    scale = reinterpret_cast<A*>(room);
    memory.take(left, static_cast<int64_t>(rows) * pitch);
    right = left;
    if (two) memory.take(right, static_cast<int64_t>(rows) * pitch);
  }
};

constexpr int kTileThreads = 288;  // of the kernel with tiles in registers: 36 tiles of eight lanes each
// Rows that it holds, by the columns, 32 or 64; and their distance: whole 16 bytes, and rows of neighbouring lanes in
// different banks.
LRD_HOST_DEVICE constexpr int tiles_rows(int width) { return width == 64 ? 64 : 96; }
LRD_HOST_DEVICE constexpr int tiles_pitch(int width) { return width + 4; }

struct TilesShared {
  double* room;                        // the sums at the end, in the place of the block
  float *block, *scale, *differences;  // [rows, pitch], [rows], [rows]

  template <class Memory>
  LRD_HOST_DEVICE TilesShared(Memory& memory, int width) {
    const int64_t rows = tiles_rows(width);
    memory.take(room, 36 * 64);
    block = reinterpret_cast<float*>(room);
    memory.take(scale, rows);
    memory.take(differences, rows);
  }
};
static_assert(64 * tiles_pitch(64) * 4 <= 36 * 64 * 8 && 96 * tiles_pitch(32) * 4 <= 36 * 64 * 8);

// Blocks that add the slots of an item.
LRD_HOST_DEVICE int64_t slot_chunks(int64_t columns, int64_t N, bool with_gram) {
  return (SlotLayout(columns, N, with_gram).numbers + kWarp - 1) / kWarp;
}

// Kernels for one value at most, in float32 or pairs: thread per row up to rank 16, tiles in registers up to 64.
constexpr int64_t kPairRank = 8, kRowRank = 16, kTiledRank = 64;  // up to the first in pairs or float64

// Columns that a fast kernel is made for, at least R; 0 where none is.
inline int fast_width(int64_t R) {
  if (R < 1 || R > kTiledRank) return 0;
  return R <= 4 ? 4 : R <= 8 ? 8 : R <= kRowRank ? 16 : R <= 32 ? 32 : 64;
}

struct FastPlan {
  int width = 0;  // columns that the kernel is made for; 0 where none is
  int64_t splits = 1, rows_per_split = 0;
  Launch sums;  // block (split, b)
};

// Runs of rows are as long as it takes for what a block does once to cost little, and short where there are few rows.
inline FastPlan plan_fast_sums(int64_t B, int64_t S, int64_t R) {
  FastPlan plan;
  plan.width = fast_width(R);
  if (plan.width == 0) return plan;
  const bool by_rows = R <= kRowRank;
  const int64_t rows = by_rows ? kThreads : tiles_rows(plan.width);
  const int64_t wanted = divide_up(kGramBlocks, std::max<int64_t>(B, 1));
  plan.splits = std::max<int64_t>(std::min(wanted, divide_up(S, rows)), 1);
  plan.rows_per_split = divide_up(divide_up(S, plan.splits), rows) * rows;
  plan.splits = std::max<int64_t>(divide_up(S, plan.rows_per_split > 0 ? plan.rows_per_split : 1), 1);
  plan.sums = {B * plan.splits, by_rows ? kThreads : kTileThreads, by_rows ? 0 : bytes_of<TilesShared>(plan.width)};
  return plan;
}

struct GramPlan {
  int tile = 16;               // columns of a tile of G
  int64_t pairs = 1;           // tiles at or below the diagonal, or on it where G is not wanted
  int64_t splits = 1;          // runs of rows, each with a slot of sums
  int64_t rows_per_split = 0;  // in whole blocks of rows
  Launch sums;                 // block (split, pair, b)
  Launch add;                  // of the slots: block (32 numbers, b)
};

// For B items of `columns` columns. `values` of N are summed with this launch.
inline GramPlan plan_gram(int64_t B, int64_t S, int64_t columns, int64_t N, bool wide, bool want_gram) {
  GramPlan plan;
  plan.tile = columns <= 16 ? 16 : columns <= 32 ? 32 : 64;
  const int64_t tiles = std::max<int64_t>(divide_up(columns, plan.tile), 1);  // along one side of G
  const int64_t all_pairs = tiles * (tiles + 1) / 2;
  plan.pairs = want_gram ? all_pairs : tiles;
  const int rows = gram_rows(plan.tile, wide);
  // The same for every launch of an item, whatever it sums.
  const int64_t wanted = divide_up(kGramBlocks, std::max<int64_t>(B * all_pairs, 1));
  plan.splits = std::max<int64_t>(std::min(wanted, divide_up(S, 4 * rows)), 1);
  plan.rows_per_split = divide_up(divide_up(S, plan.splits), rows) * rows;
  plan.sums.grid = B * plan.pairs * plan.splits;
  plan.sums.block = kThreads;
  plan.sums.shared = shared_bytes<GramShared>(wide, rows, gram_pitch(plan.tile, wide), plan.pairs > tiles);
  plan.add.grid = B * slot_chunks(columns, N, want_gram);
  plan.add.block = kThreads;
  return plan;
}

// Mean of the vectors, where they are centred: thread per output.
inline Launch plan_mean(int64_t B, int64_t S) { return {divide_up(B * S, kThreads), kThreads, 0}; }

// ---- capacitance_fwd ----

constexpr int64_t kFusedValues = 8;  // up to which the block that factorises a matrix of kFusedRank solves as well
constexpr int64_t kPanel = 32;       // columns of a block of the factorisation above

struct CapacitancePlan {
  bool fused = false;
  bool solves = false;  // the fused kernel leaves nothing to do for the values
  int64_t panels = 0;
  Launch whole;    // fused: block per b
  Launch inverse;  // block (tile of columns, b), for each panel of rows
  Launch finish;   // block per b
  Launch entries;  // around torch's routines: thread per number
  Launch solve;    // block (n, b)
  // Of panel p: block (tile of rows at or below it, b).
  Launch factor(int64_t p, int64_t B) const { return {B * (panels - p), kThreads, 0}; }
};

// Of the fused kernel.
struct CapacitanceShared {
  double* tri;        // [R (R + 1) / 2], the packed lower triangle
  double* gram_diag;  // [R]
  double* columns;    // [2, R]
  double* pivots;     // [R]
  double* y;          // [R]

  template <class Memory>
  LRD_HOST_DEVICE CapacitanceShared(Memory& memory, int R) {
    memory.take(tri, R * (R + 1) / 2);
    memory.take(gram_diag, R);
    memory.take(columns, 2 * R);
    memory.take(pivots, R);
    memory.take(y, R);
  }
};

inline CapacitancePlan plan_capacitance(int64_t B, int64_t N, int64_t R, int64_t shared_limit) {
  CapacitancePlan plan;
  const int64_t bytes = R <= kFusedRank ? bytes_of<CapacitanceShared>(static_cast<int>(R)) : 0;
  plan.fused = R <= kFusedRank && bytes + kStaticReserve <= shared_limit;
  plan.solves = plan.fused && N <= kFusedValues;
  if (plan.fused) {
    plan.whole = {B, R <= 16 ? 64 : R <= 32 ? 128 : kThreads, bytes};
  } else {
    if (R <= kBlockedRank) {
      plan.panels = divide_up(R, kPanel);
      plan.inverse = {B * plan.panels, kThreads, 0};
    } else {
      plan.entries = {divide_up(B * R * R, kThreads), kThreads, 0};
    }
    plan.finish = {B, kThreads, 0};
  }
  if (!plan.solves) plan.solve = {B * N, kThreads, R * 8};
  return plan;
}

// ---- log_prob_fwd ----

// The launches after the sums: one block of an item that comes last does all of the R-sized algebra.
struct FinishPlan {
  bool possible = false;
  Launch finish;  // block (32 numbers, b)
  Launch again;   // block (split, pair, b) of the plan for float64 products
};

constexpr int64_t kResidualNumbers = kThreads / kWarp * (kTiledRank + 1);  // that a block of the second pass adds up

inline FinishPlan plan_finish(int64_t B, int64_t N, int64_t R, const GramPlan& again, int64_t shared_limit) {
  FinishPlan plan;
  const CapacitancePlan capacitance = plan_capacitance(B, N, R, shared_limit);
  if (!capacitance.fused || N > kGramValues) return plan;
  const int64_t shared = std::max<int64_t>(capacitance.whole.shared, kThreads * 8);
  plan.possible = true;
  plan.finish = {B * slot_chunks(R, N, true), kThreads, shared};
  plan.again = {again.sums.grid, kThreads, std::max({shared, again.sums.shared, kResidualNumbers * 8})};
  return plan;
}

inline Launch plan_judge(int64_t B) { return {B, 128, 0}; }
inline Launch plan_settle(int64_t B) { return {B, 128, 0}; }

// ---- log_prob_bwd and project_fold_fwd: blocks of rows held in shared memory ----

constexpr int kBasisTile = 32;               // columns and rows of the small matrix that are held at a time
constexpr int kSmallPitch = kBasisTile + 1;  // distance of its rows
constexpr int kRowsOfThread = 8;             // at most, of the columns that it makes
constexpr int64_t kRowBytes = 36 * 1024;     // wanted for a block of rows, so that two blocks fit on any GPU

struct RowsPlan {
  int rows = 0;        // of a block; 0 where not even one fits into shared memory
  int width = 0;       // columns that threads side by side make: 8, 16 or 32
  int pitch = 0;       // distance of rows in shared memory
  int64_t blocks = 0;  // of rows
  Launch launch;
};

// For `items` of S rows of `columns`, of which `made` columns are made; bytes(rows, pitch) of shared memory.
template <class Bytes>
RowsPlan plan_rows(int64_t items, int64_t S, int64_t columns, int64_t made, int64_t shared_limit, Bytes bytes) {
  RowsPlan plan;
  plan.width = made <= 8 ? 8 : made <= 16 ? 16 : kBasisTile;
  plan.pitch = static_cast<int>(columns | 1);
  int rows = kRowsOfThread * kThreads / plan.width;
  while (rows > 1 && bytes(rows, plan.pitch) > kRowBytes) rows /= 2;
  const int64_t shared = bytes(rows, plan.pitch);
  if (shared + kStaticReserve > shared_limit) return plan;
  plan.rows = rows;
  plan.blocks = divide_up(S, rows);
  plan.launch = {items * plan.blocks, kThreads, shared};
  return plan;
}

constexpr int kBackwardValues = 4;  // values whose differences are held for a block of rows
constexpr int kHeldRank = 128;      // up to which their z are held, too

template <class A>
struct BackwardShared {
  double* w;  // [rows], as the next ones; 0 where a row is not there
  double *slope, *there, *of_diag, *summed;
  double* coefficients;  // [kBackwardValues, rows]: differences, then 2 weight a
  double* held;          // [kBackwardValues, R]: z of these values, up to kHeldRank
  A* small;              // [kBasisTile, kSmallPitch]
  A* block;              // [rows, pitch]
  A* total;              // [rows, pitch] of the gradient: an array of its own where `separate`, otherwise the block

  template <class Memory>
  LRD_HOST_DEVICE BackwardShared(Memory& memory, int rows, int pitch, int R, bool separate) {
    memory.take(w, rows);
    memory.take(slope, rows);
    memory.take(there, rows);
    memory.take(of_diag, rows);
    memory.take(summed, rows);
    memory.take(coefficients, kBackwardValues * rows);
    memory.take(held, R <= kHeldRank ? kBackwardValues * R : 0);
    memory.take(small, kBasisTile * kSmallPitch);
    memory.take(block, static_cast<int64_t>(rows) * pitch);
    total = block;
    if (separate) memory.take(total, static_cast<int64_t>(rows) * pitch);
  }
};

// Rows that the kernel with tiles of the gradient in registers holds, by the columns, 32 or 64.
LRD_HOST_DEVICE constexpr int gradient_rows(int width) { return 8192 / width; }

struct Pair;

struct GradientShared {
  Pair *difference, *along;                         // [rows] value - loc, [width] z
  float *inverse, *block;                           // [width, pitch] of L^-1, [rows, pitch]
  float *w, *slope, *pull, *coefficient, *of_diag;  // [rows]; w is negative where a row is not there

  template <class Memory>
  LRD_HOST_DEVICE GradientShared(Memory& memory, int width) {
    const int64_t rows = gradient_rows(width), pitch = width + 4;
    double* room;
    memory.take(inverse, width * pitch);
    memory.take(block, rows * pitch);
    memory.take(room, rows);
    difference = reinterpret_cast<Pair*>(room);
    memory.take(room, width);
    along = reinterpret_cast<Pair*>(room);
    for (float** vector : {&w, &slope, &pull, &coefficient, &of_diag}) memory.take(*vector, rows);
  }
};

// Whether the gradient of a factor is a sum over several Gaussians, or over more values than are held.
constexpr bool sums_separately(int64_t per_factor, int64_t N) { return per_factor > 1 || N > kBackwardValues; }

struct FastGradientPlan {
  int width = 0;  // columns that the kernel is made for, 0 where none is
  int rows = 0;   // of a block
  int64_t blocks = 0;
  Launch launch;  // block (block of rows, f)
};

constexpr int64_t kGradientBlocks = 1024;  // so many blocks where there are rows enough
constexpr int64_t kGradientTurns = 16;     // blocks of rows that one block of threads does at most

inline FastGradientPlan plan_fast_gradients(int64_t B, int64_t S, int64_t R, int64_t shared_limit) {
  FastGradientPlan plan;
  const int width = fast_width(R);
  if (width == 0) return plan;
  const bool by_rows = R <= kRowRank;
  const int64_t shared = by_rows ? 0 : bytes_of<GradientShared>(width);
  if (shared + kStaticReserve > shared_limit) return plan;
  const int64_t rows = by_rows ? kThreads : gradient_rows(width);
  const int64_t turns = std::clamp<int64_t>(divide_up(B * S, rows * kGradientBlocks), 1, kGradientTurns);
  plan.width = width;
  plan.rows = static_cast<int>(rows * turns);
  plan.blocks = divide_up(S, plan.rows);
  plan.launch = {B * plan.blocks, kThreads, shared};
  return plan;
}

inline RowsPlan plan_backward(int64_t F, int64_t per_factor, int64_t S, int64_t R, int64_t N, bool wide,
                              int64_t shared_limit) {
  const bool separate = sums_separately(per_factor, N);
  return plan_rows(F, S, R, R, shared_limit, [=](int rows, int pitch) {
    return shared_bytes<BackwardShared>(wide, rows, pitch, static_cast<int>(R), separate);
  });
}

template <class A>
struct ProjectShared {
  double* lost;  // [rows]
  A* made;       // [rows, kSmallPitch] of the results, in room for doubles
  A* small;      // [kBasisTile, kSmallPitch]
  A* block;      // [rows, pitch]

  template <class Memory>
  LRD_HOST_DEVICE ProjectShared(Memory& memory, int rows, int pitch) {
    double* room;
    memory.take(lost, rows);
    memory.take(room, rows * kSmallPitch);
    made = reinterpret_cast<A*>(room);
    memory.take(small, kBasisTile * kSmallPitch);
    memory.take(block, static_cast<int64_t>(rows) * pitch);
  }
};

inline RowsPlan plan_project(int64_t B, int64_t S, int64_t columns, int64_t K, bool wide, int64_t shared_limit) {
  return plan_rows(B, S, columns, K, shared_limit,
                   [=](int rows, int pitch) { return shared_bytes<ProjectShared>(wide, rows, pitch); });
}

}  // namespace lrd::cuda
