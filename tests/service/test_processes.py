"""Child processes: what they inherit, and that they end with their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc.aio

from harness_sdk.cli.processes import spawn, stop

SPAWNS = """
import asyncio, sys
from pathlib import Path
from harness_sdk.cli.processes import spawn

async def main():
    child = await spawn(["sleep", "600"], log_path=Path(sys.argv[1]))
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_child_takes_environment_folder_and_descriptors(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("through the descriptor")
    descriptor = os.open(tmp_path / "given", os.O_RDONLY)
    code = f"import os; print(os.environ['WORD'], os.getcwd(), os.read({descriptor}, 99).decode())"
    process = await spawn(
        [sys.executable, "-c", code],
        log_path=tmp_path / "log",
        environment={"WORD": "tentacle"},
        cwd=tmp_path,
        pass_fds=[descriptor],
    )
    os.close(descriptor)
    assert await process.wait() == 0
    assert (tmp_path / "log").read_text() == f"tentacle {tmp_path} through the descriptor\n"


async def test_children_start_while_grpc_is_at_work(tmp_path: Path) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        # gRPC's handlers of a fork abort about one child in five.
        for _ in range(20):
            process = await spawn(["true"], log_path=tmp_path / "log")
            assert await process.wait() == 0
    await server.stop(0)
    assert (tmp_path / "log").read_text() == ""


async def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SPAWNS, str(tmp_path / "log"), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(10):
        while _alive(child):
            await asyncio.sleep(0.02)


async def test_stop_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(1, flush=True); time.sleep(600)"
    )
    process = await spawn([sys.executable, "-c", code], log_path=tmp_path / "log")
    async with asyncio.timeout(10):
        while not (tmp_path / "log").read_text():
            await asyncio.sleep(0.02)
    assert await stop(process, grace_s=0.1) == -signal.SIGKILL


def _alive(pid: int) -> bool:
    """Whether the process runs; an orphan that nobody reaps does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
