"""Gated delta rule along the paths of a packed tree."""

from tree_kernels.gated_delta_rule.op import tree_gated_delta_rule

__all__ = ["tree_gated_delta_rule"]
