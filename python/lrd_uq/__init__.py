"""Training layer for networks with low-rank Gaussian outputs, on top of `lrd_kernels`."""
