"""The scripts of docs/examples run and compute what they should."""

import importlib.util
import multiprocessing
import os
import socket
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "docs/examples"


def _run(rank, processes, port, found):
    places = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("tiles", EXAMPLES / "tiles.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found.put((rank, module.main()))


def losses(processes):
    """The losses of the example on every process, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    started = [context.Process(target=_run, args=(rank, processes, port, found)) for rank in range(processes)]
    for process in started:
        process.start()
    results = dict(found.get(timeout=100) for _ in started)
    for process in started:
        process.join(60)
    return [results[rank] for rank in range(processes)]


def test_tiles_on_two_processes_train_as_one():
    (alone,) = losses(1)
    both = losses(2)
    assert both[0] == both[1]
    torch.testing.assert_close(both[0], alone, rtol=1e-6, atol=0)
    assert alone[-1] < alone[0] - 0.3
