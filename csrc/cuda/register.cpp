// The ops of the namespace lrd_cuda, and the Python module whose import registers them.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "implement.h"

STABLE_TORCH_LIBRARY_IMPL(lrd_cuda, CUDA, m) { lrd::cuda::implement(m); }

namespace {

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_cuda() { return PyModule_Create(&definition); }
