"""Finds the format of a file of recorded runs and reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness_sdk.errors import InvalidRequest
from harness_sdk.trajectories import atif, chat, react, responses
from harness_sdk.trajectories.runs import Run

SUFFIXES = (".json", ".jsonl", ".traj")


class Format(NamedTuple):
    """One file format."""

    name: str
    matches: Callable[[Any], bool]
    """Whether a parsed JSON value, or one line of a JSONL file, is in this format."""
    read: Callable[[Any, str], list[Run]]
    """Turns the value into runs; the text names the file and the place in it."""


def _one(read: Callable[[Any, str], Run]) -> Callable[[Any, str], list[Run]]:
    return lambda value, place: [read(value, place)]


FORMATS: tuple[Format, ...] = (
    Format("ReAct steps (reflexion)", react.matches, _one(react.read)),
    Format("Responses rollouts (nemo_gym)", responses.matches, _one(responses.read)),
    Format(
        "Responses with token ids (round trip)", responses.matches_ids, _one(responses.read_ids)
    ),
    Format("ATIF", atif.matches, atif.read),
    Format("SWE-agent .traj", chat.matches_swe_agent, _one(chat.read_swe_agent)),
    Format("chat messages (mini-swe-agent)", chat.matches_chat, _one(chat.read_chat)),
)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Every run in `paths`, in the order given.

    Args:
        paths: Files, or folders that are searched for .json, .jsonl and .traj files. Sub-agents
            that an ATIF file refers to are read with it.

    Raises:
        InvalidRequest: A path is missing, holds no runs, or is in no known format.
    """
    runs: list[Run] = []
    seen: set[Path] = set()
    files = [file for path in paths for file in _files(path)]
    while files:
        file = files.pop(0)
        if file.resolve() in seen:
            continue
        seen.add(file.resolve())
        values = list(_values(file))
        for place, value in values:
            runs += _read(value, place)
        files[:0] = [ref for _, value in values for ref in atif.references(value, file)]
    if not runs:
        raise InvalidRequest("no recorded runs", value=", ".join(map(str, paths)))
    return runs


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InvalidRequest("no such file or folder", value=path)
    return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())


def _values(file: Path) -> Iterator[tuple[str, Any]]:
    """The file's JSON value, or one value for each line, with where it stands."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _unknown(file.name) from error
    try:
        yield file.name, json.loads(text)
        return
    except json.JSONDecodeError:
        pass
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{file.name}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise _unknown(place) from error
        yield place, value


def _read(value: Any, place: str) -> list[Run]:
    for form in FORMATS:
        if form.matches(value):
            try:
                return form.read(value, place)
            except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
                raise InvalidRequest(
                    f"a run that looks like {form.name} but cannot be read",
                    value=f"{place} ({type(error).__name__}: {error})",
                ) from error
    raise _unknown(place)


def _unknown(place: str) -> InvalidRequest:
    return InvalidRequest(
        "recorded runs in an unknown format",
        value=place,
        limit=", ".join(form.name for form in FORMATS),
        remedy="convert the file to one of these, JSON or one JSON object a line",
    )
