"""GPU kernels without a GPU: `benchmarks.gpu.tables` writes docs/gpu_tables.md, `benchmarks.gpu.choose` block sizes.

Both compile and emulate kernels with the helpers of tests/gpu. This is the only place that makes them importable; under
pytest they already are, by the setting `pythonpath` of pyproject.toml.
"""

import sys

from benchmarks.fresh import ROOT

HELPERS = str(ROOT / "tests" / "gpu")
if HELPERS not in sys.path:
    sys.path.append(HELPERS)
