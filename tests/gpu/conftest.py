"""The GPU tests need Triton's compiler, and no GPU. Where it is missing, or interprets, they are not collected."""

import importlib.util
import os

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_*.py", "ptxemu/tests/test_*triton*.py"]
