"""Row by row operations in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def naive_l2_normalised(x: torch.Tensor) -> torch.Tensor:
    """See `op.l2_normalised`."""
    # Not F.normalize: its epsilon bounds the norm instead of adding to its square.
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def naive_delta_gates(
    step: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.delta_gates`."""
    return -_wide(a_log).exp() * F.softplus(_wide(step) + dt_bias), beta.sigmoid()


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()
