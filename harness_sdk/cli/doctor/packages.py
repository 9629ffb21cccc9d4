"""Versions: what is installed against what we ask for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata, util

from harness_sdk.cli.doctor.check import Check

WHOLE, SDK = "octopus-agents", "octopus-agents-sdk"
"""Our two distributions; the first holds everything, the second the SDK alone."""

_OF_SDK = ("grpcio", "protobuf")
_OF_SERVICES = ("torch", "transformers", "peft", "redis", "pydantic")


def check_packages() -> Iterator[Check]:
    """The interpreter, what we need beside it, and what breaks that."""
    # An interpreter that is too old could not have come so far.
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check(name="python", level="ok", text=version)
    ours = [name for name in (WHOLE, SDK) if _version(name) is not None]
    if len(ours) > 1:
        yield Check(
            name=SDK, level="warn", text=f"installed beside {WHOLE}, which holds the same files",
            remedy=f"pip uninstall {SDK}, then pip install --force-reinstall --no-deps {WHOLE}",
        )  # fmt: skip
    requirements = _requirements(ours[0]) if ours else {}
    for name in _OF_SDK if is_sdk_alone() else (*_OF_SDK, *_OF_SERVICES):
        yield _package(name, requirements.get(name, name))
    if is_sdk_alone():
        return
    if util.find_spec("torchvision") is not None:
        yield _torchvision()
    yield check_vllm()


def is_sdk_alone() -> bool:
    """Whether the services are not installed here, and nothing that they need is missing."""
    return util.find_spec("rollout_service") is None


def check_vllm() -> Check:
    """Whether `--engine.name vllm` can be served here, and on what."""
    from rollout_service.engine.vllm.release import VLLM_VERSION, install_command, installed_vllm

    found = installed_vllm()
    if found is None:
        text = "not installed: --engine.name transformers alone"
        remedy = f"{install_command('cuda')} on GPUs, {install_command('cpu')} elsewhere"
        return Check(name="vllm", level="ok", text=text, remedy=remedy)
    text = f"{found.distribution} {found.version}, --model.device {found.device}"
    if found.is_ours:
        return Check(name="vllm", level="ok", text=text)
    return Check(
        name="vllm", level="warn", text=f"{text}; the engine needs {VLLM_VERSION}",
        remedy=install_command(found.device),
    )  # fmt: skip


def _package(name: str, wanted: str) -> Check:
    version, remedy = _version(name), f"pip install '{wanted}'"
    # The server has the same name.
    label = "redis package" if name == "redis" else name
    if version is None:
        return Check(name=label, level="fail", text="not installed", remedy=remedy)
    if not _satisfies(wanted, version):
        return Check(name=label, level="warn", text=f"{version} is untested", remedy=remedy)
    return Check(name=label, level="ok", text=version)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirements(distribution: str) -> dict[str, str]:
    """What `distribution` asks for, by name, as `torch>=2.11`; the first of a name counts."""
    found: dict[str, str] = {}
    for line in metadata.requires(distribution) or []:
        wanted = line.partition(";")[0].strip()
        found.setdefault(re.split(r"[^\w.-]", wanted)[0], wanted)
    return found


def _satisfies(requirement: str, version: str) -> bool:
    # transformers needs packaging itself; without both there is nothing to compare.
    if util.find_spec("packaging") is None:
        return True
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(version, prereleases=True)


def _torchvision() -> Check:
    """One built for another torch stops transformers from importing."""
    code = "import torch, torchvision; print(torch.version.cuda or 'cpu')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    remedy = "pip uninstall torchvision: nothing here needs it"
    if shown.returncode != 0:
        return Check(name="torchvision", level="fail", text="does not import", remedy=remedy)
    if shown.stdout.strip() == "cpu":
        text = "present beside a CPU build of torch"
        return Check(name="torchvision", level="warn", text=text, remedy=remedy)
    return Check(name="torchvision", level="ok", text="imports")
