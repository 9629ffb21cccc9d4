"""Services of compose.yaml without an engine: a process each, in a root folder and a network of its
own, with the files, secrets, environment and health check that the file gives it; needs root.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_PAUSE_S = 1.0
"""Between two health checks, each of which may start an interpreter."""

CAN_RUN = os.geteuid() == 0 and all(map(shutil.which, ("ip", "mount", "chroot", "nsenter")))

# Everything of the machine but /run is there; mounts end with the process.
_ENTER = """
root=$1; shift
mount -t tmpfs none "$root"
for each in /*; do
  if [ -L "$each" ]; then cp -P "$each" "$root/"
  elif [ -d "$each" ] && [ "$each" != /run ]; then mkdir "$root$each"; mount --rbind "$each" "$root$each"
  fi
done
while [ "$1" != -- ]; do
  target="$root$2"; mkdir -p "$(dirname "$target")"
  if [ -d "$1" ]; then mkdir -p "$target"; else [ -e "$target" ] || touch "$target"; fi
  mount --bind "$1" "$target"; shift 2
done
shift
exec chroot "$root" "$@"
"""  # noqa: E501


@dataclass(kw_only=True)
class Container:
    """A service that runs."""

    name: str
    service: Mapping[str, Any]
    process: asyncio.subprocess.Process
    log_path: Path
    environment: Mapping[str, str]

    @property
    def log(self) -> str:
        """What it has said."""
        return self.log_path.read_text("utf-8", errors="replace")

    async def run(self, *argv: str) -> tuple[int, str]:
        """Exit status and output of a program inside of it."""
        inside = ("nsenter", "-t", str(self.process.pid), "--net", "--mount", "--root", "--wd=/")
        process = await asyncio.create_subprocess_exec(
            *inside, *argv, env=dict(self.environment),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode(errors="replace")

    async def healthy(self, timeout_s: float, check: Sequence[str] = ()) -> None:
        """Ask its health check, or `check` in its place, until it is content."""
        argv = check or self.service["healthcheck"]["test"][1:]
        told = ""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    status, told = await self.run(*argv)
                    if status == 0:
                        return
                    assert self.process.returncode is None, self.log
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise AssertionError(f"{self.name} is not healthy: {told}\n{self.log}") from None

    async def stop(self) -> int:
        """SIGTERM, and its exit status within the file's grace period."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        grace_s = float(self.service["stop_grace_period"].removesuffix("s"))
        async with asyncio.timeout(grace_s):
            return await self.process.wait()


class Engine:
    """Starts containers that reach each other by their services' names.

    Args:
        whole: compose.yaml, resolved.
        folder: What lies there are volumes, logs and roots.
    """

    def __init__(self, whole: Mapping[str, Any], folder: Path) -> None:
        self._whole = whole
        self._folder = folder
        self._space = f"oct{os.getpid()}"
        self._names = list(whole["services"])
        self._containers: list[Container] = []

    async def start(self, name: str, argv: Sequence[str] = ()) -> Container:
        """Start a service with its own command, or `argv` in its place."""
        service = self._whole["services"][name]
        root, log_path = self._folder / "roots" / name, self._folder / f"{name}.log"
        root.mkdir(parents=True)
        environment = {**self._environment(), **service.get("environment", {})}
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                "ip", "netns", "exec", self._namespace(name), "sh", "-ec", _ENTER, "enter",
                str(root), *self._mounts(service), "--", *(argv or service["command"]),
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        container = Container(
            name=name, service=service, process=process, log_path=log_path, environment=environment
        )
        self._containers.append(container)
        return container

    def _mounts(self, service: Mapping[str, Any]) -> list[str]:
        """Pairs of a path here and its path inside."""
        pairs = [str(self._folder / "hosts"), "/etc/hosts"]
        for secret in service.get("secrets", ()):
            pairs += [self._whole["secrets"][secret]["file"], f"/run/secrets/{secret}"]
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")[:2]
            if "/" not in source:
                source = str(self._folder / "volumes" / source)
                Path(source).mkdir(parents=True, exist_ok=True)
            pairs += [str((ROOT / source).resolve()), target]
        return pairs

    def _environment(self) -> dict[str, str]:
        """What the images set: where the programs are."""
        programs = self._folder / "bin"
        return {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "HOME": str(self._folder),
            "OMP_NUM_THREADS": "1",
        }

    def _namespace(self, name: str) -> str:
        return f"{self._space}-{name}"

    async def __aenter__(self) -> Engine:
        programs = self._folder / "bin"
        programs.mkdir(parents=True)
        for name, words in (("python", ""), ("octopus", "-m harness_sdk.cli")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            (programs / name).chmod(0o755)
        switch = self._namespace("net")
        hosts = ["127.0.0.1 localhost"]
        await _ip("netns", "add", switch)
        await _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        await _ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(self._names):
            space, address = self._namespace(name), f"10.231.77.{number + 2}"
            await _ip("netns", "add", space)
            await _ip("-n", switch, "link", "add", f"port{number}", "type", "veth",
                      "peer", "name", "eth0", "netns", space)  # fmt: skip
            await _ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
            await _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                await _ip("-n", space, "link", "set", link, "up")
            hosts.append(f"{address} {name}")
        (self._folder / "hosts").write_text("\n".join(hosts) + "\n")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for container in self._containers:
            if container.process.returncode is None:
                container.process.kill()
                await container.process.wait()
        for name in ("net", *self._names):
            with contextlib.suppress(subprocess.CalledProcessError):
                await _ip("netns", "del", self._namespace(name))


@contextlib.asynccontextmanager
async def engine(whole: Mapping[str, Any], folder: Path) -> AsyncIterator[Engine]:
    """An engine that leaves nothing behind, even where its start fails."""
    running = Engine(whole, folder)
    try:
        yield await running.__aenter__()
    finally:
        await running.__aexit__()


async def _ip(*words: str) -> None:
    process = await asyncio.create_subprocess_exec("ip", *words, stderr=subprocess.PIPE)
    _, error = await process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, ["ip", *words], stderr=error)
