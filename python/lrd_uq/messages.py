"""Errors of the parser of settings, in one line."""

from __future__ import annotations

import re

UNION = "Does not validate against any of the Union subtypes"
FRAME = ("Subtypes:", "Errors:", "Given value type:", "Given value:", "Subclass types expect one of:")
OTHERWISE = (
    "Expected a <class 'NoneType'>",
    "Expected a path but",
    "Not a valid subclass of",
    "a class path",
    "a dict",
)
CLASS = re.compile(r"<class '([\w.]+)'>|typing\.|Parser key (?=\")")


def one_line(message: str) -> str:
    """What is wrong. The parser lists every type that it tried for a value, with the error of each."""
    if UNION not in message:
        return " ".join(message.split())
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    given = next((line.partition(": ")[2] for line in lines if line.startswith("Given value: ")), "")
    end = next((i for i, line in enumerate(lines) if line.startswith("Given value")), len(lines))
    found = [line.replace(UNION, "").strip() for line in lines[:end] if not line.startswith(FRAME)]
    reasons = [line for line in found if line and not line.startswith(OTHERWISE)]
    text = CLASS.sub(r"\1", " ".join(reasons))
    says_it = "Got value" in text or not any(line.startswith("Expected a") for line in reasons)
    return text if says_it else f"{text}; got {given}"
