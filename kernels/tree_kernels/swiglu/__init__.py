"""The gated activation of feed-forward parts."""

from tree_kernels.swiglu.op import swiglu

__all__ = ["swiglu"]
