"""The norm in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def naive_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """See `op.rms_norm`."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.to(wide)
    out = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    if gate is not None:
        out = out * F.silu(gate.to(wide))
    return out.to(x.dtype)
