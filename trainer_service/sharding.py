"""Base weights divided among ranks with FSDP2: each rank keeps its part of every layer.

A layer's weights are gathered before it computes, forward and backward, and given up behind it.
All ranks must therefore run the same passes in the same order: `step.py` pads shares with fewer
strips, `Policy.logprobs` strips with fewer pieces.

Adapters stay whole, and ranks add their gradients as without sharding. So do embedding, last norm
and head, which a strip needs from its first row to its last.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def shard_layers(model: Any, mesh: DeviceMesh) -> None:
    """Divide the frozen weights of each decoder layer along `mesh`; all its ranks call it.

    Args:
        model: Hugging Face causal language model, adapters included, with its forwards in place.
        mesh: One dimension; its device type is where the model computes.
    """
    whole = {parameter for parameter in model.parameters() if parameter.requires_grad}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=whole)
    # The root owns no weight: it lets one layer's weights travel while another computes.
    fully_shard(model.model, mesh=mesh, ignored_params=set(model.parameters()))
