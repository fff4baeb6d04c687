"""Which classes a config may name: importing a module runs its code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence

ALLOWED = ("lightning", "lrd_kernels", "lrd_uq", "monai", "torch.nn", "torch.optim")
OPTION, VARIABLE = "--allow-imports", "LRD_ALLOW_IMPORTS"
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
CLASS_PATH = re.compile(r"""["']?class_path["']?\s*[:=]\s*["']?([\w.]+)""")
NOT_CLASSES = ("--config", "-c", "--run", "--output", "--images")  # options with a path or a name of a file
DENIED = re.compile(r"Importing '([\w.]+)' is not allowed")


def taken_out(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without `--allow-imports`, and the packages that it and the environment variable name."""
    rest, packages = [], [name for name in re.split(r"[\s,]+", os.environ.get(VARIABLE, "")) if name]
    left = iter(words)
    for word in left:
        option, equals, value = word.partition("=")
        if option != OPTION:
            rest.append(word)
            continue
        value = value if equals else next(left, "")
        packages += [name for name in value.split(",") if name] or [value]
    for name in packages:
        if not NAME.fullmatch(name):
            raise ValueError(f"{OPTION} and {VARIABLE} take names of packages, as my_package; got {name!r}")
    return rest, packages


def named_by_caller(words: Sequence[str]) -> list[str]:
    """What the arguments themselves ask to import: the packages of classes that are values of options."""
    found: list[str] = []
    before = ""
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("-") else (before, "=", word)
        before = "" if equals else option
        if equals and option not in NOT_CLASSES:
            found += [value] if "." in value and NAME.fullmatch(value) else CLASS_PATH.findall(value)
    packages = [(name, name.partition(".")[0]) for name in found]
    # Of these, the class alone: the whole package has functions that run commands or download code.
    return [name if top == "torch" or top in sys.stdlib_module_names else top for name, top in packages]


@contextlib.contextmanager
def only(packages: Sequence[str]) -> Iterator[None]:
    """While this is open, values that jsonargparse parses can name classes of `ALLOWED` and of these packages only."""
    from jsonargparse import set_parsing_settings
    from jsonargparse._common import parsing_settings  # settings of the process, which nothing public can restore

    before = dict(parsing_settings)
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=[*ALLOWED, *packages])
    try:
        yield
    finally:
        parsing_settings.update(before)


def explained(message: str) -> str:
    """An error of the parser; a line about what to do if it was a class that may not be imported."""
    denied = DENIED.search(message)
    if denied is None:
        return message
    package = denied[1].partition(".")[0]
    return (
        f"the config names {denied[1]}, and importing it would run the code of {package}: add {OPTION} {package}, or"
        f" set {VARIABLE}={package}, if you trust it. Without that, only {', '.join(ALLOWED)} are imported"
    )
