"""Memory that runs out: a call gives a right result or an error that callers recognise, and the next call is right."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lrd_kernels.ops import load

pytestmark = pytest.mark.skipif(load.cpu_error is not None, reason=str(load.cpu_error))

FOLDER = Path(__file__).parent
BUILD = FOLDER.parents[1] / "build/faults"

# The calls: each returns all tensors that it made. Those of 4 MB and more lie on memory that the library keeps.
CALLS = (
    f"ROOT = {str(FOLDER.parents[1])!r}"
    + """
import ctypes, gc, os, re, resource, sys
import torch
import lrd_kernels as lrd
from lrd_kernels import testing

def leaves(S, R, batch=()):
    return [t.requires_grad_() for t in testing.make_inputs(batch, S, R, dtype=torch.float32)]

LARGE, SMALL = leaves(2**17, 8), leaves(300, 5, (3,))
BATCH = leaves(4096, 40, (8,))
STACK = [t.detach() for t in testing.make_inputs((4,), 2**15, 8, dtype=torch.float32)]
DETACHED = [t.detach() for t in LARGE]

def log_prob(inputs):
    result = lrd.log_prob(*inputs)
    return [result.detach(), *torch.autograd.grad(result.sum(), inputs)]

def joint():
    model = lrd.joint(STACK[1], STACK[2], STACK[3], rank=32)
    return [model.loc, model.cov_factor, model.cov_diag]

CALLS = {
    "small": lambda: log_prob(SMALL),
    "large": lambda: log_prob(LARGE),
    "batch": lambda: log_prob(BATCH),
    "truncate": lambda: list(lrd.truncate(DETACHED[2], DETACHED[3], 8)),
    "joint": joint,
    "solve": lambda: [lrd.solve(DETACHED[0], DETACHED[2], DETACHED[3])],
}
def check(call, expected, before):
    # A right result on memory of its own: those before it are alive, and stay as they are.
    found = call()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), "wrong result"
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in [*found, *before, *expected] if t.nbytes)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])), "two tensors share memory"
    return found

def recognised(error):
    # Torch's own words, or Python's error; of the smallest allocations torch itself says only which call failed.
    text = str(error)
    assert ROOT not in text, text
    mine = "API call failed" not in text or "/pytorch/torch/csrc/" in text
    named = any(words in text for words in ("can't allocate memory", "bad_alloc", "API call failed"))
    return isinstance(error, MemoryError) or (mine and named)
"""
)

FAULTS = (
    CALLS
    + """
from lrd_kernels.ops import registry

shim = ctypes.CDLL(None)
shim.faults_arm.argtypes = (ctypes.c_long, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
shim.faults_pause.argtypes = (ctypes.c_int,)
torch.set_num_threads(THREADS)

def in_scope(op):
    def run(*arguments):
        shim.faults_pause(0)
        try:
            return op(*arguments)
        finally:
            shim.faults_pause(1)
    return run

if OPS_ALONE:
    registry.OPS["cpu"] = registry.Ops(*map(in_scope, registry.OPS["cpu"]))

calls = errors = 0
for name in NAMES:
    call = CALLS[name]
    call()
    expected = [t.clone() for t in call()]
    n, failed = 1, 1
    while failed:
        held = call()
        copies = [t.clone() for t in held]
        shim.faults_arm(n, LEAST, MOST, LASTING)
        shim.faults_pause(OPS_ALONE)
        try:
            found, caught = call(), None
        except (MemoryError, RuntimeError) as error:
            found, caught = None, error
        failed = shim.faults_disarm()
        calls += 1
        errors += found is None
        if found is None:
            assert recognised(caught), (name, n, type(caught), str(caught))
            caught = None
        else:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (name, n, "wrong result")
        again = check(call, expected, held)
        check(call, expected, [*held, *again])
        assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True)), (name, n)
        del held, again, found
        n += STEP
print(calls, errors)
"""
)


def shim():
    """The preloaded library, compiled once for each text of its source."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the allocation faults need a C++ compiler: c++, g++ or clang++")
    source = FOLDER / "allocation_faults.cpp"
    library = BUILD / f"{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        own = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O1", "-fno-builtin", "-shared", "-fPIC", source, "-o", own], check=True)
        own.replace(library)  # other workers may compile it, too
    return library


def run(script, preload=None, timeout=500, **environment):
    environment = {**os.environ, **environment, **({"LD_PRELOAD": str(preload)} if preload else {})}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.splitlines()


def faults(names, least=0, most=2**62, step=1, lasting=0, threads=1, ops_alone=0):
    keys = ("NAMES", "LEAST", "MOST", "STEP", "LASTING", "THREADS", "OPS_ALONE")
    values = dict(zip(keys, (names, least, most, step, lasting, threads, ops_alone), strict=True))
    head = "".join(f"{key} = {value!r}\n" for key, value in values.items())
    *_, last = run(head + FAULTS, shim())
    calls, errors = map(int, last.split())
    return calls, errors


ALL = ["small", "large", "batch", "truncate", "joint", "solve"]


def test_large_allocations_that_fail():
    calls, errors = faults(["large", "batch", "truncate", "joint"], least=2**16, lasting=1)
    assert calls > errors > 8


def test_small_allocations_that_fail():
    """Torch runs the deleter of a tensor that it fails to finish, or does not: the memory is given back once."""
    calls, errors = faults(["large"], most=4096, step=5, ops_alone=1)
    assert calls > errors > 8


@pytest.mark.slow
@pytest.mark.parametrize("ops_alone", [0, 1])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_allocation_that_fails(ops_alone, threads):
    """Below a kilobyte only within the ops: elsewhere torch ends the process for want of some of them."""
    calls, errors = faults(ALL, least=0 if ops_alone else 1024, threads=threads, ops_alone=ops_alone)
    assert calls > errors > 50


FREED = (
    CALLS
    + """
shim = ctypes.CDLL(None)
shim.faults_arm.argtypes = (ctypes.c_long, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
held = [CALLS["large"]() for _ in range(7)]
shim.faults_arm(1, 0, 2**62, 1)
held.clear()
shim.faults_disarm()
expected = CALLS["large"]()
check(CALLS["large"], expected, [])

big = leaves(2**21, 8)
# An address space of its present size and a little more: room for the calculation, and none for a gradient of 64 MB.
lrd.release_memory()
unlimited = resource.getrlimit(resource.RLIMIT_AS)
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**21, unlimited[1]))
try:
    log_prob(big)
    print("no error")
except (MemoryError, RuntimeError) as error:
    print(error if recognised(error) else repr(error))
resource.setrlimit(resource.RLIMIT_AS, unlimited)
check(CALLS["large"], expected, [])
"""
)


def test_tensors_are_freed_and_limits_are_reported():
    (said,) = run(FREED, shim())
    assert re.fullmatch(r"lrd: DefaultCPUAllocator: can't allocate memory: you tried to allocate \d+ bytes", said)


MEETINGS = (
    CALLS
    + """
import signal, threading, time

expected = {name: [t.clone() for t in CALLS[name]()] for name in ("small", "large")}

def right(name):
    return all(torch.equal(a, b) for a, b in zip(CALLS[name](), expected[name], strict=True))

def work(wrong):
    wrong.extend(name for _ in range(ROUNDS) for name in expected if not right(name))

wrong = []
threads = [threading.Thread(target=work, args=(wrong,)) for _ in range(THREADS)]
for thread in threads:
    thread.start()

# Forks inside a running kernel: the child calculates, with locks as another thread left them.
for _ in range(FORKS):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if right("small") and right("large") else 1)
    assert os.waitpid(child, 0)[1] == 0
for thread in threads:
    thread.join()

# Ctrl-C during calls: some are interrupted, and all that come through are right.
interrupts = 0
for i in range(INTERRUPTS):
    timer = threading.Timer(0.002 * (i % 5), signal.raise_signal, (signal.SIGINT,))
    try:
        timer.start()
        while timer.is_alive() or not timer.finished.is_set():
            wrong.extend(name for name in expected if not right(name))
        time.sleep(0.2)
    except KeyboardInterrupt:
        interrupts += 1
    assert right("large")
print(len(wrong), interrupts)
"""
)


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_threads_forks_and_signals(times):
    values = f"THREADS, ROUNDS, FORKS, INTERRUPTS = {6 * times}, 6, {4 * times}, {5 * times}\n"
    wrong, interrupts = map(int, run(values + MEETINGS)[0].split())
    assert wrong == 0
    assert interrupts == 5 * times
