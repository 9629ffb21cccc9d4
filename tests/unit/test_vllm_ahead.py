"""Rows whose recurrent state a step scheduled ahead must leave alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rollout_service.engine.vllm.ahead import NULL_BLOCK, EndedRows

STATE_GROUP, ATTENTION_GROUP = 1, 0


class Table:
    """A block table on the device."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = torch.tensor(rows)

    def get_device_tensor(self, num_rows: int) -> torch.Tensor:
        return self.rows[:num_rows]


def batch(*requests: tuple[str, int, int, list[int], list[int]]) -> Any:
    """A runner with requests (id, prompt length, computed, tokens of this step, stop ids)."""
    ids, prompts, computed, tokens, stops = zip(*requests, strict=True)
    starts = np.cumsum([0, *map(len, tokens)])
    return SimpleNamespace(
        device=torch.device("cpu"),
        input_ids=SimpleNamespace(gpu=torch.tensor([t for row in tokens for t in row])),
        query_start_loc=SimpleNamespace(gpu=torch.tensor(starts, dtype=torch.int32)),
        requests={
            name: SimpleNamespace(sampling_params=SimpleNamespace(stop_token_ids=row))
            for name, row in zip(ids, stops, strict=True)
        },
        input_batch=SimpleNamespace(
            req_ids=list(ids),
            num_computed_tokens_cpu=np.array(computed),
            num_prompt_tokens=np.array(prompts),
            block_table=[
                Table([[10 + n, 20 + n] for n in range(len(ids))]),
                Table([[30 + n] for n in range(len(ids))]),
            ],
        ),
    )


def shielded(ended: EndedRows, runner: Any, counts: list[int]) -> list[bool]:
    ended.shield(runner, np.array(counts), [STATE_GROUP])
    tables = runner.input_batch.block_table
    assert (tables[ATTENTION_GROUP].rows != NULL_BLOCK).all()
    return (tables[STATE_GROUP].rows[:, 0] == NULL_BLOCK).tolist()


def test_only_a_sampled_stop_id_of_its_own_hides_a_state() -> None:
    runner = batch(
        ("ended", 5, 9, [7], [3, 7]),
        ("going on", 5, 9, [8], [3, 7]),
        ("another's stop id", 5, 9, [7], [3]),
        ("prompt that ends with it", 5, 4, [7], [7]),
        ("chunk of a prompt", 50, 9, [1, 7], [7]),
        ("no stop ids", 5, 9, [7], []),
        ("first sampled", 5, 5, [7], [7]),
    )
    assert shielded(EndedRows(), runner, [1, 1, 1, 1, 2, 1, 1]) == [
        True, False, False, False, False, False, True
    ]  # fmt: skip


def test_a_batch_is_read_anew_when_it_changes() -> None:
    ended = EndedRows()
    rows = [("a", 3, 6, [7], [7]), ("b", 3, 2, [7], [7])]
    assert shielded(ended, batch(*rows), [1, 1]) == [True, False]
    # The same requests a step later: the second is past its prompt.
    rows = [("a", 3, 7, [1], [7]), ("b", 3, 3, [7], [7])]
    assert shielded(ended, batch(*rows), [1, 1]) == [False, True]
    assert shielded(ended, batch(("c", 3, 6, [7], [8])), [1]) == [False]
    assert shielded(ended, batch(("d", 3, 6, [7], [])), [1]) == [False]
