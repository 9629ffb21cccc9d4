"""Every block of code of README, docs/ and examples/ runs as it is printed.

Blocks of a page run in order, in one folder and one namespace, against one service that has a
script for a model. A block with a file's name as its title is that file. A block titled `prints` is
what the block before it printed. Of a block that says why it is not run, the commands are tried
with `--dry-run`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness_sdk.cli.__main__ import COMMANDS, main
from tests.pages import ROOT, Block, blocks, pages
from tests.service.page_service import PageService, page_service

_BIN = Path(sys.executable).parent
_VARIABLES = ("OCTOPUS_TOKEN", "OCTOPUS_REDIS_URL", "OCTOPUS_MQTT_URL")
_SHELL_S = 60


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix(""))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageService]:
    with page_service(tmp_path_factory.mktemp("pages")) as running:
        yield running


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("path", [p for p in pages() if blocks(p)], ids=_name)
def test_page_runs_as_it_is_printed(
    path: Path, service: PageService, tmp_path: Path, variables: pytest.MonkeyPatch
) -> None:
    # As in a checkout, without writing into this one.
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    variables.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": path.stem}
    printed = ""
    for block in blocks(path):
        text = service.here(block.text)
        if block.not_run:
            _check(text, block)
        elif block.title == "prints":
            assert printed.strip() == block.text.strip(), f"{block.place} prints otherwise"
        elif block.title:
            _write(text, block)
        elif block.language == "python":
            with _printed() as out:
                exec(compile(text, block.place, "exec", dont_inherit=True), names)
            printed = out.getvalue()
        elif block.language == "sh":
            printed = _shell(text, block, variables)


def _write(text: str, block: Block) -> None:
    file = Path(block.title)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    if file.suffix == ".py":
        exec(compile(text, block.place, "exec", dont_inherit=True), {"__name__": file.stem})


def _shell(text: str, block: Block, variables: pytest.MonkeyPatch) -> str:
    """Run a script; one of our commands alone runs here, for starting Python costs a second."""
    commands = [shlex.split(line, comments=True) for line in _lines(text)]
    if any(words[0] not in ("octopus", "export") for words in commands):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            capture_output=True, text=True, timeout=_SHELL_S, check=False, env=_environment(),
        )  # fmt: skip
        assert done.returncode == 0, f"{block.place}\n{done.stdout}\n{done.stderr}"
        return done.stdout
    with _printed() as out:
        for first, *rest in commands:
            if first == "export":
                for word in rest:
                    variables.setenv(*word.split("=", 1))
            else:
                assert _octopus(rest) == 0, f"{block.place}: octopus {shlex.join(rest)}"
    return out.getvalue()


def _check(text: str, block: Block) -> None:
    """What can be told of a block without running it: its commands and their options exist."""
    if block.language == "python":
        compile(text, block.place, "exec", dont_inherit=True)
        return
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in _lines(text):
        first, *rest = shlex.split(line, comments=True)
        if first == "octopus":
            with _printed():
                assert _octopus([*rest, "--dry-run"]) == 0, f"{block.place}: {line}"
        elif first == "make":
            assert set(rest) <= set(targets), f"{block.place}: no such target: {line}"


def _lines(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _octopus(words: list[str]) -> int:
    """Our command in this process; what it sets up for a process of its own is taken back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextlib.contextmanager
def _printed() -> Iterator[io.StringIO]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        yield out


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    }


def test_readme_harness_reads_keys_and_not_text(service: PageService) -> None:
    harness, call, _ = [b for b in blocks(ROOT / "README.md") if b.language == "python"]
    names: dict[str, Any] = {}
    exec(compile(harness.text, harness.place, "exec"), names)
    before = len(service.engine.seen), len(service.records)
    with _printed() as out:
        exec(compile(service.here(call.text), call.place, "exec"), names)
    assert out.getvalue() == "1.0\n"
    decided = next(seen for seen in service.engine.seen[before[0] :] if "Decide." in seen)
    # Once in the join note, and once more where it was mounted.
    assert decided.count("ban all cars") == 2
    assert decided.count("more buses") == 1
    (record,) = service.records[before[1] :]
    assert (record.reward, len(record.threads)) == (1.0, 3)


def test_readme_names_only_commands_that_exist() -> None:
    (listed,) = re.findall(r"Commands: `octopus ([a-z |]+)`", (ROOT / "README.md").read_text())
    assert listed.split(" | ") == list(COMMANDS)
