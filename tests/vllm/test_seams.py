"""The start-up check: what a changed vLLM lacks is named."""

from __future__ import annotations

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
    from vllm.v1 import kv_cache_interface  # pyright: ignore[reportMissingImports]

    with pytest.raises(ConfigError, match="attention kind cannot be mounted; got Sliding"):
        groups.is_recurrent(
            kv_cache_interface.SlidingWindowSpec.__new__(kv_cache_interface.SlidingWindowSpec)
        )
