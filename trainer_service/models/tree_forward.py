"""What every family shares: the tree that a forward pass carries and the attention that reads it.

`model(..., tree=PackedTree(...))` reaches each mixer through Hugging Face's keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from trainer_service.models.precision import first_rounded, rounded_once
from tree_kernels.attention import tree_attention
from tree_kernels.layout import Layout, TreeLayout

TREE_ATTENTION = "octopus_tree"
"""Name of the attention implementation in Hugging Face's registry."""

MixerForward = Callable[..., torch.Tensor]
"""`forward(module, hidden_states [1, T, D], *, tree, **ignored) -> [1, T, D]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTree:
    """The tree of the strip, or the piece of one, that a forward pass computes."""

    layout: Layout
    mount_layers: frozenset[int]
    """Decoder layers whose attention reads mounted spans."""
    boundary: Boundary | None = None
    """Of a piece; None computes a whole tree."""

    @property
    def recurrent_layout(self) -> TreeLayout:
        """The rows alone, for recurrences."""
        return self.layout if isinstance(self.layout, TreeLayout) else self.layout.tree

    @property
    def end_nodes(self) -> tuple[int, ...]:
        """Nodes of `recurrent_layout` whose end states other pieces go on from."""
        return () if isinstance(self.layout, TreeLayout) else self.layout.end_nodes

    def with_seen(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values, `[T, ...]`, behind those that the piece sees in others."""
        if self.boundary is None:
            return [key, value]
        return [self.boundary.with_seen((layer, n), each) for n, each in enumerate((key, value))]

    def with_context(self, layer: int, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Inputs of a convolution, `[T, D]`, behind those of other pieces in its windows."""
        return rows if self.boundary is None else self.boundary.with_context(layer, rows, width)

    def recur(
        self,
        layer: int,
        compute: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Output of a recurrence; a piece's goes on from the states that others have left.

        Args:
            layer: Of the mixer.
            compute: `compute(*inputs, initial)` gives the output and the states to leave.
            inputs: The first has the output's type.
        """
        initial = self.boundary.initial_states(layer) if self.boundary is not None else None
        if initial is None:
            out, states = first_rounded(lambda *each: compute(*each, None), *inputs)
        else:
            out, states = first_rounded(compute, *inputs, initial)
        if self.boundary is not None:
            self.boundary.leave_states(layer, states)
        return out


class Boundary(Protocol):
    """What passes between the pieces of a strip, seen from one of them."""

    def with_seen(self, slot: tuple[int, int], rows: torch.Tensor) -> torch.Tensor:
        """`rows` behind those of other pieces that attention sees."""
        ...

    def with_context(self, layer: int, rows: torch.Tensor, width: int) -> torch.Tensor:
        """`rows` behind those of other pieces in the windows of a convolution of `width`."""
        ...

    def initial_states(self, layer: int) -> torch.Tensor | None:
        """State before each root, `[R, ...]`; None where all are zero."""
        ...

    def leave_states(self, layer: int, states: torch.Tensor) -> None:
        """Take the states that other pieces go on from, `[S, ...]`."""
        ...


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
    module: Any,
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
    query, key, value = (rows[0].transpose(0, 1) for rows in (query, key, value))
    out = rounded_once(attend, query, *tree.with_seen(module.layer_idx, key, value))
    return out[None], None


AttentionInterface.register(TREE_ATTENTION, attention_forward)
# Visibility is the layout's business: no dense mask is ever built.
AttentionMaskInterface.register(TREE_ATTENTION, lambda *args, **kwargs: None)
