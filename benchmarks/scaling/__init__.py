"""Memory and time of a log-likelihood against the number of variables: `python -m benchmarks.scaling`."""
