"""The suite that every engine plays, on the vLLM engine: families that it computes in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine_cases import Play
from tests.service import test_engine_conformance as suite
from tests.service.test_engine_conformance import (
    test_cancelled_first_of_racing_roots_leaves_nothing_behind,  # noqa: F401
    test_cancelled_generation_returns_to_the_baseline,  # noqa: F401
    test_cancelled_turn_leaves_the_parent_state_untouched,  # noqa: F401
    test_eviction_is_rebuilt_exactly_and_counted,  # noqa: F401
    test_forks_and_rewinds_equal_a_flat_cold_run,  # noqa: F401
    test_greedy_takes_the_likeliest_and_seeds_repeat,  # noqa: F401
    test_mixed_requests_equal_each_alone,  # noqa: F401
    test_mount_of_rewound_steps_stays_readable,  # noqa: F401
    test_mount_recomputes_nothing_and_reads_the_producer,  # noqa: F401
    test_mounts_equal_the_oracle,  # noqa: F401
    test_probe_of_too_few_or_too_many_tokens_is_refused,  # noqa: F401
    test_racing_identical_roots_are_computed_once,  # noqa: F401
    test_release_of_everything_returns_to_zero,  # noqa: F401
    test_requests_past_a_limit_are_refused_by_name,  # noqa: F401
    test_sampled_logprobs_equal_rescoring,  # noqa: F401
    test_single_token_nodes_equal_the_oracle,  # noqa: F401
    test_stop_strings_span_tokens,  # noqa: F401
    test_stops_end_a_turn_where_they_were_sampled,  # noqa: F401
    test_temperature_is_in_the_logprobs,  # noqa: F401
)
from tests.service.test_engine_hand_over import (
    test_a_turn_without_its_last_token_takes_its_residency_over,  # noqa: F401
)
from tests.vllm.conftest import FP32_FAMILIES
from tests.vllm.models import MOE_FAMILIES

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow,
    # PEFT 0.21 reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

adaptable = pytest.mark.parametrize(
    "family", [family for family in FP32_FAMILIES if family not in MOE_FAMILIES]
)


async def test_no_script_of_the_suite_is_left_out() -> None:
    names = {name for name in vars(suite) if name.startswith("test_")}
    assert names <= set(globals())


@adaptable
async def test_adapters_serve_side_by_side(play: Play, tmp_path: Path) -> None:
    await suite.test_adapters_serve_side_by_side(play, tmp_path)


@adaptable
async def test_adapter_checksums_are_those_of_the_file(hybrid: Play, tmp_path: Path) -> None:
    await suite.test_adapter_checksums_are_those_of_the_file(hybrid, tmp_path)


@adaptable
async def test_faulty_adapter_is_refused_by_name_and_the_old_one_serves(
    hybrid: Play, tmp_path: Path
) -> None:
    await suite.test_faulty_adapter_is_refused_by_name_and_the_old_one_serves(hybrid, tmp_path)


@adaptable
async def test_adapter_of_another_base_model_is_refused(
    hybrid: Play, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    await suite.test_adapter_of_another_base_model_is_refused(hybrid, model_folder, tmp_path)
