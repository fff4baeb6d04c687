"""Runs a function in several processes that find each other, as `torchrun` would start them."""

import multiprocessing
import os
import socket
import traceback

import torch

from lrd_uq.extra import lightning as L


def _run(rank, processes, port, function, failed):
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in places.items()})
    L.pytorch.utilities.rank_zero_only.rank = rank
    L.fabric.utilities.rank_zero.rank_zero_only.rank = rank
    torch.set_num_threads(1)
    try:
        function(rank)
    except BaseException:
        traceback.print_exc()
        failed.put(rank)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def together(function, processes=2, seconds=120):
    """Calls `function(rank)` in each of the processes, and raises if one of them does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    failed = context.Queue()
    started = [context.Process(target=_run, args=(r, processes, port, function, failed)) for r in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join(seconds)
        if process.is_alive():
            process.kill()
            failed.put("time is up")
    assert failed.empty(), failed.get()
    assert [process.exitcode for process in started] == [0] * processes
