"""Held-out scores of a network, for every Gaussian that can be formed from its predictions."""

from lrd_uq.evaluate.ordering import Difference, paired
from lrd_uq.evaluate.reconstruction import unexplained_error
from lrd_uq.evaluate.region_sum import Calibration, calibration, standardised_sum
from lrd_uq.evaluate.rows import Evaluation, Row, evaluate
from lrd_uq.evaluate.scores import ItemScores, collect, stream
from lrd_uq.evaluate.seeds import SeedDifference, over_seeds
from lrd_uq.evaluate.sweep import kept_columns, key_of
from lrd_uq.evaluate.tables import failures, figures, markdown, summary, table

__all__ = [
    "Calibration",
    "Difference",
    "Evaluation",
    "ItemScores",
    "Row",
    "SeedDifference",
    "calibration",
    "collect",
    "evaluate",
    "failures",
    "figures",
    "kept_columns",
    "key_of",
    "markdown",
    "over_seeds",
    "paired",
    "standardised_sum",
    "stream",
    "summary",
    "table",
    "unexplained_error",
]
