"""Each element of P is loaded once forward and once backward and its gradient stored once; loads are coalesced."""

import cuda_traffic
import emulated_cuda
import pytest

from lrd_kernels import testing

if reason := emulated_cuda.why_not():
    pytest.skip(reason, allow_module_level=True)


def arguments(S, R, layout):
    inputs = testing.make_inputs((1,), S, R, layout=layout)
    value = inputs.loc[:, None]
    return inputs.cov_factor * 0.1, inputs.cov_diag + 10, value, value, None, None


def check(S, R, layout, reads=1):
    """`reads` of P forward; sectors at most an eighth above the bytes that they hold."""
    given = arguments(S, R, layout)
    P = given[0]
    forward, backward, grad = cuda_traffic.launches(given)
    assert forward.traffic(P).bytes_read == reads * P.nbytes
    assert backward.traffic(P).bytes_read == P.nbytes
    assert backward.traffic(grad).bytes_written == backward.traffic(grad).unique_bytes_written == P.nbytes
    for launch in (forward, backward):
        stats = launch.result.stats
        assert 32 * stats.memory["global", "load"].sectors <= 1.125 * stats.bytes_loaded
    # The forward pass stores no more than its sums.
    assert 32 * stats.memory["global", "store"].sectors <= 1.125 * stats.bytes_stored


@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize("R", [8, 64])
def test_one_read_forward_one_read_and_one_write_backward(R, layout):
    check(512, R, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["row", "rank"])
def test_above_one_tile_the_gram_matrix_is_made_in_tiles(layout):
    """Two tiles of 64 columns: each on the diagonal and both below it."""
    check(256, 128, layout, reads=2)
