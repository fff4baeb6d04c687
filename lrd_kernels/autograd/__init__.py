"""Differentiable functions over the raw ops."""
