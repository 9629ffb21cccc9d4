"""Packed-tree operators: attention, gated delta rule, SSD, causal convolution, log-probability."""
