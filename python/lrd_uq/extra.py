"""Imports lightning and torchmetrics; the error without them says how to install the training extra."""

try:
    import lightning
    import torchmetrics
    from lightning import pytorch as _  # noqa: F401  (its submodules are used as attributes)
except ImportError as error:
    raise ImportError(
        f"the training layer needs {error.name or 'lightning'}: pip install 'lrd-kernels[train]'"
    ) from error

__all__ = ["lightning", "torchmetrics"]
