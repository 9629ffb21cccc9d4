"""The metrics file of a run: one whole line a step, whatever was killed between."""

from __future__ import annotations

import json
from pathlib import Path

from trainer_service.metrics import read_metrics, report


def test_lines_after_a_torn_one_are_whole_and_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    report(path, 1, {"reward/mean": 0.25}, run="r")
    with path.open("ab") as file:
        file.write(b'{"step": 2, "rew')
    assert [line["step"] for line in read_metrics(path)] == [1]
    assert json.loads(report(path, 3, {"reward/mean": 0.5})) == read_metrics(path)[-1]
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == [1, 3]
    assert lines[0]["run"] == "r"
    assert lines[1]["reward/mean"] == 0.5
    assert path.read_bytes().count(b"\n") == 3
