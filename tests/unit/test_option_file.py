"""`octopus trees | view | status | doctor` take their options from a TOML file too."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness_sdk.cli.__main__ import main
from tests.unit.test_imports import HEAVY

PATHS = 'paths = ["gone.jsonl"]\n'


@pytest.fixture(autouse=True)
def _no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTOPUS_REDIS_URL", raising=False)
    monkeypatch.delenv("OCTOPUS_MQTT_URL", raising=False)


def _file(folder: Path, text: str) -> str:
    path = folder / "options.toml"
    path.write_text(text)
    return str(path)


def _resolved(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--dry-run", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("command", "text", "key", "taken", "flags", "beaten"),
    [
        ("trees", f"{PATHS}min_reward = 1", "min_reward", 1.0, ["--min-reward", "0.5"], 0.5),
        ("trees", PATHS, "paths", ["gone.jsonl"], ["a", "b"], ["a", "b"]),
        ("trees", f"{PATHS}run = 'x'", "run", "x", ["--run", "trees"], "trees"),
        ("view", "records = 'r'", "records", "r", ["other"], "other"),
        ("view", "out = ['a.svg', 'b.png']", "out", ["a.svg", "b.png"], ["--out", "c"], ["c"]),
        ("view", "redis_url = 'redis://a'", "redis_url", "redis://a", ["--redis", "redis://b"],
         "redis://b"),
        ("status", "json = true", "json", True, ["--json"], True),
        ("status", "address = ['a:1']", "address", ["a:1"], ["--address", "b:2"], ["b:2"]),
        ("doctor", "port = [1, 2]", "port", [1, 2], ["--port", "3"], [3]),
        ("doctor", "redis_url = 'redis://a'", "redis_url", "redis://a", ["--redis", "redis://b"],
         "redis://b"),
    ],
)  # fmt: skip
def test_file_gives_what_no_flag_does(
    command: str,
    text: str,
    key: str,
    taken: object,
    flags: list[str],
    beaten: object,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = _file(tmp_path, text)
    assert _resolved(capsys, command, "--config", config)[key] == taken
    assert _resolved(capsys, command, *flags, "--config", config)[key] == beaten


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        ("trees", "min_rewards = 1", ["unknown configuration key min_rewards", "min_reward?"]),
        ("trees", "min_reward = '1'", ["min_reward is not valid", "'1'", "a number"]),
        ("view", "episodes = 'last'", ["unknown configuration key episodes", "episode?"]),
        ("view", "out = 'a.png'", ["out is not valid", "'a.png'", "an array", "change out"]),
        ("status", "adress = ['a:1']", ["unknown configuration key adress", "address?"]),
        ("status", "json = 1", ["json is not valid", "true or false", "change json"]),
        ("doctor", "zebra = 1", ["unknown configuration key zebra", "remove the key"]),
        ("doctor", "port = [true]", ["port is not valid", "True", "an integer"]),
        ("doctor", "port = [", ["no TOML", "options.toml"]),
    ],
)
def test_bad_file_is_refused_by_name_with_remedy(
    command: str,
    text: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([command, "--config", _file(tmp_path, text)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(word in shown.err for word in words), shown.err


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("trees", ["gone.jsonl", "--records", "made.bin"]),
        ("view", ["gone.bin", "--out", "made.html"]),
        ("status", ["--address", "127.0.0.1:1"]),
        ("doctor", ["--model", "gone"]),
    ],
)
def test_dry_run_prints_masked_settings_and_does_nothing(
    command: str,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OCTOPUS_REDIS_URL", "redis://:hunter2@127.0.0.1:1")
    monkeypatch.setenv("OCTOPUS_MQTT_URL", "mqtt://me:hunter2@127.0.0.1:1")
    # Before a positional argument, which is no form to print.
    assert main([command, "--dry-run", *flags]) == 0
    shown = capsys.readouterr().out
    assert "hunter2" not in shown
    assert not list(tmp_path.iterdir())
    # What is printed is a file that the command takes.
    again = _resolved(capsys, command, "--config", _file(tmp_path, shown))
    assert tomllib.loads(shown).items() <= again.items()


def test_environment_beats_the_file_and_loses_to_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTOPUS_MQTT_URL", "mqtt://environment")
    line = ["status", "--config", _file(tmp_path, "mqtt_url = 'mqtt://file'")]
    assert _resolved(capsys, *line)["mqtt_url"] == "mqtt://environment"
    assert _resolved(capsys, *line, "--mqtt-url", "mqtt://flag")["mqtt_url"] == "mqtt://flag"


def _children_s() -> float:
    """CPU time of ended children, which other work on the machine does not lengthen."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("command", ["trees", "view", "watch", "status", "doctor"])
def test_help_is_instant_and_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys\nfrom harness_sdk.cli.__main__ import main\n"
        f"try: main([{command!r}, '--help'])\n"
        f"except SystemExit: print([m for m in {(*HEAVY, 'pydantic')!r} if m in sys.modules])"
    )
    before = _children_s()
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert _children_s() - before < 1
    assert "--config FILE" in shown.stdout
    assert "--dry-run" in shown.stdout
    assert shown.stdout.strip().endswith("[]")
