"""`octopus doctor`: common faults of this machine and its services, each with a remedy."""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from harness_sdk.cli.environment import variable
from harness_sdk.cli.option_file import render_options
from harness_sdk.cli.settings import add_file_arguments
from harness_sdk.errors import ConfigError, HarnessError

Level = Literal["ok", "warn", "fail"]

_MIN_DISK_GIB, _GOOD_DISK_GIB = 1, 10
_MAX_SKEW_S = 2.0
# Before this project's first commit: the clock was never set.
_EARLIEST_S = 1_767_225_600
DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""What the embedded server is run with, and an external one is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    level: Level
    text: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    for name, source in (("redis", "OCTOPUS_REDIS_URL"), ("mqtt", "OCTOPUS_MQTT_URL")):
        parser.add_argument(
            f"--{name}-url", default=variable(source), metavar="URL",
            help=f"server to check; {source} where it is not given, else the embedded one",
        )  # fmt: skip
    parser.add_argument("--model", type=Path, help="checkpoint folder to check")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument(
        "--port", type=int, action="append", metavar="PORT",
        help="port that a service will bind; may be repeated (default 7040)",
    )  # fmt: skip
    add_file_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print one line a check; 1 where one failed."""
    if args.dry_run:
        sys.stdout.write(render_options(args))
        return 0
    failed = False
    for check in checks(args):
        failed |= check.level == "fail"
        remedy = f"\n       {check.remedy}" if check.remedy else ""
        sys.stdout.write(f"{check.level:4}   {check.name}: {check.text}{remedy}\n")
        sys.stdout.flush()
    return 1 if failed else 0


def checks(args: argparse.Namespace) -> Iterator[Check]:
    """Every check that `args` asks for, in order."""
    yield check_python()
    yield from check_packages()
    yield check_vllm()
    yield check_disk(args.folder)
    for port in args.port or [7040]:
        yield check_port(port)
    yield from check_redis(args.redis_url)
    yield check_broker(args.mqtt_url)
    yield check_clock(args.redis_url)
    if args.model is not None:
        yield from check_model(args.model)


def check_python() -> Check:
    """The interpreter, which could not have come so far with a version too old."""
    return Check(name="python", level="ok", text=".".join(map(str, sys.version_info[:3])))


def check_packages() -> Iterator[Check]:
    """torch, transformers and peft against our own requirements, and what breaks them."""
    for name in ("torch", "transformers", "peft"):
        wanted = _requirement(name)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(
                name=name, level="fail", text="not installed", remedy=f"pip install '{wanted}'"
            )
            continue
        if _satisfies(wanted, version):
            yield Check(name=name, level="ok", text=version)
        else:
            remedy = f"pip install '{wanted}'"
            yield Check(name=name, level="warn", text=f"{version} is untested", remedy=remedy)
    if util.find_spec("torchvision") is not None:
        yield _torchvision()


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


def _requirement(name: str) -> str:
    """Our own requirement of package `name`, as `torch>=2.11`."""
    try:
        lines = metadata.requires("octopus-agents") or []
    except metadata.PackageNotFoundError:
        return name
    found = (line.partition(";")[0].strip() for line in lines)
    return next((line for line in found if re.split(r"[^\w.-]", line)[0] == name), name)


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


def check_disk(folder: Path) -> Check:
    """Room for checkpoints and Valkey's log."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free / 2**30
    text = f"{free:.1f} GiB free at {there}"
    if free >= _GOOD_DISK_GIB:
        return Check(name="disk", level="ok", text=text)
    level = "warn" if free >= _MIN_DISK_GIB else "fail"
    return Check(name="disk", level=level, text=text, remedy="free some, or give another --folder")


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
    return Check(name=f"port {port}", level="ok", text="free")


def check_redis(url: str | None) -> Iterator[Check]:
    """Reachable, and as durable as the embedded server."""
    if url is None:
        from harness_sdk.cli.embedded import valkey_binary

        try:
            yield Check(name="redis", level="ok", text=f"embedded, {valkey_binary()}")
        except ConfigError as error:
            yield Check(name="redis", level="fail", text=error.message, remedy=error.remedy)
        return
    from rollout_service.stream import read_server_settings

    try:
        settings = asyncio.run(read_server_settings(url))
    except HarnessError as error:
        yield _unreachable("redis", error)
        return
    yield Check(name="redis", level="ok", text="reachable")
    if not settings:
        yield Check(
            name="redis settings", level="warn", text="hidden: CONFIG GET is refused",
            remedy=f"make sure of {', '.join(f'{k} {v}' for k, v in DURABLE.items())}",
        )  # fmt: skip
    for key, ours in DURABLE.items():
        found = settings.get(key, ours)
        if found != ours:
            yield Check(
                name=f"redis {key}", level="warn", text=f"{found} is weaker than {ours}",
                remedy=f"CONFIG SET {key} {ours}, or episodes may be lost when the server ends",
            )  # fmt: skip


def check_broker(url: str | None) -> Check:
    """Reachable, and keeps retained messages."""
    if url is None:
        if util.find_spec("amqtt") is None:
            return Check(
                name="mqtt", level="fail", text="no embedded broker",
                remedy="pip install 'octopus-agents[rollout]', or give --mqtt-url",
            )  # fmt: skip
        return Check(name="mqtt", level="ok", text="embedded, amqtt " + metadata.version("amqtt"))
    from rollout_service.bus import broker_retains

    try:
        retains = asyncio.run(broker_retains(url))
    except HarnessError as error:
        return _unreachable("mqtt", error)
    if not retains:
        return Check(
            name="mqtt", level="fail", text="retained messages are not kept",
            remedy="allow them: replicas that start late read the policy from one",
        )  # fmt: skip
    return Check(name="mqtt", level="ok", text="reachable, keeps retained messages")


def check_clock(redis_url: str | None) -> Check:
    """This machine's clock, against Redis's where there is one."""
    if time.time() < _EARLIEST_S:
        text = time.strftime("%Y-%m-%d", time.gmtime())
        return Check(name="clock", level="fail", text=text, remedy="set the clock, run NTP")
    if redis_url is None:
        return Check(name="clock", level="ok", text=time.strftime("%Y-%m-%d %H:%M:%S %z"))
    from rollout_service.stream import read_clock_skew

    try:
        skew = asyncio.run(read_clock_skew(redis_url))
    except HarnessError:
        return Check(name="clock", level="warn", text="no Redis to compare with")
    level = "ok" if abs(skew) <= _MAX_SKEW_S else "warn"
    remedy = "" if level == "ok" else "run NTP on both: entry ids carry Redis's time"
    return Check(name="clock", level=level, text=f"Redis is {skew:+.3f} s from here", remedy=remedy)


def check_model(folder: Path) -> Iterator[Check]:
    """Configuration, weights, and a chat template that the tokenizer can append to."""
    if not (folder / "config.json").is_file():
        yield Check(
            name="model", level="fail", text=f"no config.json in {folder}",
            remedy="give a Hugging Face checkpoint's folder",
        )  # fmt: skip
        return
    from transformers import AutoConfig

    from rollout_service.chat import ChatRenderer, ChatTokenizer, load_template

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        yield Check(name="model", level="ok", text=f"{config.model_type} in {folder}")
        yield _training(config.get_text_config())
    except (OSError, ValueError) as error:
        yield Check(
            name="model", level="fail", text=str(error).splitlines()[0],
            remedy="give a checkpoint that this transformers release knows",
        )  # fmt: skip
    if not any(folder.glob("*.safetensors")):
        yield Check(
            name="weights", level="fail", text=f"no safetensors in {folder}",
            remedy="save the model with safetensors",
        )  # fmt: skip
    try:
        tokenizer = ChatTokenizer.load(folder)
        yield Check(name="tokenizer", level="ok", text=f"{tokenizer.vocab_size} ids")
    except ConfigError as error:
        yield Check(name="tokenizer", level="fail", text=str(error), remedy=error.remedy)
        return
    try:
        shape = ChatRenderer(tokenizer, load_template(folder)).probed.shape
        yield Check(name="template", level="ok", text=f"append-only, mode {shape.mode}")
    except ConfigError as error:
        yield Check(name="template", level="fail", text=str(error), remedy=error.remedy)


def _training(config: Any) -> Check:
    """Whether the trainer knows how this architecture computes a packed tree."""
    from trainer_service.models import model_hooks

    try:
        targets = ", ".join(model_hooks(config).lora_targets)
    except ConfigError as error:
        return Check(name="training", level="warn", text=str(error), remedy=error.remedy)
    return Check(name="training", level="ok", text=f"LoRA on {targets}")


def _unreachable(name: str, error: HarnessError) -> Check:
    return Check(
        name=name, level="fail", text=f"{error.message} {error.value}", remedy=error.remedy
    )
