"""The scan over chains that the gated delta rule and SSD share: kernels and their launches."""

from tree_kernels.chain_scan.scan import BLOCK_SIZES, MAX_KEY_DIM, ChainScan, Delta, default_block_t

__all__ = ["BLOCK_SIZES", "MAX_KEY_DIM", "ChainScan", "Delta", "default_block_t"]
