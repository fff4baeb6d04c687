"""Every entry of the table compiles for every architecture, without spills and within its shared memory."""

import compiled
import pytest

QUICK = (75, 90, 120)
ALL = (*compiled.NVIDIA, *compiled.AMD)


@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=() if a in QUICK else pytest.mark.slow, id=str(a)) for a in ALL]
)
def test_every_entry_compiles_without_spills(architecture):
    seen = set()
    for entry, found in compiled.matrix(architecture):
        assert found.spills == 0, (entry, found)
        assert found.shared <= compiled.SHARED_LIMIT[architecture], (entry, found)
        assert 0 < found.registers <= compiled.REGISTER_LIMIT[architecture]
        seen.add(found.kernel)
    assert seen == {
        "_gram_fwd_kernel",
        "_joint_gram_fwd_kernel",
        "_log_prob_bwd_kernel",
        "_project_fold_fwd_kernel",
    }
