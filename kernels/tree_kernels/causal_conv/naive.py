"""Tree convolution in PyTorch: shifted sums, then the few rows near forks once more."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tree_kernels.layout import Layout


def naive_tree_causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: Layout, *, silu: bool
) -> torch.Tensor:
    """See `op.tree_causal_conv`."""
    wide_type = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide, taps = x.to(wide_type), weight.to(wide_type).t()
    width, total = taps.shape[0], x.shape[0]
    ahead = F.pad(wide, (0, 0, width - 1, 0))
    out = ahead[:total] * taps[0]
    for tap in range(1, width):
        out = out + ahead[tap : tap + total] * taps[tap]
    rows, windows = layout.conv_taps(width)
    # Row T of the padded strip is zero: what stands before a path's beginning.
    near_forks = (F.pad(wide, (0, 0, 0, 1))[windows] * taps).sum(1)
    out = out.index_copy(0, rows, near_forks)
    out = out if bias is None else out + bias.to(wide_type)
    out = (F.silu(out) if silu else out).to(x.dtype)
    return out[total - layout.num_tokens :]
