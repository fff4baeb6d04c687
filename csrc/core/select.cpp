// Sizes of blocks, and the choice of the instruction set.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace lrd {

namespace baseline {
extern const Kernels table;
}
#ifdef LRD_X86_LEVELS
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {

// A block of packed rows should stay in a core's first-level cache where ranks are small, in the second-level one
// above.
constexpr int64_t kSmallBlockBytes = 20 * 1024;
constexpr int64_t kBlockBytes = 256 * 1024;
// So many mantissas are multiplied, at the most, before a logarithm is taken of them (Product in rows.h).
constexpr int64_t kMaxBlockRows = 512;

int64_t element_bytes(Compute compute) { return compute == Compute::f64 ? 8 : 4; }

// A multiple of 32 rows, the widest vector tile of any instruction set.
int64_t block_rows(int64_t bytes, int64_t bytes_per_row) {
  const int64_t rows = bytes / bytes_per_row / 32 * 32;
  return rows < 64 ? 64 : (rows > kMaxBlockRows ? kMaxBlockRows : rows);
}

// High ranks are taken in panels of columns that stay in the cache whatever the block's rows: the more there are, the
// less often L^-1 and the sums are read.
int64_t paneled_block_rows(int64_t R, int64_t bytes_per_row) {
  constexpr int64_t kPaneledRows = 128;
  return R > kCachedColumns ? kPaneledRows : block_rows(kBlockBytes, bytes_per_row);
}

bool machine_has(const char* isa) {
#ifdef LRD_X86_LEVELS
  // These builtins ask the CPU and, through XGETBV, whether the operating system saves the registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!std::strcmp(isa, "avx2")) return avx2;
  if (!std::strcmp(isa, "avx512"))
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#endif
  return !std::strcmp(isa, "baseline");
}

const Kernels* const all_tables[] = {
#ifdef LRD_X86_LEVELS
    &avx512::table,
    &avx2::table,
#endif
    &baseline::table,
};
constexpr int kTables = sizeof(all_tables) / sizeof(all_tables[0]);

struct Selection {
  const Kernels* chosen = nullptr;
  const char* error = nullptr;
  const char* available[kTables + 1] = {};

  Selection() {
    int count = 0;
    for (const Kernels* table : all_tables)
      if (machine_has(table->isa)) available[count++] = table->isa;
    chosen = kernels_named(available[0]);
    const char* wanted = std::getenv("LRD_CPU_ISA");
    if (!wanted || !*wanted) return;
    if (!kernels_named(wanted))
      error = "LRD_CPU_ISA names an unknown instruction set (known: baseline, avx2, avx512)";
    else if (!machine_has(wanted))
      error = "LRD_CPU_ISA names an instruction set that this CPU or operating system does not offer";
    else
      chosen = kernels_named(wanted);
  }
};

const Selection& selection() {
  static const Selection once;
  return once;
}

}  // namespace

const Kernels* kernels_named(const char* isa) {
  for (const Kernels* table : all_tables)
    if (!std::strcmp(table->isa, isa)) return table;
  return nullptr;
}

const Kernels& kernels() { return *selection().chosen; }
const char* select_error() { return selection().error; }
const char* const* available_isas() { return selection().available; }

int64_t gram_block_rows(int64_t R, int64_t N, Compute compute) {
  if (sums_along_rows(R, N)) return block_rows(kSmallBlockBytes, (R + 1) * element_bytes(compute));
  return joint_block_rows(R, compute);
}

int64_t joint_block_rows(int64_t columns, Compute compute) {
  const int64_t rows = paneled_block_rows(columns, (columns + 1) * element_bytes(compute));
  return rows < kFlushRows ? rows : kFlushRows;
}

// The same for both compute types, so that each Gaussian of a call can have its own.
int64_t bwd_block_rows(int64_t R) {
  if (R <= kSmallRank) return block_rows(kSmallBlockBytes, (R + 4) * element_bytes(Compute::f64));
  return paneled_block_rows(R, 3 * (R + 1) * element_bytes(Compute::f64));
}

// The same for both compute types, meant for float32.
int64_t project_block_rows(int64_t columns, int64_t K) { return block_rows(kBlockBytes, (columns + K + 1) * 4); }

int64_t project_bwd_block_rows(int64_t columns, int64_t K) {
  return block_rows(kBlockBytes, (columns + 2 * K + 2) * element_bytes(Compute::f64));
}

}  // namespace lrd
