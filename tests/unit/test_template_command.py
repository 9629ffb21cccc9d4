"""`octopus template` says whether and how a template is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness_sdk.cli import demo
from harness_sdk.cli.__main__ import main
from tests.chat_template_cases import EXPECTED, REFUSED
from tests.chat_tokenizers import TEMPLATES, chat_tokenizer_file, save_chat_tokenizer

DEMO = Path(demo.__file__).parent / "model"


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    status = main(["template", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", [*EXPECTED, *REFUSED])
def test_each_template_is_answered_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = answer(capsys, TEMPLATES / f"{name}.jinja")
    assert set(found) == {"served", "mode", "terminator", "reason", "first_difference"}
    if name in EXPECTED:
        assert (status, found["served"]) == (0, True)
        assert (found["mode"], found["terminator"]) == (
            EXPECTED[name].mode,
            EXPECTED[name].terminator,
        )
        rewrites = "the template itself rewrites earlier turns" in found["reason"]
        assert rewrites == (found["first_difference"] is not None)
        assert rewrites == bool(EXPECTED[name].rewritten)
    else:
        assert (status, found["served"], found["mode"]) == (1, False, None)
        assert all(part in found["reason"] for part in REFUSED[name])


def test_the_text_is_one_line_a_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", str(TEMPLATES / "deepseek-v3-vllm.jinja")]) == 1
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["served"] == "no" and lines["mode"] == "-"
    assert "takes back what it has written" in lines["reason"]
    assert "character 60: '\\n' becomes" in lines["first_difference"]
    assert main(["template", str(TEMPLATES / "qwen2.5.jinja")]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert (lines["served"], lines["mode"]) == ("yes", "suffix")
    assert lines["terminator"] == "'<|im_end|>\\n'"


def test_a_model_folder_is_probed_with_its_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = answer(capsys, DEMO, "--tokenizer", DEMO)
    assert (status, found["mode"], found["terminator"]) == (0, "suffix", "<|im_end|>\n")
    assert "the system message does" in found["reason"]


def test_a_tokenizer_of_another_family_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_chat_tokenizer(tmp_path)
    llama = TEMPLATES / "llama-3.1.jinja"
    chat_tokenizer_file(control=("<unused>",)).save(str(folder / "other.json"))
    status, found = answer(capsys, llama, "--tokenizer", folder / "other.json")
    assert (status, found["served"]) == (1, False)
    assert "no control token ends this model's turns: <|eot_id|>" in found["reason"]
    status, _ = answer(capsys, TEMPLATES / "qwen2.5.jinja", "--tokenizer", folder)
    assert status == 0


def test_a_missing_file_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["template", str(tmp_path / "none.jinja")]) == 1
    assert "none.jinja" in capsys.readouterr().err
    template = str(TEMPLATES / "qwen2.5.jinja")
    assert main(["template", template, "--tokenizer", str(tmp_path)]) == 1
    assert "no tokenizer found" in capsys.readouterr().err
