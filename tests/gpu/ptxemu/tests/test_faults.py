"""Every fault is seen, with its place, and disappears when the kernel is put right."""

import numpy as np
import pytest
from ptxemu import KernelFault


def _faults(kernel, grid, block, args, **options):
    return kernel.launch(grid, block, args, check=False, **options)


def _only(result, kind):
    assert result.fault_count > 0
    assert result.kinds() == {kind}
    return result.faults[0]


@pytest.fixture
def faulty(cuda_kernel):
    def build(name, *defines, **options):
        return cuda_kernel("faults.cu", name, *defines, **options)

    return build


@pytest.mark.parametrize("name, block", [("missing_barrier", 256), ("missing_warp_barrier", 32)])
def test_shared_race(faulty, rng, name, block):
    x = rng.standard_normal(2 * block).astype(np.float32)
    args = [x.copy(), np.zeros_like(x)] if block == 256 else [x.copy()]
    result = _faults(faulty(name, race=True), 1, block, args)
    race = next(fault for fault in result.faults if fault.kind == "shared memory race")
    assert "faults.cu" in race.source and "thread" in race.detail

    args[0] = x.copy()
    faulty(name, "FIXED", race=True).launch(1, block, args)
    assert (args[-1][:block] == x[:block][::-1]).all()


def test_race_shows_in_results_without_detection(faulty, rng):
    x = rng.standard_normal(512).astype(np.float32)
    out = np.zeros_like(x)
    faulty("missing_barrier").launch(2, 256, [x, out])
    assert (out.reshape(2, 256) != x.reshape(2, 256)[:, ::-1]).any()


def test_out_of_bounds(faulty):
    x, out = np.ones(100, np.float32), np.zeros(100, np.float32)
    kernel = faulty("out_of_bounds")
    kernel.launch(1, 128, [x, out, 100])
    result = _faults(kernel, 1, 128, [x, out, 101])
    fault = _only(result, "global memory out of bounds")
    assert result.fault_count == 2  # one load, one store
    assert fault.thread == 100 and "0 bytes after the end" in fault.detail
    with pytest.raises(KernelFault, match="out_of_bounds: 2 fault"):
        kernel.launch(1, 128, [x, out, 101])


def test_null_pointer(faulty):
    result = _faults(faulty("out_of_bounds"), 1, 32, [None, np.zeros(32, np.float32), 1])
    _only(result, "global memory out of bounds")


def test_write_to_read_only_buffer(faulty):
    x = np.ones(32, np.float32)
    result = _faults(faulty("out_of_bounds"), 1, 32, [x, x.copy(), 32], readonly=(0, 1))
    _only(result, "write to a read-only buffer")


def test_misaligned(faulty):
    kernel, x = faulty("misaligned"), np.zeros(16, np.float32)
    kernel.launch(1, 1, [x, np.zeros(1, np.float32), 4])
    _only(_faults(kernel, 1, 1, [x, np.zeros(1, np.float32), 6]), "misaligned access")


def test_shared_out_of_bounds(faulty):
    kernel, out = faulty("shared_out_of_bounds"), np.zeros(1, np.float32)
    kernel.launch(1, 32, [out, 31])
    _only(_faults(kernel, 1, 32, [out, 32]), "shared memory out of bounds")


def test_uninitialised_shared_memory(faulty):
    kernel, out = faulty("uninitialised", race=True), np.zeros(32, np.float32)
    kernel.launch(1, 32, [out, 32])
    fault = _only(_faults(kernel, 1, 32, [out, 31]), "uninitialised shared memory read")
    assert fault.thread == 31


def test_barrier_deadlock(faulty):
    kernel, out = faulty("deadlock"), np.zeros(128, np.float32)
    kernel.launch(1, 128, [out, 128])
    fault = _only(_faults(kernel, 1, 128, [out, 64]), "barrier deadlock")
    assert "bar.sync" in fault.ptx_text and "faults.cu" in fault.source


def test_divergent_barrier(faulty):
    kernel, out = faulty("divergent_barrier"), np.zeros(64, np.float32)
    kernel.launch(1, 64, [out, 32])  # whole warps may take different barriers
    assert (out[:32] == 2).all() and (out[32:] == 8).all()
    fault = _only(_faults(kernel, 1, 64, [out, 40]), "divergent barrier")
    assert "PTX line" in fault.detail


def test_barrier_that_some_lanes_never_reach(faulty):
    kernel, out = faulty("barrier_after_exit"), np.zeros(64, np.float32)
    kernel.launch(1, 64, [out, 32])
    fault = _only(_faults(kernel, 1, 64, [out, 40]), "divergent barrier")
    assert "end of the kernel" in fault.detail


def test_shuffle_with_missing_lanes(faulty):
    kernel, out = faulty("partial_shuffle"), np.zeros(32, np.int32)
    kernel.launch(1, 32, [out, 32])
    assert out[:4].tolist() == [1, 0, 3, 2]
    _only(_faults(kernel, 1, 32, [out, 16]), "warp collective with missing lanes")


def test_race_between_blocks_on_one_element(faulty):
    kernel, total = faulty("global_race", race=True), np.zeros(1, np.int32)
    kernel.launch(8, 32, [total, 1])
    assert total[0] == 8
    fault = _only(_faults(kernel, 8, 32, [total, 0]), "global memory race between blocks")
    assert "block 0" in fault.detail


def test_race_between_neighbouring_blocks(faulty):
    kernel, x = faulty("neighbour_race", race=True), np.zeros(8, np.float32)
    kernel.launch(8, 32, [x, 0])
    _only(_faults(kernel, 8, 32, [x, 1]), "global memory race between blocks")


@pytest.mark.parametrize("order, access", [("forward", "ld"), ("reverse", "st")])
def test_read_and_write_by_two_blocks_in_either_order(faulty, order, access):
    kernel, x, out = (
        faulty("hand_over", race=True),
        np.zeros(8, np.float32),
        np.zeros(8, np.float32),
    )
    kernel.launch(1, 32, [x, out])
    fault = _only(_faults(kernel, 8, 32, [x, out], order=order), "global memory race between blocks")
    assert fault.ptx_text.startswith(f"{access}.global")


def test_endless_loop(faulty):
    kernel, flag = faulty("endless"), np.zeros(1, np.int32)
    result = _faults(kernel, 1, 32, [flag], step_limit=100_000)
    _only(result, "step limit reached")
    assert not result.finished


@pytest.mark.parametrize("name, kind", [("asserts", "failed assertion"), ("traps", "trap")])
def test_assert_and_trap(faulty, name, kind):
    kernel, x = faulty(name), np.zeros(32, np.int32)
    kernel.launch(1, 32, [x])
    x[5] = -1
    assert _only(_faults(kernel, 1, 32, [x]), kind).thread == 5
