"""Root-mean-square norm of rows, with an optional SiLU gate behind it."""

from tree_kernels.rms_norm.op import rms_norm

__all__ = ["rms_norm"]
