// Checks of the kernels of one instruction set, for the sanitizers and for the tests.
#pragma once

#include <cstdint>

#include "../core/kernels.h"

namespace lrd_checks {

enum class Layout { row, rank, wide };  // wide: rows of a wider matrix

struct Problem {
  lrd::DType dtype;
  lrd::Compute compute;
  Layout layout;
  bool masked;
  int64_t S, R, N;
};

// How many numbers were wrong; the first ones are printed.
int check(const lrd::Kernels& isa, const Problem& problem);

// The same for every dtype, way of computing, layout, with and without a mask.
int check_all(const lrd::Kernels& isa, int64_t S, int64_t R, int64_t N);

}  // namespace lrd_checks
