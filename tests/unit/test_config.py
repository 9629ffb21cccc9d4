"""The rollout service's configuration: strings for every field, unsupported pairs refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from harness_sdk.cli.settings import load_config, render_config
from harness_sdk.errors import ConfigError
from rollout_service.config import RolloutConfig

MODEL = ("--model.path", "model")
VLLM = ("--engine.name", "vllm")


def _load(*flags: str, path: Path | None = None, **environment: str) -> RolloutConfig:
    return load_config(RolloutConfig, path, (*MODEL, *flags), environment)


def _fields(model_class: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model_class.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


@pytest.mark.parametrize(("key", "field"), list(_fields(RolloutConfig)))
def test_every_field_says_what_it_is(key: str, field: FieldInfo) -> None:
    assert field.description, key


def test_defaults_are_those_of_the_design() -> None:
    limits = _load().limits
    assert (limits.thread_budget, limits.answer_reserve) == (32_768, 2_048)
    assert (limits.max_threads, limits.max_depth, limits.max_turns) == (10, None, 50)
    assert limits.admission_kv_use == 0.75
    assert _load().server.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine.name", "jax"), "engine.name is not valid"),
        ((*VLLM, "--model.dtype", "float64"), "model.dtype is not one that vLLM computes in"),
        ((*VLLM, "--model.device", "cuda:1"), "vLLM takes no single device by number"),
        (("--engine.vllm.tensor-parallel-size", "0"), "engine.vllm.tensor_parallel_size is not"),
        (("--engine.vllm.page-tokens", "40"), "engine.vllm.page_tokens is not valid"),
        (("--engine.vllm.gpu-memory-fraction", "1.5"), "engine.vllm.gpu_memory_fraction is not"),
        (("--engine.vllm.max-lora-rank", "1024"), "engine.vllm.max_lora_rank is not valid"),
        (("--engine.vllm.hang-timeout-s", "1e-9"), "engine.vllm.hang_timeout_s is less than an"),
        (("--engine.vllm.max-loras", "2"), "unknown configuration key engine.vllm.max_loras"),
        *(
            (("--engine.vllm.arguments", f"{{{name} = 1}}"), f"engine.vllm.arguments.{name} is the")
            for name in ("seed", "max_num_queued_reqs", "distributed_executor_backend", "runner")
        ),
        (
            ("--engine.vllm.arguments.cpu-offload-gb", "4"),
            "engine.vllm.arguments.cpu_offload_gb is text",
        ),
        *(
            (("--engine.vllm.arguments", f"{{{name} = 1}}"), f"engine.vllm.arguments.{name} has a")
            for name in ("dtype", "block_size", "max_loras")
        ),
        (("--model.path", "none"), "model.path is not set"),
        (("--server.tls-cert", "a.pem"), "server.tls_cert and server.tls_key go together"),
        (("--server.tls-client-ca", "a.pem"), "server.tls_client_ca needs server.tls_cert"),
        (("--server.host", "0.0.0.0"), "server.host is open to others without server.token"),
        *(
            ((f"--{key.replace('_', '-')}", "4294967296"), f"{key} is not valid")
            for key in (
                "limits.max_turns",
                "limits.max_threads",
                "limits.max_depth",
                "openai.max_threads",
            )
        ),
        (("--limits.thread-budget", "2048"), "limits.answer_reserve leaves nothing"),
        (("--adapters.max-versions", "1"), "adapters.max_versions is not valid"),
        (("--run", "a/b"), "run is not valid"),
    ],
)
def test_unsupported_setting_is_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(*flags)
    assert caught.value.message == message or caught.value.message.startswith(message)
    assert caught.value.remedy


def test_a_token_among_the_arguments_of_vllm_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="hf_token is the service's to decide") as caught:
        _load("--engine.vllm.arguments", "{hf_token = 'hunter2'}")
    assert "hunter2" not in str(caught.value)


def test_arguments_of_vllm_pass_through_a_file(tmp_path: Path) -> None:
    given = {"attention_backend": "TRITON_ATTN", "compilation_config": {"mode": 0, "sizes": [1, 2]}}
    flag = '{attention_backend = "TRITON_ATTN", compilation_config = {mode = 0, sizes = [1, 2]}}'
    config = _load("--engine.vllm.arguments", flag)
    assert config.engine.vllm.arguments == given
    path = tmp_path / "again.toml"
    path.write_text(render_config(config, "toml"))
    assert _load(path=path).engine.vllm.arguments == given


def test_environment_gives_addresses_and_the_token() -> None:
    config = _load(
        "--server.host", "0.0.0.0",
        OCTOPUS_REDIS_URL="redis://a", OCTOPUS_MQTT_URL="mqtt://b", OCTOPUS_TOKEN="hunter2",
    )  # fmt: skip
    assert (config.redis.url, config.mqtt.url) == ("redis://a", "mqtt://b")
    assert config.server.token is not None
    assert config.server.token.get_secret_value() == "hunter2"
    assert "hunter2" not in render_config(config) + render_config(config, "json") + repr(config)


def test_rendered_configuration_loads_to_the_same(tmp_path: Path) -> None:
    config = _load("--model.mount-layers", "[1, 3]", "--replica-id", "r-1", "--run", "demo")
    path = tmp_path / "run.toml"
    path.write_text(render_config(config))
    assert load_config(RolloutConfig, path, (), {}) == config
    assert config.folder == Path("runs/demo/r-1")
