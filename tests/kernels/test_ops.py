"""Each raw op: opcheck (schema, fake, dispatch), and values against plain float64 torch."""

import pytest
import torch

from lrd_kernels import testing
from lrd_kernels.ops import load, registry, schemas

OPS = registry.OPS["cpu"]
pytestmark = pytest.mark.skipif(load.cpu_error is not None, reason=str(load.cpu_error))


def s_sized(layout="row", dtype=torch.float32, masked=False, eps=None, value=True, shared=1):
    """Leading arguments of the S-sized ops: 2 factors, `shared` Gaussians to each, 3 values to each Gaussian."""
    F, B, N, S, R = 2, 2 * shared, 3, 21, 4
    P = testing.make_inputs((F,), S, R, dtype=dtype, layout=layout).cov_factor
    D = testing.make_inputs((B,), S, R, dtype=dtype).cov_diag
    values = testing.make_inputs((B, N), S, R, dtype=dtype)
    mask = torch.rand(B, S, generator=torch.Generator().manual_seed(0)) < 0.7 if masked else None
    return (P, D, values.value if value else None, values.loc if value else None, mask, eps, 0)


SAMPLES = [
    s_sized(),
    s_sized("rank", torch.float64),
    s_sized("strided", torch.bfloat16, masked=True),
    s_sized("row", torch.float16, eps=0.1),
    s_sized("rank", value=False),
    s_sized("row", masked=True, shared=3),
]


def backward_arguments(inputs, needs=(True, True, True, False)):
    result, *saved = OPS.log_prob_fwd(*inputs, None, None, -0.5, -0.5, 0.0)
    return (*inputs, *saved, torch.rand_like(result), -0.5, -0.5, *needs)


def known_arguments(inputs):
    _, chol_inv, summary, *_ = OPS.log_prob_fwd(*inputs, None, None, 0.0, 0.0, 0.0)
    return (*inputs, chol_inv, summary, 1.0, 0.5, -3.0)


STACKS = [
    (torch.rand(2, 3, 5, 2, dtype=torch.float64), torch.rand(2, 4, 5, dtype=torch.float64), 0.5, 2.0, True),
    (torch.rand(2, 3, 2, 5).mT, torch.rand(2, 5, 7).mT, 1.0, 1.0, False),
    (torch.rand(2, 1, 70, 4, dtype=torch.bfloat16), None, 1.0, 1.0, False),
    (torch.rand(2, 2, 5, 3, dtype=torch.float16)[..., 1:], None, 1.0, 1.0, True),
]


def columns(stack):
    return stack[0].shape[1] * stack[0].shape[3] + (0 if stack[1] is None else stack[1].shape[1])


def turned(stack, K):
    return [torch.rand(2, columns(stack), K).double() for _ in range(2)]


def pull(stack, K, fold):
    B, _, S, _ = stack[0].shape
    return stack[0].new_ones(B, S, K), stack[0].new_ones(B, K, S).mT, stack[0].new_ones(B, S) if fold else None


OP_SAMPLES = {
    "gram_fwd": SAMPLES,
    "capacitance_fwd": [OPS.gram_fwd(*s) for s in SAMPLES] if load.cpu_error is None else [],
    "log_prob_fwd": (
        [(*s, None, None, 1.0, 0.5, -3.0) for s in SAMPLES] + [known_arguments(s) for s in SAMPLES]
        if load.cpu_error is None
        else []
    ),
    "joint_gram_fwd": [(*stack, precision) for stack in STACKS for precision in (1, 2)],
    "project_fold_fwd": [
        (*stack, torch.rand_like(stack[0][:, 0, :, 0]), torch.rand(2, columns(stack), K).double(), fold, rank_major)
        for stack in STACKS
        for K, fold, rank_major in ((3, True, False), (0, True, False), (1, False, True), (9, True, True))
    ],
    "project_basis_bwd": [(*stack, *pull(stack, K, fold)) for stack in STACKS for K, fold in ((3, True), (0, False))],
    "project_fold_bwd": [
        (*stack, *turned(stack, K), *pull(stack, K, fold), *needs)
        for stack in STACKS
        for K, fold, needs in ((3, True, (True, True)), (0, True, (True, False)), (9, False, (False, True)))
    ],
    "log_prob_bwd": (
        [backward_arguments(s) for s in SAMPLES]
        + [
            backward_arguments(SAMPLES[1], needs)
            for needs in ((True, False, False, False), (False, True, False, False), (False, False, True, True))
        ]
        if load.cpu_error is None
        else []
    ),
}


def test_every_op_has_samples():
    assert set(OP_SAMPLES) == set(schemas.SCHEMAS)
    assert all(OP_SAMPLES.values())


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_opcheck(name):
    op = getattr(torch.ops.lrd, name).default
    for sample in OP_SAMPLES[name]:
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(op, sample, test_utils=checks)


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_values(sample):
    P, D, value, loc, mask, eps, _ = sample
    shared = D.shape[0] // P.shape[0]
    P, D = P.double().repeat_interleave(shared, 0), D.double()
    D = D if eps is None else eps + D.exp()
    keep = torch.ones_like(D, dtype=torch.bool) if mask is None else mask
    w = keep / D
    r = torch.zeros(D.shape[0], 0, D.shape[1]).double() if value is None else value.double() - loc.double()
    gram, u, quad, log_diag = OPS.gram_fwd(*sample)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(gram, P.mT @ (P * w[..., None]), **close)
    torch.testing.assert_close(u, (r * w[:, None]) @ P, **close)
    torch.testing.assert_close(quad, (r.square() * w[:, None]).sum(-1), **close)
    torch.testing.assert_close(log_diag, (D.log() * keep).sum(-1), **close)

    chol, chol_inv, z, maha, logdet, growth = OPS.capacitance_fwd(gram, u, quad, log_diag)
    C = torch.eye(P.shape[-1]).double() + gram
    torch.testing.assert_close(chol @ chol.mT, C, **close)
    torch.testing.assert_close(chol_inv @ chol, torch.eye(P.shape[-1]).double().expand_as(C), **close)
    assert not chol.triu(1).any()
    assert not chol_inv.triu(1).any()
    torch.testing.assert_close(z, torch.linalg.solve(C, u.mT).mT, **close)
    torch.testing.assert_close(maha, quad - (u * z).sum(-1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(logdet, torch.linalg.slogdet(C)[1] + log_diag, rtol=1e-10, atol=1e-10)
    assert (growth >= 1).all()
    assert growth.isfinite().all()

    # both in one
    result, *saved, value_info = OPS.log_prob_fwd(*sample, None, None, 2.0, 3.0, 5.0)
    wide = sample[0].dtype == torch.float64 or mask is not None
    assert result.dtype == (torch.float64 if wide else torch.float32)
    wanted = (0 if value is None else 2 * maha) + 3 * logdet[:, None] + 5 * sample[1].shape[1]
    torch.testing.assert_close(result.double(), wanted, rtol=1e-10 if result.dtype == torch.float64 else 1e-6, atol=0)
    for actual, separate in zip(saved, (chol_inv, torch.stack([growth, logdet], -1), z), strict=True):
        torch.testing.assert_close(actual, separate, **close)
    assert not value_info.any()
    again, chol_inv, summary, z_again, value_info = OPS.log_prob_fwd(*sample, *saved[:2], 2.0, 3.0, 5.0)
    torch.testing.assert_close(again, result, rtol=1e-10 if result.dtype == torch.float64 else 1e-6, atol=0)
    torch.testing.assert_close(z_again, z, **close)
    assert chol_inv.numel() == summary.numel() == value_info.any() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0][0], *a[1:]), "must be"),
        (lambda a: (a[0].int(), *a[1:]), "float32, float64"),
        (lambda a: (a[0], a[1][:, :-1], *a[2:]), "does not fit"),
        (lambda a: (a[0], a[1][:1], *a[2:]), "does not fit|must be"),
        (lambda a: (a[0], a[1].double(), *a[2:]), "one dtype"),
        (lambda a: (*a[:2], a[2][..., :-1], *a[3:]), "must be"),
        (lambda a: (*a[:3], a[3][:, :1], *a[4:]), "must be"),
        (lambda a: (*a[:4], torch.ones(2, 21), *a[5:]), "must be bool"),
        (lambda a: (*a[:6], 7), "precision"),
    ],
)
def test_raw_ops_refuse_what_does_not_fit(change, message):
    """A raw op called past the Python checks answers with an error, not with a read astray."""
    with pytest.raises(RuntimeError, match=message):
        OPS.gram_fwd(*change(SAMPLES[0]))


def test_raw_backward_refuses_what_does_not_fit():
    good = backward_arguments(SAMPLES[0])
    for position in range(7, 12):
        wrong = list(good)
        wrong[position] = wrong[position][:1]
        with pytest.raises(RuntimeError, match="sizes"):
            OPS.log_prob_bwd(*wrong)
