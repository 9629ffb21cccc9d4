"""Whether this device's Triton kernels compute what `naive.py` does, tried once for each shape."""

from __future__ import annotations

import functools

import torch

from tree_kernels.causal_conv.function import table_causal_conv
from tree_kernels.causal_conv.naive import naive_tree_causal_conv
from tree_kernels.layout import TreeLayout
from tree_kernels.self_test import kernels_agree, with_gradients


@functools.cache
def kernels_work(
    device: torch.device, dtype: torch.dtype, width: int, with_bias: bool, silu: bool
) -> bool:
    """Whether forward and backward on a small tree agree with `naive`; if not, a warning tells."""
    layout = TreeLayout.build([-1, 0, 1, 0, 0], [70, 1, 40, 2, 5]).to(device)
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (layout.num_tokens, 136), "weight": (136, width)}
    shapes |= {"bias": (136,)} if with_bias else {}
    rounded = {
        name: torch.randn(shape, generator=generator).to(device, dtype)
        for name, shape in shapes.items()
    }
    exact = {name: each.float() for name, each in rounded.items()}
    no_bias = {} if with_bias else {"bias": None}
    return kernels_agree(
        "causal convolution",
        f"{device}, {dtype}, width {width}",
        dtype,
        lambda: with_gradients(
            functools.partial(table_causal_conv, layout=layout, silu=silu, **no_bias), rounded
        ),
        lambda: with_gradients(
            functools.partial(naive_tree_causal_conv, layout=layout, silu=silu, **no_bias), exact
        ),
    )
