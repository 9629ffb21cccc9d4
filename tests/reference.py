"""A slow cold oracle of cursors: stock Hugging Face forwards, nothing of the engines.

Without mounts: one forward over the flat path. With mounts: one token at a time through the stock
model and a cache that shows mounted rows in front of the path's own.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rollout_service.cursors import Cursor


@torch.no_grad()
def flat_logprobs(model: Any, cursor: Cursor) -> Tensor:
    """Log-probabilities after each token of the cursor's path, `[T, V]`; no mounts on the path."""
    path = cursor.path()
    assert not any(node.mounts for node in path)
    token_ids = [token for node in path for token in node.token_ids]
    positions = [p for node in path for p in range(node.position_start, node.next_position)]
    logits = model(
        input_ids=torch.tensor([token_ids]),
        position_ids=torch.tensor([positions]),
        use_cache=False,
    ).logits[0]
    return logits.log_softmax(-1)


class MountCache(DynamicCache):
    """A path's cache that also shows rows mounted from elsewhere, in chosen layers."""

    mounted: dict[int, tuple[Tensor, Tensor]]

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep the path's rows; return the mounted ones in front of them."""
        keys, values = super().update(*args, **kwargs)
        layer = args[2] if len(args) > 2 else kwargs["layer_idx"]
        if layer in self.mounted:
            keys = torch.cat([self.mounted[layer][0], keys], dim=2)
            values = torch.cat([self.mounted[layer][1], values], dim=2)
        return keys, values


class Reference:
    """Cold log-probabilities of cursors with mounts, each node computed once, token by token."""

    def __init__(self, model: Any, mount_layers: tuple[int, ...]) -> None:
        """Compute with a stock `model`; mounted rows are seen in `mount_layers`."""
        model.set_attn_implementation("sdpa")
        self._model = model
        # The keyword was renamed in transformers 5.24.
        names = inspect.signature(type(model).forward).parameters
        self._cache_keyword = "cache" if "cache" in names else "past_key_values"
        self._mount_layers = mount_layers
        self._nodes: dict[int, tuple[MountCache, Tensor]] = {}

    @property
    def model(self) -> Any:
        """The stock model."""
        return self._model

    def logprobs(self, cursor: Cursor) -> Tensor:
        """Log-probabilities after each of the cursor's own tokens, `[n, V]`."""
        return self._node(cursor)[1]

    def path_logprobs(self, cursor: Cursor) -> Tensor:
        """The same for the whole path, `[T, V]`."""
        return torch.cat([self.logprobs(node) for node in cursor.path()])

    def token_logprobs(self, cursor: Cursor) -> list[float]:
        """Log-probability of each of the cursor's tokens; a root's first token is left out."""
        rows = self.logprobs(cursor)[:-1]
        targets = list(cursor.token_ids)
        if cursor.parent is None:
            targets = targets[1:]
        else:
            rows = torch.cat([self.logprobs(cursor.parent)[-1:], rows])
        return [row[token].item() for row, token in zip(rows, targets, strict=True)]

    @torch.no_grad()
    def _node(self, cursor: Cursor) -> tuple[MountCache, Tensor]:
        if cursor.cursor_id not in self._nodes:
            if cursor.parent is None:
                cache = MountCache(config=self._model.config)
            else:
                cache = copy.deepcopy(self._node(cursor.parent)[0])
            cache.mounted = {layer: self._mounted(cursor, layer) for layer in self._mount_layers}
            cache.mounted = {k: v for k, v in cache.mounted.items() if v[0].shape[2]}
            rows = [
                self._token(cache, token, cursor.position_start + offset)
                for offset, token in enumerate(cursor.token_ids)
            ]
            self._nodes[cursor.cursor_id] = cache, torch.stack(rows)
        return self._nodes[cursor.cursor_id]

    def _token(self, cache: MountCache, token: int, position: int) -> Tensor:
        logits = self._model(
            input_ids=torch.tensor([[token]]),
            position_ids=torch.tensor([[position]]),
            use_cache=True,
            **{self._cache_keyword: cache},
        ).logits[0, 0]
        return logits.log_softmax(-1)

    def _mounted(self, cursor: Cursor, layer: int) -> tuple[Tensor, Tensor]:
        """Rows of the cursor's mounts at `layer`: keys and values `[1, H, n, D]`."""
        spans = [self._span(m.source, layer, m.begin, m.end) for m in cursor.mounts]
        if not spans:
            return torch.empty(1, 1, 0, 1), torch.empty(1, 1, 0, 1)
        return torch.cat([s[0] for s in spans], 2), torch.cat([s[1] for s in spans], 2)

    def _span(self, source: Cursor, layer: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        entry: Any = self._node(source)[0].layers[layer]
        rows = slice(source.num_before + begin, source.num_before + end)
        return entry.keys[:, :, rows], entry.values[:, :, rows]
