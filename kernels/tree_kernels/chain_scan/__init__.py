"""The scan over chains that the gated delta rule and SSD share: kernels and their launches."""

from tree_kernels.chain_scan.scan import ChainScan, Gradients, checked_block_t, default_block_t

__all__ = ["ChainScan", "Gradients", "checked_block_t", "default_block_t"]
