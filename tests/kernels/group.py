"""Runs a function in the processes of a gloo group."""

import datetime
import multiprocessing
import tempfile
import traceback

import torch
import torch.distributed as dist


def _run(rank, world, path, function, failures, seconds):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{path}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=seconds),
        )
        function(rank)
        dist.destroy_process_group()
    except BaseException:
        failures.put(f"process {rank}: {traceback.format_exc()}")


def together(function, world, *, seconds=60, may_die=()):
    """Calls `function(rank)` in each process, and raises what one of them raised."""
    context = multiprocessing.get_context("fork")
    failures = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/store"
        started = [
            context.Process(target=_run, args=(rank, world, path, function, failures, seconds)) for rank in range(world)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(2 * seconds)
            if process.is_alive():
                process.kill()
                failures.put("time is up")
    assert failures.empty(), failures.get()
    assert all(process.exitcode == 0 for rank, process in enumerate(started) if rank not in may_die)
