"""Data to fit and test on."""

from lrd_uq.data.digits import Digits, load_digits

__all__ = ["Digits", "load_digits"]
