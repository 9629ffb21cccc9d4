"""Mamba-2 state-space recurrence along the paths of a packed tree."""

from tree_kernels.ssd.op import tree_ssd, tree_ssd_with_states

__all__ = ["tree_ssd", "tree_ssd_with_states"]
