// What the stable ABI has only since a torch later than the least one served: looked up, not linked.
#pragma once

#include <dlfcn.h>

namespace lrd {

// Null in a torch that does not have it.
template <class Function>
Function* find_in_torch(const char* name) {
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return library ? reinterpret_cast<Function*>(dlsym(library, name)) : nullptr;
}

}  // namespace lrd
