"""What every family shares: the tree that a forward pass carries and the attention that reads it.

`model(..., tree=PackedTree(...))` reaches each mixer through Hugging Face's keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from trainer_service.models.precision import rounded_once
from tree_kernels.attention import tree_attention
from tree_kernels.layout import TreeLayout

TREE_ATTENTION = "octopus_tree"
"""Name of the attention implementation in Hugging Face's registry."""

MixerForward = Callable[..., torch.Tensor]
"""`forward(module, hidden_states [1, T, D], *, tree, **ignored) -> [1, T, D]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTree:
    """The tree of the strip that a forward pass computes."""

    layout: TreeLayout
    mount_layers: frozenset[int]
    """Decoder layers whose attention reads mounted spans."""


def use_tree(model: nn.Module, mixers: Mapping[str, MixerForward]) -> None:
    """Let `model` compute packed trees from now on.

    Args:
        model: A Hugging Face model; LoRA layers inside its mixers keep working.
        mixers: Forward of each recurrent mixer, by the name of its class.
    """
    for module in model.modules():
        forward = mixers.get(type(module).__name__)
        if forward is not None:
            module.forward = MethodType(forward, module)
    set_attention: Callable[[str], None] = getattr(model, "set_attn_implementation")  # noqa: B009
    set_attention(TREE_ATTENTION)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    tree: PackedTree,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the packed tree, as Hugging Face's registry calls it.

    Args:
        query: `[1, HQ, T, D]`; key and value `[1, H, T, D]`.

    Returns:
        `[1, T, HQ, D]`, and None for the weights.
    """
    del attention_mask
    attend = partial(
        tree_attention,
        layout=tree.layout,
        scale=scaling,
        mounted=module.layer_idx in tree.mount_layers,
    )
    out = rounded_once(attend, *(rows[0].transpose(0, 1) for rows in (query, key, value)))
    return out[None], None


AttentionInterface.register(TREE_ATTENTION, attention_forward)
# Visibility is the layout's business: no dense mask is ever built.
AttentionMaskInterface.register(TREE_ATTENTION, lambda *args, **kwargs: None)
