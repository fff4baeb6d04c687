"""Data sets and tasks. The tasks (`lrd_uq.data.inpainting` and others) need the training extra."""

from lrd_uq.data.batch import Batch, as_batch
from lrd_uq.data.digits import Digits, load_digits
from lrd_uq.data.idx import load_mnist, read_idx

__all__ = ["Batch", "Digits", "as_batch", "load_digits", "load_mnist", "read_idx"]
