// All kernel checks with every instruction set of this machine. Built with the address and undefined-behaviour
// sanitizers (`make sanitize`): the first byte too many is fatal.
#include <cstdio>
#include <initializer_list>

#include "kernel_checks.h"

int main() {
  const int64_t sizes[][3] = {{1, 1, 1},    {3, 2, 1},   {7, 8, 1},     {9, 5, 3},    {33, 8, 1},   {65, 4, 2},
                              {130, 16, 1}, {67, 17, 1}, {31, 33, 2},   {140, 40, 1}, {50, 0, 1},   {20, 12, 0},
                              {40, 9, 19},  {70, 66, 1}, {1024, 16, 1}, {600, 8, 1},  {600, 3, 17}, {300, 16, 33}};
  int runs = 0, wrong = 0;
  for (const char* const* name = lrd::available_isas(); *name; ++name) {
    const lrd::Kernels& isa = *lrd::kernels_named(*name);
    for (const auto& [S, R, N] : sizes) wrong += lrd_checks::check_all(isa, S, R, N), ++runs;
    for (int64_t R = 1; R <= lrd::kSmallRank + 1; ++R)
      for (const int64_t S : {int64_t(17), lrd::bwd_block_rows(R) + 9})
        wrong += lrd_checks::check_all(isa, S, R, R % 3), ++runs;
  }
  std::printf("%d runs, %d numbers wrong\n", runs, wrong);
  return wrong ? 1 : 0;
}
