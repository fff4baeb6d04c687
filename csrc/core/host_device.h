// For functions that host code, every instruction set's sources and CUDA kernels share. They are always inlined: a copy
// left to the linker could be one with instructions that an older CPU lacks.
#pragma once

#ifdef __CUDACC__
#define LRD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LRD_HOST_DEVICE inline __attribute__((always_inline))
#endif
