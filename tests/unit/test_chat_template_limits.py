"""Templates and folders that cannot be served say so, and soon; variables reach the template."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from harness_sdk.cli.__main__ import main
from harness_sdk.cli.settings import load_config, render_config
from harness_sdk.errors import ConfigError
from harness_sdk.types import Message
from rollout_service.chat import ChatRenderer, ChatTokenizer, Template, load_template
from rollout_service.chat.proof import probe
from rollout_service.chat.refusal import TemplateRefused
from rollout_service.config import RolloutConfig
from tests.chat_tokenizers import chat_template, chat_tokenizer, save_chat_tokenizer

ENDLESS = {
    "loops": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "a list that grows": "{% set l = [1] %}{% for i in l %}{% set _ = l.append(1) %}{% endfor %}",
    "jinja's own text": "{{ lipsum(n=10000000) }}",
}


@pytest.mark.parametrize("case", ENDLESS)
def test_template_without_an_end_is_refused(case: str) -> None:
    before = sys.gettrace()
    with pytest.raises(TemplateRefused, match=r"come to an end.*0.2 s.*loops over its messages"):
        probe(Template(ENDLESS[case]), limit_s=0.2)
    assert sys.gettrace() is before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "nested"),
        ("{{ a }}" * 100_000, "700000 characters; allowed: 524288 characters"),
    ],
    ids=["expression", "blocks", "length"],
)
def test_template_that_cannot_be_compiled_is_refused(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Template(source)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("chat_template.jinja", b"\xff\xfe", "no text in UTF-8"),
        ("tokenizer_config.json", b"\xff", "no JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "no JSON"),
        ("tokenizer_config.json", b'{"chat_template": [{"x": 1}, 2]}', "names one tool_use"),
        ("tokenizer_config.json", b'{"chat_template": {"default": "x"}}', "names one tool_use"),
    ],
)
def test_folder_with_a_bad_file_is_refused(
    name: str, data: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        load_template(tmp_path)
    assert caught.value.value and caught.value.remedy
    assert main(["template", str(tmp_path)]) == 1
    assert caught.value.message in capsys.readouterr().out


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_tokenizer_folder_with_a_bad_file_is_refused(name: str, tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path)
    (folder / name).write_text('{"eos_token_id": ["x", null]}')
    ChatTokenizer.load(folder)
    (folder / name).write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        ChatTokenizer.load(folder)


def test_template_file_that_is_no_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "template.jinja"
    path.write_bytes(bytes(range(256)))
    assert main(["template", str(path)]) == 1
    assert "no text in UTF-8" in capsys.readouterr().out


def test_variables_reach_the_template_and_are_part_of_its_hash() -> None:
    source = chat_template("qwen3").source
    hello = [Message(role="user", content="Hello.")]
    plain, same, brief = (
        ChatRenderer(chat_tokenizer(), Template(source, variables=variables))
        for variables in (None, {}, {"enable_thinking": False})
    )
    assert plain.template_hash == same.template_hash != brief.template_hash
    assert plain.prompt(hello) == brief.prompt(hello)
    openings = [chat.tokenizer.decode(chat.opening("user")) for chat in (plain, brief)]
    assert openings[0] == "<|im_start|>assistant\n"
    assert openings[1] == "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_variables_do_not_take_the_place_of_what_is_rendered() -> None:
    with pytest.raises(ConfigError, match=r"messages, tools.*model.template_variables"):
        Template("x", variables={"tools": [], "messages": [], "a": 1})


def test_variables_are_configured_as_a_table(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    path = ["--model.path", str(tmp_path)]
    file.write_text("[model.template_variables]\nenable_thinking = false\n")
    config = load_config(RolloutConfig, file, path)
    assert config.model.template_variables == {"enable_thinking": False}
    assert "enable_thinking = false" in render_config(config)
    flag = ["--model.template-variables", "{enable_thinking = false, depth = 3}"]
    config = load_config(RolloutConfig, None, [*path, *flag])
    assert config.model.template_variables == {"enable_thinking": False, "depth": 3}
    flag = ["--model.template-variables.enable-thinking", "false"]
    with pytest.raises(ConfigError, match=r"is text.*\{enable_thinking = false\}"):
        load_config(RolloutConfig, None, [*path, *flag])


def test_command_probes_with_variables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ raise_exception('off') if off }}" + chat_template("qwen3").source)
    assert main(["template", str(path)]) == 0
    assert main(["template", str(path), "--variables", '{"off": true}']) == 1
    assert "off" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["template", "x", "--variables"], ["verifiers", "x", "--env"]])
@pytest.mark.parametrize("value", ["{", "[1]", "[" * 100_000], ids=["cut", "list", "deep"])
def test_flag_that_is_no_json_object_is_named(
    command: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, value])
    assert f"argument {command[-1]}: {value[:80]!r} is no JSON" in capsys.readouterr().err


def test_settings_of_an_environment_that_are_no_table_are_refused() -> None:
    from harness_sdk.environments.verifiers import load_environment

    pytest.importorskip("verifiers.v1")
    settings: dict[str, Any] = json.loads('{"taskset": 3}')
    with pytest.raises(ConfigError, match="cannot load the environment"):
        load_environment("nothing", settings=settings)
