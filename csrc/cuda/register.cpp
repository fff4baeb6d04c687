// The ops of the namespace lrd_cuda, and the Python module whose import registers them.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "ops.h"

namespace lrd::cuda {

STABLE_TORCH_LIBRARY_IMPL(lrd_cuda, CUDA, m) {
  m.impl("gram_fwd", TORCH_BOX(&gram_fwd_cuda));
  m.impl("capacitance_fwd", TORCH_BOX(&capacitance_fwd_cuda));
  m.impl("log_prob_fwd", TORCH_BOX(&log_prob_fwd_cuda));
  m.impl("log_prob_bwd", TORCH_BOX(&log_prob_bwd_cuda));
  m.impl("joint_gram_fwd", TORCH_BOX(&joint_gram_fwd_cuda));
  m.impl("project_fold_fwd", TORCH_BOX(&project_fold_fwd_cuda));
}

}  // namespace lrd::cuda

namespace {

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_cuda() { return PyModule_Create(&definition); }
