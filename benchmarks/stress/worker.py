"""One process of the search. Its argument is JSON: the functions, the seed and the numbers of the cases."""

import json
import sys

from benchmarks.stress import runner

if __name__ == "__main__":
    runner.serve(json.loads(sys.argv[1]))
