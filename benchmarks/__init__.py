"""Times, memory and accuracy of the kernels, compared with their peers. See docs/benchmarks.md."""
