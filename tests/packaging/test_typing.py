"""mypy, as strict as it can be, learns the types of the public surface from a user's code."""

import os
import re
import subprocess
import sys

import pages
import pytest

import lrd_kernels as lrd

pytestmark = pytest.mark.slow  # mypy reads all of torch

# An expression, and the type that mypy has to find.
TYPES = """
d: LowRankMultivariateNormal
d.log_prob(x): Tensor
d.entropy(): Tensor
d.sample((3,)): Tensor
d.rsample([2], antithetic=True): Tensor
d.mean: Tensor
d.variance: Tensor
d.stddev: Tensor
d.covariance_matrix: Tensor
d.precision_matrix: Tensor
d.scale_tril: Tensor
d.expand((4,)): LowRankMultivariateNormal
d.expand((4,)).truncate(2).marginal(slice(0, 5)).condition([0], x): LowRankMultivariateNormal
d.to(torch.float64): LowRankMultivariateNormal
d.aggregate(x).correlation: Tensor
d.modes(2).vectors: Tensor
d.correlation(0): Tensor
d.whiten(x): Tensor
d.unwhiten(x): Tensor
d.quantile(0.5): Tensor
d.energy_score(x): Tensor
lrd.LowRankMultivariateNormal.load("file"): LowRankMultivariateNormal
lrd.LowRankMultivariateNormal.from_samples(x, 0.1, rank=4): LowRankMultivariateNormal
lrd.LowRankMultivariateNormal.from_swag(x, x, x): LowRankMultivariateNormal
lrd.joint(x, x, x, rank=4): JointNormal
lrd.joint(x, x, x).expand((2,)): JointNormal
lrd.joint(x, x, x).aleatoric: LowRankMultivariateNormal
lrd.joint(x, x, x).epistemic: SemidefiniteNormal
lrd.joint(x, x, x).epistemic.expand([2]): SemidefiniteNormal
lrd.joint(x, x, x).truncate(8): LowRankMultivariateNormal
lrd.JointAccumulator(4).update(x, None, x).merge(lrd.JointAccumulator(4)).finalize(): JointNormal
lrd.mixture_log_prob(x, x, x, x): Tensor
lrd.log_prob(x, x, x, x, mask=None): Tensor
lrd.mahalanobis(x, x, x): Tensor
lrd.logdet(x, x): Tensor
lrd.entropy(x, x): Tensor
lrd.nll_loss(x, x, x, x): Tensor
lrd.positive_diag(x, 0.01): Tensor
lrd.solve(x, x, x): Tensor
lrd.matvec(x, x, x): Tensor
lrd.rsample(x, x, x, (3,)): Tensor
lrd.capacitance_cholesky(x, x): tuple[Tensor, Tensor]
lrd.truncate(x, x, 2): tuple[Tensor, Tensor, Tensor]
lrd.condition_bounds(x, x): tuple[Tensor, Tensor]
lrd.capacitance_condition(x, x): Tensor
lrd.extreme_eigenvalues(x, x).condition: Tensor
lrd.diagnose(x, x).verdict: str
lrd.filter_gradients([x]): int
lrd.backends()["cpu"].available: bool
lrd.use_backend(None).__enter__(): use_backend
lrd.patch_torch().undo(): None
lrd.patch_linear_operator().undo(): None
lrd.distributed.log_prob(x, x, x, x, group=None): Tensor
lrd.distributed.joint(x, x, x, rank=2).cov_factor: Tensor
lrd.streaming.log_prob([(x, x, x, x)]): Tensor
lrd.streaming.truncate([(x, x)], 2).singular_values: Tensor | None
lrd.release_memory(): None
lrd.warm_up(lrd.logdet, x, x): None
lrd.NotPositiveDefiniteError("", None, 0.0, 1.0).index: tuple[int, ...] | None
lrd.kl: ModuleType
"""
RIGHT = """
health: lrd.Diagnosis = lrd.diagnose(x, x)
found: lrd.ExtremeEigenvalues = lrd.extreme_eigenvalues(x, x)
with lrd.patch_torch(), lrd.use_backend("reference"):
    pass
"""
WRONG = ("lrd.log_prop(x, x, x, x)", "lrd.logdet(x)", "d.truncate('2')", "lrd.log_prob(x, x, x, x, 'auto')")


def test_every_public_name_is_in_the_snippet():
    assert set(lrd.__all__) <= set(re.findall(r"\w+", TYPES + RIGHT))


def test_strict_mypy_knows_the_types_of_a_users_snippet(tmp_path):
    rows = [line.rpartition(": ")[::2] for line in TYPES.strip().splitlines()]
    lines = [
        "import torch",
        "import lrd_kernels as lrd",
        "x = torch.zeros(3)",
        "d = lrd.LowRankMultivariateNormal(x, x, x)",
        *(f"reveal_type({expression})" for expression, _ in rows),
        *RIGHT.strip().splitlines(),
        *WRONG,
    ]
    (tmp_path / "snippet.py").write_text("\n".join(lines) + "\n")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n")
    command = [sys.executable, "-m", "mypy", "--no-pretty", "snippet.py"]
    environment = {**os.environ, "MYPYPATH": str(pages.ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    found = re.findall(r'^snippet\.py:(\d+): note: Revealed type is "(.*)"$', done.stdout, re.MULTILINE)
    revealed = {int(line): re.sub(r"(\w+\.)+(?=\w)", "", name) for line, name in found}
    assert {expression: revealed.get(line) for line, (expression, _) in enumerate(rows, 5)} == dict(rows), done.stdout
    errors = {int(line) for line in re.findall(r"^snippet\.py:(\d+): error", done.stdout, re.MULTILINE)}
    assert errors == set(range(len(lines) - len(WRONG) + 1, len(lines) + 1)), done.stdout
