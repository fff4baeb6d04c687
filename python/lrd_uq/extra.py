"""lightning, in one place: where the training extra is missing, the error says how to get it."""

try:
    import lightning
    import torchmetrics
    from lightning import pytorch as _  # noqa: F401  (its submodules are used as attributes)
except ImportError as error:
    raise ImportError(
        f"the training layer needs {error.name or 'lightning'}: pip install 'lrd-kernels[train]'"
    ) from error

__all__ = ["lightning", "torchmetrics"]
