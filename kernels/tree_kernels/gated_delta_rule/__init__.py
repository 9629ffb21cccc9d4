"""Gated delta rule along the paths of a packed tree."""

from tree_kernels.gated_delta_rule.op import (
    tree_gated_delta_rule,
    tree_gated_delta_rule_with_states,
)

__all__ = ["tree_gated_delta_rule", "tree_gated_delta_rule_with_states"]
