"""What a result is of: part of the data, draws, ranks and seed, with hashes of settings, weights and code."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lrd_kernels as lrd
from lrd_uq.checkpoints import Found

SETTINGS = ("seed_everything", "model", "data")  # of a config: what predictions depend on, beside the weights


def provenance(config: Mapping[str, Any], checkpoint: Found, **of: Any) -> dict[str, Any]:
    """What a result is of.

    Args:
        config: all settings in effect, as plain values.
        checkpoint: where the weights come from.
        of: further facts, such as the part of the data and the number of draws.
    """
    settings = json.dumps({name: config.get(name) for name in SETTINGS}, sort_keys=True, default=str)
    weights = {"file": checkpoint.path.name, "step": checkpoint.content["global_step"], "sha256": checkpoint.sha256}
    return {
        "run": checkpoint.path.parent.resolve().name,
        **of,
        "config_sha256": hashlib.sha256(settings.encode()).hexdigest(),
        "checkpoint": weights,
        "code": {"version": lrd.__version__, "sources_sha256": sources_hash()},
    }


def short_hash(document: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits that stand for a document in the name of a file."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:8]


@functools.cache
def sources_hash() -> str:
    """A hash of the Python sources of both packages."""
    digest = hashlib.sha256()
    for name in ("lrd_kernels", "lrd_uq"):
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for file in sorted(folder.rglob("*.py")):
            content = file.read_bytes()
            digest.update(f"{name}/{file.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
