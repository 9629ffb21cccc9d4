"""Engine arguments of vLLM that a user adds: refused where cursors cannot live with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import CompilationConfig

from harness_sdk.errors import ConfigError
from rollout_service.config import RolloutConfig
from rollout_service.engine.vllm import VllmEngine
from rollout_service.service import run_service
from tests.chat_tokenizers import save_chat_tokenizer
from tests.vllm.models import DTYPES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_prefix_caching": True}, "got enable_prefix_caching, mamba_cache_mode; allowed"),
        ({"pipeline_parallel_size": 2}, "got pipeline_parallel_size; allowed: none"),
        ({"data_parallel_size": 2}, "got data_parallel_size; allowed: none"),
        # Two ranks for each key and value head, which both are to keep every second row.
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "got decode_context_parallel_size; allowed: none",
        ),
        ({"kv_offloading_size": 1.0}, "got kv_transfer_config; allowed: none"),
        (
            {"tensor_parallel_size": 3},
            r"refuses the engine's arguments: .*must be divisible by .*size .3.\.; change",
        ),
        (
            {"stream_interval": -3},
            "arguments: stream_interval: Input should be greater than or equal to 1, got -3; chan",
        ),
        ({"hf_overrides": {"head_dtype": "float16"}}, "head_dtype 'float16'; allowed: 'float32'"),
        ({"hf_overrides": ["head_dtype"]}, "hf_overrides is a table; got"),
        ({"hf_overrides": False}, "hf_overrides is a table; got False"),
        ({"no_such_argument": 1}, "refuses the engine's arguments: .*no_such_argument"),
    ],
)
async def test_arguments_against_cursors_are_refused_before_anything_starts(
    servable_folder: Path, arguments: dict[str, Any], message: str
) -> None:
    family = "granitemoehybrid"
    engine = VllmEngine(
        str(servable_folder / family),
        dtype=DTYPES[family],
        max_tokens=1024,
        max_adapters=0,
        vllm_arguments=arguments,
    )
    with pytest.raises(ConfigError, match=message):
        await engine.start()


async def test_arguments_of_the_configuration_reach_vllm(
    tmp_path: Path, servable_folder: Path
) -> None:
    model = save_chat_tokenizer(tmp_path / "model")
    for path in (servable_folder / "llama").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = RolloutConfig.model_validate(
        {
            "run_folder": tmp_path / "runs",
            "model": {"path": model, "preamble": "compact"},
            "engine": {"name": "vllm", "vllm": {"arguments": {"attention_backend": "ABACUS"}}},
            "server": {"port": 0},
        }
    )
    with pytest.raises(ConfigError, match=r"refuses the engine's arguments: .*ABACUS"):
        await run_service(config)


async def test_overrides_of_the_model_come_beside_the_type_of_its_logits(
    servable_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: Any, **_: Any) -> None:
        model = config.model_config
        raise ConfigError(f"{model.head_dtype}, {model.hf_config.attention_multiplier}")

    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config", stop)
    engine = VllmEngine(
        str(servable_folder / "granitemoehybrid"),
        dtype="bfloat16",
        max_adapters=0,
        vllm_arguments={"hf_overrides": {"attention_multiplier": 0.5}},
    )
    with pytest.raises(ConfigError, match=r"^torch\.float32, 0\.5$"):
        await engine.start()


async def test_a_gpu_captures_decoding_and_compiles_nothing_unless_asked(
    servable_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(**arguments: Any) -> None:
        compilation = CompilationConfig(**arguments["compilation_config"])
        told = compilation.mode, compilation.cudagraph_mode, compilation.cudagraph_capture_sizes
        raise ValueError(f"{[getattr(each, 'name', each) for each in told]}")

    monkeypatch.setattr("vllm.engine.arg_utils.AsyncEngineArgs.__init__", lambda _, **a: stop(**a))
    for given, expected in (
        ({}, r"\['NONE', 'FULL_DECODE_ONLY', None\]"),
        ({"cudagraph_capture_sizes": [1, 2]}, r"\['NONE', 'FULL_DECODE_ONLY', \[1, 2\]\]"),
        ({"mode": 3}, r"\['VLLM_COMPILE', 'FULL_DECODE_ONLY', None\]"),
    ):
        engine = VllmEngine(
            str(servable_folder / "llama"),
            device="cuda",
            max_adapters=0,
            vllm_arguments={"compilation_config": given} if given else {},
        )
        with pytest.raises(ConfigError, match=expected):
            await engine.start()


async def test_experts_beside_adapters_are_refused_on_the_cpu(servable_folder: Path) -> None:
    engine = VllmEngine(str(servable_folder / "qwen3_moe"), max_adapters=2)
    with pytest.raises(ConfigError, match="no CPU kernel for experts beside adapters; got max_ada"):
        await engine.start()
