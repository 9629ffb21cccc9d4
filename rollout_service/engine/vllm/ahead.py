"""Scheduling a step ahead without advancing a recurrent state past the end of a turn.

With asynchronous scheduling the core schedules a step before it has seen what the last one sampled.
A sequence that has just sampled a stop id is therefore in one more batch, whose input is that id.
Its K/V row is cut off with the block table. A recurrent state cannot be cut, and the id may be
dropped from the path, so the state must not see it: the row is sent to vLLM's null block instead,
decided on the device, where the sampled token already is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

NULL_BLOCK = 0
"""The block that vLLM points padding at; nothing reads it."""
_NO_TOKEN = -1


class EndedRows:
    """Finds the rows of a batch that compute a sampled stop id, and shields their states."""

    def __init__(self) -> None:
        """Know no batch yet."""
        self._key: tuple[Any, ...] = ()
        self._stops: torch.Tensor | None = None

    def shield(
        self, runner: Any, num_scheduled_tokens: np.ndarray, state_groups: list[int]
    ) -> None:
        """Point the state of every ended sequence at the null block, for this step.

        Called when the step's tokens and block tables are on the device and nothing reads them yet;
        waits for nothing there.

        Args:
            runner: vLLM's model runner.
            num_scheduled_tokens: Of each request of the batch, `[N]`.
            state_groups: Recurrent KV cache groups.
        """
        stops = self._stops_by_row(runner, num_scheduled_tokens)
        if stops is None:
            return
        last = runner.query_start_loc.gpu[1 : len(stops) + 1] - 1
        tokens = runner.input_ids.gpu[last]
        ended = (tokens.unsqueeze(1) == stops).any(1)
        for group in state_groups:
            table = runner.input_batch.block_table[group].get_device_tensor(len(stops))
            table[:, 0].masked_fill_(ended, NULL_BLOCK)

    def _stops_by_row(self, runner: Any, num_scheduled_tokens: np.ndarray) -> torch.Tensor | None:
        """Stop ids of the rows whose last token was sampled, `[N, S]`; None where there are none.

        Kept on the device while the batch stays as it is.
        """
        batch = runner.input_batch
        num_rows = len(num_scheduled_tokens)
        last = batch.num_computed_tokens_cpu[:num_rows] + num_scheduled_tokens - 1
        is_sampled = last >= batch.num_prompt_tokens[:num_rows]
        key = (*batch.req_ids, is_sampled.tobytes())
        if key != self._key:
            stops = [
                runner.requests[request_id].sampling_params.stop_token_ids or []
                if is_sampled[row]
                else []
                for row, request_id in enumerate(batch.req_ids)
            ]
            table = _table(stops)
            self._key = key
            self._stops = None if table is None else on_device(table, runner.device)
        return self._stops


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that the step under way on `device` does not hold up, as pageable memory would."""
    if device.type != "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _table(stops: list[list[int]]) -> torch.Tensor | None:
    """Rows of equal width; None where all are empty."""
    width = max(map(len, stops))
    if not width:
        return None
    return torch.tensor([row + [_NO_TOKEN] * (width - len(row)) for row in stops])
