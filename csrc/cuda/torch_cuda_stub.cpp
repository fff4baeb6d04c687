// Stands for libtorch_cuda.so when the library is linked, so that it asks for it by name and no CUDA build of torch is
// needed to build. Never loaded, never shipped.
#define STUB(name) \
  extern "C" __attribute__((visibility("default"))) int name() { return 1; }

STUB(aoti_torch_create_cuda_guard)
STUB(aoti_torch_delete_cuda_guard)
STUB(aoti_torch_get_current_cuda_stream)
