"""Times, memory and accuracy of the kernels beside their peers: `benchmarks.run` and `benchmarks.accuracy`."""
