"""Triton kernels run unchanged under emulated_gpu()."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
import triton_kernels as kernels  # noqa: E402
from ptxemu import KernelFault, Unsupported  # noqa: E402
from ptxemu.triton_driver import emulated_gpu  # noqa: E402
from triton import knobs  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("capability, num_warps", [(75, 1), (80, 4), (100, 8)])
def test_softmax(capability, num_warps):
    x = torch.randn(5, 1000)
    y = torch.zeros_like(x)
    with emulated_gpu(capability, race=True, stats=True) as gpu:
        kernels.softmax_kernel[(5,)](x, y, 1000, x.stride(0), BLOCK=1024, num_warps=num_warps)
    torch.testing.assert_close(y, torch.softmax(x.double(), 1).float(), rtol=1e-5, atol=1e-8)
    launch = gpu.last("softmax_kernel")
    assert launch.num_warps == num_warps and launch.grid == (5, 1, 1)
    assert gpu.bytes_by_kernel() == {"softmax_kernel": (x.nbytes, y.nbytes)}
    assert launch.buffer("X").unique_bytes_read == launch.buffer("X").bytes_read == x.nbytes
    assert launch.buffer("Y").sectors_written == -(-y.nbytes // 32) + (y.data_ptr() % 32 > 0)


MATMULS = {
    "float32 ieee": (80, torch.float32, tl.float32, "ieee", 1e-6),
    "float32 tf32": (80, torch.float32, tl.float32, "tf32", 2e-3),
    "float64": (80, torch.float64, tl.float64, "ieee", 1e-15),
    "float64 sm_90": (90, torch.float64, tl.float64, "ieee", 1e-15),
    "int8": (80, torch.int8, tl.int32, "ieee", 0),
    "float16": (80, torch.float16, tl.float32, "ieee", 1e-6),
    "float16 sm_75": (75, torch.float16, tl.float32, "ieee", 1e-6),
    "float16 sums": (80, torch.float16, tl.float16, "ieee", 2e-3),
    "bfloat16": (80, torch.bfloat16, tl.float32, "ieee", 1e-6),
    "float16 sm_120": (120, torch.float16, tl.float32, "ieee", 1e-6),
    "float32 sm_100": (100, torch.float32, tl.float32, "ieee", 1e-6),
}
TORCH_TYPE = {tl.float64: torch.float64, tl.float32: torch.float32, tl.float16: torch.float16,
              tl.int32: torch.int32}  # fmt: skip


@pytest.mark.parametrize("name", MATMULS)
def test_matmul(name):
    capability, dtype, acc, precision, tolerance = MATMULS[name]
    a, b = ((torch.randn(64, 64) * 4).to(dtype) for _ in range(2))
    c = torch.zeros(64, 64, dtype=TORCH_TYPE[acc])
    with emulated_gpu(capability, race=True):
        kernels.matmul_kernel[(2, 2)](a, b, c, 64, 64, 32, 32, 32, acc, precision)
    expected = a.double() @ b.double()
    error = (c.double() - expected).abs().max() / expected.abs().max()
    assert error <= tolerance


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_attention_with_software_pipelining(name):
    dtype, size, heads, n = getattr(torch, name), 32, 2, 100
    q, k, v = (torch.randn(heads, n, size).to(dtype) for _ in range(3))
    out = torch.zeros_like(q)
    with emulated_gpu(race=True):
        kernels.attention_kernel[(triton.cdiv(n, 32), heads)](
            q, k, v, out, n, size**-0.5, size, 32, 32, getattr(tl, name), num_stages=3
        )
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.double()[None] for x in (q, k, v)), is_causal=True)[
        0
    ]
    tolerance = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-5}[name]
    assert (out.double() - expected).abs().max() < tolerance


def test_scan_sort_and_atomics():
    x = torch.randn(1000)
    sums, ordered, info = torch.zeros(1000), torch.zeros(1024), torch.zeros(3, dtype=torch.int32)
    with emulated_gpu(race=True):
        kernels.scan_kernel[(1,)](x, sums, ordered, info, 1000, 1024)
    torch.testing.assert_close(sums, x.cumsum(0), rtol=1e-4, atol=1e-4)
    assert torch.equal(ordered, torch.cat([x, torch.zeros(24)]).sort()[0])
    assert info.tolist() == [x.argmax().item(), int(x.max() * 1000), 1024]


@pytest.mark.parametrize("bias", [None, "tensor"])
@pytest.mark.parametrize("flag", [False, True])
def test_scalars_none_and_three_dimensional_grid(flag, bias):
    out, wide = torch.zeros(2, 3, 4), 2**40 + 7
    tensor = torch.arange(4.0) if bias else None
    with emulated_gpu():
        kernels.scalars_kernel[(4, 3, 2)](out, tensor, 0.5, 3, flag, wide, FACTOR=100)
    expected = torch.arange(24.0) * 0.5 + 3 + (100 if flag else 0) + wide % 1000
    expected = expected.reshape(2, 3, 4) + (tensor if bias else 0)
    torch.testing.assert_close(out, expected)


def test_tuples_and_reinterpreted_tensors():
    x, y, out = torch.arange(4.0), torch.ones(4), torch.zeros(4)
    with emulated_gpu():
        wrapped = triton.reinterpret(y.view(torch.int32), tl.float32)
        kernels.tuple_kernel[(1,)]((x, wrapped), (3, 5), out)
    assert torch.equal(out, (x + y) * 3 + 5)


def test_launch_hooks_and_order():
    seen, x = [], torch.zeros(64)

    def hook(metadata):
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        with emulated_gpu(order="reverse"):
            kernels.unmasked_kernel[(4,)](x, x, 16)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["unmasked_kernel"] and (x == 1).all()


def test_heuristics_and_callable_grid():
    x = torch.randn(100)
    y = torch.zeros_like(x)
    with emulated_gpu():
        kernels.heuristic_kernel[lambda meta: (1,)](x, y, 100)
    assert torch.equal(y, x * 128)


def test_empty_grid_does_nothing():
    x = torch.zeros(4)
    with emulated_gpu():
        kernels.unmasked_kernel[(0,)](x, x, 4)
    assert (x == 0).all()


def test_out_of_bounds_names_kernel_and_source_line():
    x, y = torch.zeros(100), torch.zeros(128)
    with emulated_gpu() as gpu, pytest.raises(KernelFault) as fault:
        kernels.unmasked_kernel[(2,)](x, y, 64)
    message = str(fault.value)
    assert "unmasked_kernel" in message and "triton_kernels.py:" in message
    assert "after the end of X" in message
    assert gpu.last("unmasked_kernel").result.fault_count > 0


def test_race_between_programs():
    x, total = torch.ones(64), torch.zeros(1)
    with emulated_gpu(race=True), pytest.raises(KernelFault, match="race between blocks"):
        kernels.racy_kernel[(4,)](x, total, 16)
    with emulated_gpu(race=True):
        kernels.racy_kernel[(1,)](x, total, 64)


def test_everything_is_restored():
    before = driver._active, CompiledKernel._init_handles
    with emulated_gpu():
        assert (driver._active, CompiledKernel._init_handles) != before
        with emulated_gpu(90):
            assert driver.active.get_current_target().arch == 90
        assert driver.active.get_current_target().arch == 80
    with pytest.raises(ZeroDivisionError), emulated_gpu():
        raise ZeroDivisionError
    assert (driver._active, CompiledKernel._init_handles) == before


def test_settings_of_a_later_context_apply_to_a_kernel_compiled_earlier():
    x, total = torch.ones(64), torch.zeros(1)
    with emulated_gpu():
        kernels.racy_kernel[(4,)](x, total, 16)
    with emulated_gpu(race=True), pytest.raises(KernelFault):
        kernels.racy_kernel[(4,)](x, total, 16)


def test_wgmma_is_refused():
    a = torch.randn(64, 64).half()
    c = torch.zeros(64, 64)
    with emulated_gpu(90), pytest.raises(Unsupported, match="wgmma"):
        kernels.matmul_kernel[(1, 1)](a, a, c, 64, 64, 64, 64, 32, tl.float32, "ieee")
