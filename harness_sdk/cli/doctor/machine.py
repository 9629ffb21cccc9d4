"""This machine: room on the disk, the right to write there, ports, memory of the GPUs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness_sdk.cli.doctor.check import Check

_MIN_DISK_GIB, _GOOD_DISK_GIB = 1, 10
# The default of engine.vllm.gpu_memory_fraction: with less free, vLLM refuses to start.
_GPU_FRACTION = 0.9
_NVIDIA_SMI = (
    "nvidia-smi", "--query-gpu=index,name,memory.free,memory.total",
    "--format=csv,noheader,nounits",
)  # fmt: skip
_NVIDIA_SMI_S = 20


def check_disk(folder: Path) -> Check:
    """Room for checkpoints and Valkey's log."""
    there = _nearest(folder)
    free = shutil.disk_usage(there).free / 2**30
    text = f"{free:.1f} GiB free at {there}"
    if free >= _GOOD_DISK_GIB:
        return Check(name="disk", level="ok", text=text)
    level = "warn" if free >= _MIN_DISK_GIB else "fail"
    return Check(name="disk", level=level, text=text, remedy="free some, or give another --folder")


def check_permissions(folder: Path) -> Check:
    """Whether this user may write the runs' folder, or make it."""
    there = _nearest(folder)
    try:
        # What a read-only file system or an access list would forbid, mode bits do not tell.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return Check(
            name="permissions", level="fail",
            text=f"user {os.geteuid()} cannot write {there}: {error.strerror}",
            remedy=f"chown {os.geteuid()} {there}, or give another --folder",
        )  # fmt: skip
    return Check(name="permissions", level="ok", text=f"{there} can be written")


def check_port(port: int) -> Check:
    """Whether a service could bind `port` on loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(
                name=f"port {port}", level="warn", text=str(error.strerror),
                remedy="stop what uses it, or give the service another --server.port",
            )  # fmt: skip
        except OverflowError:
            return Check(
                name=f"port {port}", level="fail", text="no port", remedy="give one of 1 to 65535"
            )
    return Check(name=f"port {port}", level="ok", text="free")


def check_gpus(model: Path | None) -> Iterator[Check]:
    """Free memory of each GPU, against the model's weights and what vLLM would take."""
    try:
        shown = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True
        )
    except FileNotFoundError:
        yield Check(name="gpu", level="ok", text="none: --model.device cpu")
        return
    except (OSError, subprocess.SubprocessError) as error:
        yield Check(
            name="gpu", level="fail", text=f"nvidia-smi gives no answer: {_said(error)}",
            remedy="install the driver that fits the kernel, or use --model.device cpu",
        )  # fmt: skip
        return
    weights = _weights_mib(model) if model is not None else 0
    for line in shown.stdout.splitlines():
        index, name, free, total = (part.strip() for part in line.split(","))
        # Shared memory of a board with one pool for both processors is told as [N/A].
        if free.isdecimal() and total.isdecimal():
            yield _gpu_memory(f"gpu {index}", name, int(free), int(total), weights)
        else:
            yield Check(name=f"gpu {index}", level="ok", text=f"{name}, memory not told")


def _gpu_memory(label: str, name: str, free: int, total: int, weights: int) -> Check:
    """One GPU's line; all figures in MiB."""
    text = f"{name}, {free} of {total} MiB free"
    if free < weights:
        return Check(
            name=label, level="fail", text=f"{text}; the weights alone are {weights} MiB",
            remedy="stop what holds it (nvidia-smi lists it), split the model with"
            " --engine.vllm.tensor-parallel-size, or take a smaller one",
        )  # fmt: skip
    if free < _GPU_FRACTION * total:
        return Check(
            name=label, level="warn", text=f"{text}: vLLM would not start with its default share",
            remedy="stop what holds it (nvidia-smi lists it), or set"
            f" --engine.vllm.gpu-memory-fraction {max(free / total - 0.02, 0.01):.2f}",
        )  # fmt: skip
    return Check(name=label, level="ok", text=text)


def _weights_mib(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors")) >> 20


def _said(error: Exception) -> str:
    """What a program that failed has written."""
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr or error.stdout or f"status {error.returncode}").strip()
    return str(error)


def _nearest(folder: Path) -> Path:
    """`folder`, or what it would be made in."""
    there = folder.absolute()
    # Unlike Path.is_dir, this is False behind a folder that may not be searched.
    while not os.path.isdir(there) and there != there.parent:
        there = there.parent
    return there
