// Compiled once per instruction set with LRD_ISA_NAMESPACE set to its name. Everything here lives in that namespace and
// has internal linkage: code built for a newer CPU must never be merged by the linker into what an older one runs.
#include "backward.h"
#include "gram.h"
#include "joint_gram.h"
#include "project.h"
#include "project_bwd.h"
#include "residual.h"
#include "small_dense.h"

#define LRD_STRINGIZE_(x) #x
#define LRD_STRINGIZE(x) LRD_STRINGIZE_(x)

namespace lrd {
namespace LRD_ISA_NAMESPACE {

// Index order is that of DType.
#define LRD_DTYPES(kernel) {kernel<float>, kernel<double>, kernel<BFloat16>, kernel<Half>}

// Index order is that of DType and Compute; compute_for() never asks for the empty place.
#define LRD_INSTANCES(kernel)                                                         \
  {                                                                                   \
    {kernel<float, float>, kernel<float, double>}, {nullptr, kernel<double, double>}, \
        {kernel<BFloat16, float>, kernel<BFloat16, double>}, {                        \
      kernel<Half, float>, kernel<Half, double>                                       \
    }                                                                                 \
  }

extern const Kernels table;
const Kernels table = {
    LRD_STRINGIZE(LRD_ISA_NAMESPACE),
    {whole_tiles<float>, whole_tiles<double>},
    LRD_INSTANCES(gram_rows),
    LRD_DTYPES(residual_rows),
    LRD_INSTANCES(log_prob_bwd_rows),
    LRD_INSTANCES(joint_gram_rows),
    LRD_INSTANCES(project_fold_rows),
    LRD_DTYPES(project_basis_bwd_rows),
    LRD_DTYPES(project_fold_bwd_rows),
    cholesky,
    {gram_scratch<float>, gram_scratch<double>},
    residual_scratch,
    {bwd_scratch<float>, bwd_scratch<double>},
    {joint_gram_scratch<float>, joint_gram_scratch<double>},
    {project_scratch<float>, project_scratch<double>},
    project_basis_bwd_scratch,
    project_fold_bwd_scratch,
    cholesky_scratch,
};

}  // namespace LRD_ISA_NAMESPACE
}  // namespace lrd
