"""What computes tokens: the seam in `base`, two implementations, and one that computes nothing."""
