"""The log of a command: ids on every line, in text and in JSON."""

from __future__ import annotations

import asyncio
import contextvars
import io
import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness_sdk import OctopusClient
from harness_sdk.cli.logs import FORMS, log_arguments, set_up_logging
from harness_sdk.errors import EngineError
from harness_sdk.log_ids import NAMES, current_ids, log_ids, set_ids
from harness_sdk.record import EpisodeRecord
from tests.service.sdk_service import scripted

logger = logging.getLogger("octopus.test")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # What pytest has put there is its own to close.
    root.handlers.clear()
    set_up_logging(request.param)
    yield request.param
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def log(form: str) -> io.StringIO:
    stream = io.StringIO()
    (handler,) = logging.getLogger().handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    return stream


async def test_lines_carry_the_ids_of_the_task_they_come_from(form: str, log: io.StringIO) -> None:
    async def work(thread: str) -> None:
        with log_ids(thread=thread, request=""):
            await asyncio.sleep(0)
            logger.warning("slow")

    set_ids(run="r")
    with log_ids(episode="e"):
        await asyncio.gather(work("t1"), asyncio.to_thread(logger.warning, "off the loop"))
    logger.warning("after", extra={"episode_id": "e2"})
    found = {}
    for line in log.getvalue().splitlines():
        if form == "text":
            head, _, told = line.rstrip("]").partition(" [")
            found[head.rpartition("octopus.test ")[2]] = dict(x.split("=") for x in told.split())
        else:
            told = json.loads(line)
            assert {"time", "level", "logger"} < told.keys()
            ids = {name: told[name] for name in NAMES if name in told}
            found[told["message"]] = ids
    assert found == {
        "slow": {"run": "r", "episode": "e", "thread": "t1"},
        "off the loop": {"run": "r", "episode": "e"},
        "after": {"run": "r", "episode": "e2"},
    }


def test_ids_of_a_block_that_another_context_leaves_stay_where_they_were_set() -> None:
    block = log_ids(episode="e")
    entered = contextvars.copy_context()
    entered.run(block.__enter__)
    block.__exit__(None, None, None)
    assert entered.run(current_ids) == {"episode": "e"} and "episode" not in current_ids()
    entered.run(block.__exit__, None, None, None)
    assert "episode" not in entered.run(current_ids)


HOSTILE = {
    "newline": "x\n2026-01-01 00:00:00,000 ERROR forged",
    "carriage return": "x\r2026-01-01 00:00:00,000 ERROR forged",
    "terminal": "x\x1b[2J\x1b]0;title\x07\x9b31m",
    "quotes": 'x", "level": "INFO", "episode": "forged\\',
    "object": 'x"}\n{"level": "INFO", "message": "forged"}',
    "separators": "x\u2028ERROR forged\u2029\x85\x0b\x0c\x1c",
    "order": "x\u202egnol\u2066",
    "half a pair": "x\ud800",
    "ids": "x] [episode=forged",
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_nothing_that_was_said_forges_a_line(
    form: str, log: io.StringIO, hostile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    # What pytest's own handler takes goes into its report, which half a pair of surrogates breaks.
    ours = [handler for handler in root.handlers if getattr(handler, "stream", None) is log]
    monkeypatch.setattr(root, "handlers", ours)
    # A prompt, ids of a call, a tool's failure, and a file that a model named.
    logger.warning("asked %s", hostile, extra={"thread_id": hostile})
    with log_ids(episode=hostile, request=hostile):
        try:
            raise ValueError(hostile)
        except ValueError:
            logger.exception("failed", extra={"count": 3, "path": Path(hostile), "x": math.nan})
        try:
            (tmp_path / hostile).read_bytes()
        except (OSError, UnicodeEncodeError) as error:
            logger.error("no file: %s", error)
    text = log.getvalue()
    assert not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800]", text
    )
    lines = text.splitlines()
    if form == "text":
        begun = [line for line in lines if not line.startswith("    ")]
        assert [line.split("octopus.test ")[1][:5] for line in begun] == ["asked", "faile", "no fi"]
        return
    assert text.isascii() and len(lines) == 3
    asked, failed, missing = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (asked["message"], asked["thread"]) == (f"asked {hostile}", hostile)
    assert (failed["episode"], failed["request"]) == (hostile, hostile)
    assert (failed["count"], failed["path"], failed["x"]) == (3, hostile, "nan")
    assert f"ValueError: {hostile}" in failed["exception"] and failed["level"] == "ERROR"
    assert missing["message"].startswith("no file: ") and missing["level"] == "ERROR"
    assert {"time", "level", "logger", "message", "episode", "request"} == missing.keys()


async def test_service_logs_a_failure_with_the_call_s_ids(form: str, log: io.StringIO) -> None:
    async def write(record: EpisodeRecord) -> str:
        service.records.write = kept
        raise RuntimeError("a fault of ours")

    async with (
        scripted(lambda text: "x") as service,
        OctopusClient.connect(service.address) as client,
    ):
        kept, service.records.write = service.records.write, write
        with pytest.raises(EngineError, match="a fault of ours"):
            async with client.episode(episode_id="e7"):
                pass
    line = next(line for line in log.getvalue().splitlines() if "unexpected failure" in line)
    if form == "json":
        told = json.loads(line)
        assert (told["episode"], len(told["request"])) == ("e7", 32)
    else:
        assert "[episode=e7 request=" in line


def test_children_log_in_the_same_form(form: str) -> None:
    assert log_arguments() == ([] if form == "text" else ["--log-format", "json"])
