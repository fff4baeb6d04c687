"""A misspelt name gets a suggestion, and nothing else notices that the package answers for missing names."""

import copy
import pickle
import re

import pytest
import torch

import lrd_kernels as lrd


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("logprob", "log_prob"),
        ("log_probs", "log_prob"),
        ("log_det", "logdet"),
        ("entrpy", "entropy"),
        ("sample", "rsample"),
        ("LowrankMultivariateNormal", "LowRankMultivariateNormal"),
        ("jointnormal", "JointNormal"),
        ("patchtorch", "patch_torch"),
    ],
)
def test_a_misspelt_name_gets_a_suggestion(name, meant):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; did you mean .*\b{meant}\b.*\?"):
        getattr(lrd, name)


def test_a_name_like_no_other_is_sent_to_the_list():
    with pytest.raises(AttributeError, match=r"no attribute 'zzzzzz'; help\(lrd_kernels\) lists what there is$"):
        _ = lrd.zzzzzz
    with pytest.raises(ImportError, match="cannot import name 'logprob'"):
        from lrd_kernels import logprob  # noqa: F401


def test_the_map_in_the_module_docstring_is_complete():
    assert set(lrd.__all__) <= set(re.findall(r"\w+", lrd.__doc__))


def test_missing_names_are_missing():
    assert not hasattr(lrd, "log_prop")
    assert not hasattr(lrd, "__wrapped__")
    assert getattr(lrd, "log_prop", None) is None
    assert "log_prop" not in dir(lrd)


def test_pickling_and_compiling_go_on():
    assert pickle.loads(pickle.dumps(lrd.log_prob)) is lrd.log_prob
    d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.ones(3, 1), torch.ones(3))
    for copied in (copy.deepcopy(d), pickle.loads(pickle.dumps(d))):
        assert copied.log_prob(torch.zeros(3)) == d.log_prob(torch.zeros(3))

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x):
        known = 1 if hasattr(lrd, "logdet") else 0
        return lrd.logdet(x[:, None], torch.ones(3), on_failure="nan") + known

    assert compiled(torch.ones(3)) == lrd.logdet(torch.ones(3, 1), torch.ones(3)) + 1
