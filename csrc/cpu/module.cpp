// The Python module of the library: importing it registers the ops and settles the instruction set.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "../core/kernels.h"
#include "large_outputs.h"

namespace {

PyObject* cpu_isa(PyObject*, PyObject*) { return PyUnicode_FromString(lrd::kernels().isa); }

PyObject* available_isas(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const char* const* isa = lrd::available_isas(); names && *isa; ++isa) {
    PyObject* name = PyUnicode_FromString(*isa);
    if (!name || PyList_Append(names, name) != 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

PyObject* release_memory(PyObject*, PyObject*) {
  lrd::release_kept_memory();
  return Py_BuildValue("");
}

PyMethodDef methods[] = {
    {"cpu_isa", cpu_isa, METH_NOARGS, "The instruction set in use."},
    {"available_isas", available_isas, METH_NOARGS, "The instruction sets this machine can run, best first."},
    {"release_memory", release_memory, METH_NOARGS, "Gives kept memory of large outputs to the system."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  if (const char* error = lrd::select_error()) {
    PyErr_SetString(PyExc_ImportError, error);
    return nullptr;
  }
  return PyModule_Create(&definition);
}
