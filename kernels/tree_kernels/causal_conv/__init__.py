"""Depthwise causal convolution along the paths of a packed tree."""

from tree_kernels.causal_conv.op import tree_causal_conv

__all__ = ["tree_causal_conv"]
