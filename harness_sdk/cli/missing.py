"""What a command says where a package that it needs is not installed."""

from __future__ import annotations

from importlib import util

from harness_sdk.errors import ConfigError

_SERVICES = ("rollout_service", "trainer_service", "tree_kernels")
_OF_SERVICES = (
    "aiohttp", "aiomqtt", "amqtt", "jinja2", "numpy", "peft", "pydantic", "redis", "safetensors",
    "torch", "transformers",
)  # fmt: skip
_OF_SDK_COMMANDS, _SDK_COMMANDS = ("pydantic", "redis"), ("run", "eval")


def missing_package(command: str, error: ModuleNotFoundError) -> ConfigError | None:
    """The error of `octopus COMMAND` without a package of ours or of our extras; None elsewhere,
    as with a module that an agent's own code asks for."""
    name = error.name or ""
    package = name.partition(".")[0]
    sdk_alone = util.find_spec("rollout_service") is None
    of_services = package in _SERVICES or name.startswith("harness_sdk.cli.demo")
    if not of_services and package not in _OF_SERVICES:
        return None
    remedy = "pip install 'octopus-agents[rollout,trainer]'"
    if sdk_alone and package in _OF_SDK_COMMANDS and command in _SDK_COMMANDS:
        remedy = "pip install 'octopus-agents-sdk[cli]'"
    elif sdk_alone:
        remedy = f"pip uninstall octopus-agents-sdk, then {remedy}"
    return ConfigError(
        f"{'the services are' if of_services else f'{package} is'} not installed",
        value=f"no module {name}",
        remedy=remedy,
    )
