"""The machine and the versions behind the figures."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "triton", "transformers", "peft", "flash-linear-attention", "numpy")


def hardware(device: str) -> dict[str, Any]:
    """Processor, threads and versions; what is not installed is left out."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return {"hardware": name, "threads": torch.get_num_threads(), "versions": versions}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()
