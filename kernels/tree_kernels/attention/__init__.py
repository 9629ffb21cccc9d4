"""Attention over ancestors, self and mounts of a packed tree."""

from tree_kernels.attention.op import tree_attention

__all__ = ["tree_attention"]
