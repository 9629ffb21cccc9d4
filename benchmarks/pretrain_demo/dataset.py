"""The saved episodes on a device, every batch with new numbers.

The digits of an episode's numbers are slots, filled anew whenever it is drawn, so that none of
them can be learned by heart.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.pretrain_demo.forward import DagBatch

COPIED, GUESSED, WRITTEN = 1, 2, 3
"""Role of a sampled token: a digit seen before, a digit made up, anything else. 0: not sampled."""


class Episodes:
    """Padded episodes on one device."""

    def __init__(self, path: Path, device: str) -> None:
        with np.load(path) as arrays:
            self._arrays = {
                name: torch.from_numpy(arrays[name]).to(device)
                for name in arrays.files
                if name != "node_sees"
            }
            sees = np.unpackbits(arrays["node_sees"], axis=-1).astype(bool)
        self._sees = torch.from_numpy(sees).to(device)
        self._digit_ids = self._arrays.pop("digit_ids").long()
        self._num_slots = max(int(self._arrays["slot"].max()) + 1, 1)

    def __len__(self) -> int:
        return len(self._sees)

    def draw(
        self, rows: torch.Tensor, generator: torch.Generator
    ) -> tuple[DagBatch, torch.Tensor, torch.Tensor]:
        """Episodes `rows`, `[B]`, with new numbers.

        Returns:
            The batch; the row that predicts each token, `[B, T]`; each token's role, `[B, T]`.
        """
        part = {name: array[rows].long() for name, array in self._arrays.items()}
        slot = part["slot"]
        digits = torch.randint(
            10, (len(rows), self._num_slots), generator=generator, device=rows.device
        )
        fresh = self._digit_ids[digits].gather(1, slot.clamp(min=0))
        batch = DagBatch(
            token_ids=torch.where(slot >= 0, fresh, part["token_ids"]),
            position_ids=part["position_ids"],
            visible=self._visible(rows, part["node"]),
            paths=part["paths"],
            path_slot=part["path_slot"],
        )
        return batch, part["before"], part["role"]

    def _visible(self, rows: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        others = self._sees[rows].gather(1, node[..., None].expand(-1, -1, self._sees.shape[-1]))
        order = torch.arange(node.shape[1], device=node.device)
        own = (node[:, :, None] == node[:, None]) & (order[:, None] >= order[None])
        return others | own
