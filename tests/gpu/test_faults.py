"""What goes wrong around the kernels: other GPUs than the current one, old GPUs and drivers, too many programs."""

import ast
import contextlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import testing
from lrd_kernels.ops import dispatch, load, registry

KERNELS = Path(dispatch.__file__).parent / "triton"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture
def two_gpus(monkeypatch):
    """GPU 0, the current one, is too old, and GPU 1 is not."""
    capability = {None: (7, 0), 0: (7, 0), 1: (9, 0)}
    monkeypatch.setattr(load, "cuda_error", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: f"GPU {index or 0}")
    monkeypatch.setattr(dispatch, "triton_interprets", lambda: False)
    monkeypatch.setattr(dispatch, "_first_launch", lambda index: None)
    cached = (dispatch._triton, dispatch._cuda)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("name", ["cuda", pytest.param("triton", marks=needs_triton)])
def test_the_capability_is_that_of_the_tensors_gpu(two_gpus, name):
    assert dispatch.choose(name, torch.device("cuda", 1)) == name
    with pytest.raises(RuntimeError, match=r"need compute capability 7\.5, which GPU 0 does not have"):
        dispatch.choose(name, torch.device("cuda", 0))
    assert not lrd.backends()[name].available


def test_cuda_kernels_serve_before_triton(two_gpus, monkeypatch):
    assert dispatch.choose(None, torch.device("cuda", 1)) == "cuda"
    monkeypatch.setattr(dispatch, "_cuda", lambda index: dispatch.BackendStatus(False, ""))
    assert dispatch.choose(None, torch.device("cuda", 1)) in ("triton", "reference")


def test_a_driver_that_is_too_old_is_found_by_one_launch(two_gpus, monkeypatch):
    probes = []

    def fail(index):
        probes.append(index)
        return "CUDA error: CUDA driver version is insufficient for CUDA runtime version"

    monkeypatch.setattr(dispatch, "_first_launch", fail)
    for _ in range(3):
        assert "driver version is insufficient" in dispatch._cuda(1).detail
        assert dispatch.choose(None, torch.device("cuda", 1)) != "cuda"
    assert probes == [1]


def test_the_first_launch_reports_its_error(monkeypatch):
    def fail(*sums):
        assert [tuple(t.shape) for t in sums] == [(1, 1, 1), (1, 0, 1), (1, 0), (1,)]
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(torch, "zeros", lambda shape, dtype, device: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.ops.lrd_cuda, "capacitance_fwd", fail)
    assert dispatch._first_launch(None) == dispatch._first_launch(1) == "no kernel image"


@needs_triton
def test_triton_launches_on_the_gpu_of_the_tensors(monkeypatch):
    from lrd_kernels.ops import triton

    current = [0]

    @contextlib.contextmanager
    def device(chosen):
        current.append(chosen.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setitem(triton.OPS, "gram_fwd", lambda tensor: current[-1])
    call = registry._late("gram_fwd")
    assert call(SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))) == 1
    assert call(SimpleNamespace(is_cuda=False, device=torch.device("cpu"))) == 0


@needs_triton
def test_the_r_sized_algebra_asks_the_dispatcher(monkeypatch):
    from lrd_kernels.ops.triton import capacitance

    asked = []
    monkeypatch.setattr(dispatch, "_serves", lambda *question: asked.append(question))
    capacitance._serves(SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1)))
    assert asked == [("cuda", "cuda", 1)]


@needs_triton
def test_more_programs_than_a_launch_can_have():
    from lrd_kernels.ops.triton import common

    assert common.grid(2**31 - 1) == (2**31 - 1,)
    with pytest.raises(RuntimeError, match="this needs 2147483648"):
        common.grid(2**31)


def test_every_triton_launch_is_checked():
    launches = 0
    for path in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and "_kernel" in node.value.id:
                launches += 1
                assert ast.unparse(node.slice).startswith("common.grid("), (path, node.lineno)
    assert launches >= 4


def test_warming_up_calls_forward_and_backward_and_leaves_gradients_alone():
    inputs = testing.make_inputs((2,), 40, 3)
    arguments = [t.requires_grad_() for t in inputs]
    seen = []

    def function(*given, mask=None):
        seen.extend(given)
        result = lrd.log_prob(*given, mask=mask)
        result.register_hook(lambda grad: seen.append("backward"))
        return result

    lrd.warm_up(function, *arguments, mask=None)
    assert seen[-1] == "backward"
    assert all(t.grad is None for t in arguments)
    assert all(a.grad is not None for a in seen[:4])
    lrd.warm_up(lrd.log_prob, *(t.detach() for t in arguments))


def test_memory_that_is_used_anew_is_known_with_its_new_size():
    """An address is freed and taken again within an op: here two tensors over the same memory."""
    import emulated_cuda

    if reason := emulated_cuda.why_not():
        pytest.skip(reason)
    from torch.utils._python_dispatch import _disable_current_modes

    memory = torch.zeros(64, dtype=torch.float64).numpy()
    rest = [torch.zeros(shape, dtype=torch.float64) for shape in ((1, 0, 2), (1, 0), (1,))]
    with emulated_cuda.emulated_gpu(), _disable_current_modes():
        emulated_cuda.library().lrd_forget_memory()
        for count in (4, 64):
            gram = torch.from_numpy(memory[:count])[:4].view(1, 2, 2)
            torch.ops.lrd_cuda.capacitance_fwd(gram, *rest)
            (known,) = (piece for piece in emulated_cuda._known_memory() if piece.base == memory.ctypes.data)
            assert known.size == memory[:count].nbytes
