"""What Gated DeltaNet computes row by row before its recurrence."""

from tree_kernels.rowwise.op import delta_gates, l2_normalised

__all__ = ["delta_gates", "l2_normalised"]
