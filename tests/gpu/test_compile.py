"""Every entry of the table compiles for every architecture, without spills and within its shared memory."""

import compiled
import pytest

ALL = (*compiled.NVIDIA, *compiled.AMD)


KERNELS = {
    "gram": {"_gram_fwd_kernel", "_joint_gram_fwd_kernel"},
    "log_prob_bwd": {"_log_prob_bwd_kernel"},
    "project_fold": {"_project_fold_fwd_kernel"},
}


@pytest.mark.slow
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("architecture", ALL)
def test_every_entry_compiles_without_spills(architecture, op):
    seen = set()
    for entry, found in compiled.matrix(architecture, op):
        assert found.spills == 0, (entry, found)
        assert found.shared <= compiled.SHARED_LIMIT[architecture], (entry, found)
        assert 0 < found.registers <= compiled.REGISTER_LIMIT[architecture]
        seen.add(found.kernel)
    assert seen == KERNELS[op]


def test_every_op_of_the_table_is_compiled():
    assert {entry[0] for architecture in ALL for entry in compiled.entries(architecture)} == set(KERNELS)
