"""The start-up check: what a changed vLLM lacks is named."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from harness_sdk.errors import ConfigError
from rollout_service.engine.vllm import groups, seams
from rollout_service.engine.vllm.placeholders import RowsAndTokens, TokenTable

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


@pytest.mark.parametrize(
    ("path", "members", "parameters", "missing"),
    [
        ("vllm.v1.core.sched.planner:Scheduler", (), {}, "planner:Scheduler"),
        ("vllm.v1.core.sched.scheduler:Planner", (), {}, "scheduler:Planner"),
        (SCHEDULER, ("free_blocks_of",), {}, "Scheduler.free_blocks_of"),
        (SCHEDULER, (), {"plan": "request"}, "Scheduler.plan"),
        (SCHEDULER, (), {"add_request": "request cursor"}, r"Scheduler.add_request\(cursor=\)"),
    ],
)
def test_missing_seam_is_named(
    path: str, members: tuple[str, ...], parameters: dict[str, str], missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"{missing}; got vllm 0.32.0; allowed: .*0.32.0"):
        seams.find_seam(path, *members, **parameters)


def test_missing_attribute_of_an_instance_is_named() -> None:
    seams.require_attributes(seams, "find_seam")
    with pytest.raises(ConfigError, match=r"lacks the seam builtins:list\.blocks"):
        seams.require_attributes([], "append", "blocks")


def test_windowed_attention_is_refused_by_name() -> None:
    from vllm.v1 import kv_cache_interface

    with pytest.raises(ConfigError, match="attention kind cannot be mounted; got Sliding"):
        groups.is_recurrent(
            kv_cache_interface.SlidingWindowSpec.__new__(kv_cache_interface.SlidingWindowSpec)
        )


def test_placeholder_rows_read_as_zeros_in_front_of_tokens() -> None:
    rows = RowsAndTokens(5, [1, 2, 3])
    kept = np.array(rows, dtype=np.int64)
    assert kept.tolist() == list(rows) == rows[:] == pickle.loads(pickle.dumps(rows)).copy()
    assert kept.tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    rows.append(4)
    assert (len(rows), rows[-1], rows[-9], rows[3:7]) == (9, 4, 0, [0, 0, 1, 2])


def test_a_table_takes_a_prompt_in_without_its_placeholders() -> None:
    table = np.full((2, 10), 9, dtype=np.int32).view(TokenTable)
    # As vLLM's worker takes a prompt in, what was sampled behind it, and moves it to another row.
    prompt = RowsAndTokens(5, [1, 2, 3])
    table[0, : len(prompt)] = prompt
    table[0, 8:9] = [4]
    table[1, :9] = table[0, :9]
    assert table.tolist() == [[9, 9, 9, 9, 9, 1, 2, 3, 4, 9]] * 2
    table[1, :4] = RowsAndTokens(4, [])
    assert table[1, :4].tolist() == [9] * 4
