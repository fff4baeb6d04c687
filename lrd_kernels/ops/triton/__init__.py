"""The raw ops in Triton: one file per op, with its kernels and launchers. Imported when an op is first called."""

from lrd_kernels.ops.triton.capacitance import capacitance_fwd
from lrd_kernels.ops.triton.gram import gram_fwd
from lrd_kernels.ops.triton.joint_gram import joint_gram_fwd
from lrd_kernels.ops.triton.log_prob_bwd import log_prob_bwd
from lrd_kernels.ops.triton.log_prob_fwd import log_prob_fwd
from lrd_kernels.ops.triton.project_fold import project_fold_fwd

OPS = {
    op.__name__: op for op in (capacitance_fwd, gram_fwd, joint_gram_fwd, log_prob_bwd, log_prob_fwd, project_fold_fwd)
}
