"""Bayesian methods, one file each. All of them implement the interface of `Method`."""

from lrd_uq.bayes.base import Method, NoExpectedWeights, predict_joint
from lrd_uq.bayes.dropout import Dropout
from lrd_uq.bayes.ensemble import Ensemble, EnsembleNet
from lrd_uq.bayes.laplace import Laplace
from lrd_uq.bayes.swag import Swag
from lrd_uq.bayes.variational import Variational, VariationalLayer, to_variational

__all__ = [
    "Dropout",
    "Ensemble",
    "EnsembleNet",
    "Laplace",
    "Method",
    "NoExpectedWeights",
    "Swag",
    "Variational",
    "VariationalLayer",
    "predict_joint",
    "to_variational",
]
