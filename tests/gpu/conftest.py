"""The GPU tests need no GPU. Those of the Triton kernels need Triton's compiler, and are not collected where it is
missing, or interprets."""

import importlib.util
import os

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_compil*.py", "test_traffic.py", "ptxemu/tests/test_*triton*.py"]
