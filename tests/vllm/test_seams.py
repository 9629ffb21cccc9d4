"""The start-up check: what a changed vLLM lacks is named."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from harness_sdk.errors import ConfigError
from rollout_service.engine.vllm import groups, seams

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
    one, other = seams.RowsAndTokens(5, [1, 2, 3]), seams.RowsAndTokens(70_000, [7])
    table = np.full((2, 70_010), 9, dtype=np.int32)
    # As vLLM's worker takes prompts in; the second is longer than the buffer behind both.
    for row, prompt in enumerate((one, other)):
        table[row, : len(prompt)] = prompt
    table[1, : len(one)] = one
    assert table[0, :10].tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 9, 9]
    assert table[1, :10].tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 0, 0]
    assert table[1, 69_998:70_003].tolist() == [0, 0, 7, 9, 9]
    kept = np.array(one, dtype=np.int64)
    np.asarray(other)
    assert kept.tolist() == list(one) == one[:] == pickle.loads(pickle.dumps(one)).copy()
    one.append(4)
    assert (len(one), one[-1], one[-9], one[3:7]) == (9, 4, 0, [0, 0, 1, 2])
