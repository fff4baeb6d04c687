// Which function implements which op: for the library on GPUs, and for the tests on the CPU.
#pragma once

#include <torch/csrc/stable/library.h>

#include "ops.h"

namespace lrd::cuda {

template <class Library>
void implement(Library& m) {
  m.impl("gram_fwd", TORCH_BOX(&gram_fwd_cuda));
  m.impl("capacitance_fwd", TORCH_BOX(&capacitance_fwd_cuda));
  m.impl("log_prob_fwd", TORCH_BOX(&log_prob_fwd_cuda));
  m.impl("log_prob_bwd", TORCH_BOX(&log_prob_bwd_cuda));
  m.impl("joint_gram_fwd", TORCH_BOX(&joint_gram_fwd_cuda));
  m.impl("project_fold_fwd", TORCH_BOX(&project_fold_fwd_cuda));
}

}  // namespace lrd::cuda
