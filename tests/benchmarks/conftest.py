"""What the tests of the benchmarks share. They check what is measured and written, not how long it takes."""

import gc
import json

import pytest

from benchmarks import fresh


@pytest.fixture(scope="package", autouse=True)
def _quick_collections():
    """Every measurement collects garbage, and need not search through all imported modules for it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_processes(monkeypatch):
    """What benchmarks call in fresh processes runs in this one, with the same conversion to JSON and back.

    Gives the list of the functions that were called. Real processes are tested in test_fresh.py, and with torch in
    test_memory_is_told_from_a_fresh_process and test_a_real_point.
    """
    called = []

    def call(function, *arguments, timeout=None):
        called.append(function.__name__)
        arguments = json.loads(json.dumps(arguments))
        try:
            return json.loads(json.dumps(function(*arguments)))
        except Exception as error:
            raise fresh.Failed(f"{type(error).__name__}: {error}", False) from error

    monkeypatch.setattr(fresh, "call", call)
    return called
