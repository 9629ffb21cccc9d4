"""Mamba-2 state-space recurrence along the paths of a packed tree."""

from tree_kernels.ssd.op import tree_ssd

__all__ = ["tree_ssd"]
