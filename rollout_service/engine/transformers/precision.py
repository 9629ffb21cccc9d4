"""What gives a float32 model on the CPU the trainer's numbers, however its tokens are batched.

A trained model can turn the last bit of a float32 into 1e-4 nats. Its linear layers and norms give
a row the same bits in every strip of `MIN_ROWS` rows or more. Attention and recurrences add up in
another order token by token than over a packed tree: they run in float64 and are rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_ROWS = 16
"""MKL multiplies few rows by other routines than more, which add in another order.

Few are one to three on AMD, with AVX2 and AVX-512, and up to fifteen on Intel with AVX-512, from
384 columns on. Seen on one thread; a second gets half of the rows.
"""


def widened(values: Tensor) -> Tensor:
    """float32 on the CPU as float64; anything else as it is."""
    return values.to(widened_dtype(values.dtype, values.device))


def widened_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that `widened` gives values of `dtype`."""
    return torch.float64 if dtype == torch.float32 and device.type == "cpu" else dtype


def min_rows(dtype: torch.dtype, device: torch.device) -> int:
    """Rows that a matrix product of `dtype` is filled up to."""
    return 1 if widened_dtype(dtype, device) == dtype else MIN_ROWS
