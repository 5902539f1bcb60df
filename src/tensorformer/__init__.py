"""Tensor Transformers in PyTorch: bilinear layers, bilinear attention, and matched comparisons."""

__version__ = "0.1.0"
