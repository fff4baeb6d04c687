"""Every entry of the table compiles for every architecture, without spills and within its shared memory."""

import compiled
import pytest

ALL = (*compiled.NVIDIA, *compiled.AMD)


KERNELS = {
    "gram": {"_gram_fwd_kernel", "_joint_gram_fwd_kernel"},
    "log_prob_bwd": {"_log_prob_bwd_kernel", "_row_grads_kernel", "_tile_grads_kernel"},
    "project_fold": {"_project_fold_fwd_kernel"},
    **{op: {f"_{op}_kernel"} for op in ("row_sums", "tile_sums", "finish", "again", "row_grads", "tile_grads")},
}


# Bytes of a thread, at most: the second pass keeps a few registers once in a program, outside of its loops. Up to rank
# 16 the general backward kernel serves several values alone.
SPILLS = {"_again_kernel": 64, "_log_prob_bwd_kernel": 36}
UNUSED = {(100, "tile_grads")}  # Triton cannot compile it there; the general kernel serves


@pytest.mark.slow
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("architecture", ALL)
def test_every_entry_compiles_without_spills(architecture, op):
    if (architecture, op) in UNUSED:
        pytest.skip("Triton cannot compile this kernel for this GPU; the general one serves")
    seen = set()
    for entry, found in compiled.matrix(architecture, op):
        assert found.spills <= SPILLS.get(found.kernel, 0), (entry, found)
        assert found.shared <= compiled.SHARED_LIMIT[architecture], (entry, found)
        assert 0 < found.registers <= compiled.REGISTER_LIMIT[architecture]
        seen.add(found.kernel)
    assert seen == KERNELS[op] - {f"_{name}_kernel" for arch, name in UNUSED if arch == architecture}


def test_every_op_of_the_table_is_compiled():
    assert {entry[0] for architecture in ALL for entry in compiled.entries(architecture)} == set(KERNELS)
