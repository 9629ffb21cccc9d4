"""What the gated delta rule and SSD share; `scan.py` and its kernels need Triton."""
