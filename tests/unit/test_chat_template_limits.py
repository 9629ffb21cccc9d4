"""Templates and folders that cannot be served say so, and soon; variables reach the template."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from harness_sdk.cli.__main__ import main
from harness_sdk.cli.settings import load_config, render_config
from harness_sdk.errors import ConfigError, InvalidRequest
from harness_sdk.types import Message
from rollout_service.chat import ChatRenderer, ChatTokenizer, Template, load_template
from rollout_service.chat.proof import probe
from rollout_service.chat.refusal import TemplateRefused
from rollout_service.config import RolloutConfig
from tests.chat_tokenizers import chat_template, chat_tokenizer, save_chat_tokenizer

_LONG = "{% set l = [0] * 99999 %}"
ENDLESS = {
    "loops": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "a list that grows": "{% set l = [1] %}{% for i in l %}{% set _ = l.append(1) %}{% endfor %}",
    "a loop in itself": "{% for i in range(99) recursive %}{% if loop.depth < 9 %}"
    "{{ loop(range(99)) }}{% endif %}{% endfor %}",
    "calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(99) }}",
    "what a loop leaves out": _LONG + "{% for i in range(1, 99999) if i in l %}{% endfor %}",
    "tests": _LONG + "{{ range(1, 99999) | select('in', l) | list }}",
    "what filters yield": "{% set n = namespace(g=range(99999)) %}{% for _ in range(200) %}"
    "{% set n.g = n.g | batch(1) %}{% endfor %}{{ n.g | list }}",
    "a path": f"{{{{ range(20000) | sort(attribute='{'.'.join(['real'] * 500)}') }}}}",
}


@pytest.mark.parametrize("case", ENDLESS)
def test_template_without_an_end_is_refused(case: str) -> None:
    started = time.process_time()
    with pytest.raises(TemplateRefused, match=r"come to an end.*0.2 s.*loops over its messages"):
        probe(Template(ENDLESS[case]), limit_s=0.2)
    assert time.process_time() - started < 2
    assert Template("after").render([]) == "after"


def test_random_text_is_not_given_to_templates() -> None:
    with pytest.raises(InvalidRequest, match="'lipsum' is undefined"):
        Template("{{ lipsum(n=10000000) }}").render([])


_DOUBLED = "{% set n = namespace(s=['x' * 999]) %}{% for _ in range(60) %}"
_IN_LISTS = _DOUBLED + "{% set n.s = [n.s, n.s] %}{% endfor %}"
_TWO_LARGE = "{% set s = 'a' * 30000 %}{% set t = 'b' * 30000 %}"
HUGE = {
    "text times a number": "{{ 'x' * 10**10 }}",
    "a number times text": "{{ 10**10 * 'x' }}",
    "a list times a number": "{% set l = [0] * 10**10 %}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "powers of powers": "{% set n = namespace(i=9) %}{% for _ in range(99) %}"
    "{% set n.i = n.i * n.i %}{% endfor %}",
    "text that doubles": _DOUBLED.replace("['x' * 999]", "'x'")
    + "{% set n.s = n.s + n.s %}{% endfor %}",
    "text that doubles by ~": _DOUBLED.replace("['x' * 999]", "'x'")
    + "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a list that doubles": _DOUBLED + "{% set n.s = n.s + n.s %}{% endfor %}",
    "a list that extends itself": _DOUBLED + "{% set _ = n.s.extend(n.s) %}{% endfor %}",
    "a block that doubles": "{% set s = 'x' %}"
    + "{% set s %}{{ s }}{{ s }}{% endset %}" * 40
    + "{{ s }}",
    "a macro that doubles": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{{ "
    + "m(" * 60
    + "'x'"
    + ")" * 60
    + " }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "lists in lists, printed": _IN_LISTS + "{{ n.s }}",
    "lists in lists, joined": _IN_LISTS + "{{ n.s ~ '' }}",
    "lists in lists, as JSON": _IN_LISTS + "{{ n.s | tojson }}",
    "lists in lists, as text": _IN_LISTS + "{{ n.s | string }}",
    "lists in lists, formatted": _IN_LISTS + "{{ '%s' % n.s }}",
    "replace": _TWO_LARGE + "{{ s | replace('a', t) }}",
    "the method replace": _TWO_LARGE + "{{ s.replace('a', t) }}",
    "join": _TWO_LARGE + "{{ s | join(t) }}",
    "the method join": _TWO_LARGE + "{{ t.join(s) }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "the method center": "{{ 'x'.center(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(10000000000) }}",
    "indent": "{{ 'x\ny' | indent(10000000000) }}",
    "indented JSON": "{{ [1] | tojson(indent=10000000000) }}",
    "a filter by name": "{{ ['x'] | map('center', 10000000000) | list }}",
    "filters that never run": "{% if messages | length == 12345 %}"
    + f"{{{{ '{'a' * 9999}' | replace('a', '{'b' * 9999}') }}}}" * 9
    + "{% endif %}{{ 1 // 0 }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list }}",
    "sort": "{{ (['x' * 999999] * 999) | sort | length }}",
    "unique items": "{{ (['x' * 999999] * 999) | select | unique | list | length }}",
    "tags": "{{ ('<!-- -->' * 100000) | striptags }}",
    "round": "{{ 1.5 | round(1000000000, 'floor') }}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "a width in braces": "{{ '{:10000000000}'.format(1) }}",
    "a width in an argument": "{{ '{:{}}'.format(1, 10000000000) }}",
    "a width by a star": "{{ '%*d' | format(10000000000, 1) }}",
    "bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
}


@pytest.mark.parametrize("case", HUGE)
def test_template_that_makes_too_much_in_one_step_is_refused_at_once(case: str) -> None:
    started = time.process_time()
    if "lists" not in case:
        tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            Template(HUGE[case]).render([{"role": "user", "content": "u"}])
        assert tracemalloc.get_traced_memory()[1] < 1 << 28
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 5
    if case != "filters that never run":
        assert "134217728 characters" in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize("case", ["text times a number", "output", "center", "a list that doubles"])
def test_template_that_makes_too_much_is_not_served(case: str) -> None:
    with pytest.raises(TemplateRefused, match="134217728 characters"):
        probe(Template(HUGE[case]))


def test_large_messages_are_rendered() -> None:
    content = "word \n" * (1 << 20)
    for name in ("qwen3", "llama-3.1", "gpt-oss"):
        messages = [{"role": "user", "content": content}]
        assert content.strip() in chat_template(name).render(messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ [2] }}", "a1[2]"),
        ("{{ 'ab' * 2 + 'c' }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}", "ababc610243"),
        ("{{ '%s %5.1f' % ('a', 1.25) }}{{ '{:>4}'.format(1) }}", "a   1.2   1"),
        ("{{ ['a', 'b'] | join('-') }}{{ '-'.join(['a', 'b']) }}", "a-ba-b"),
        ("{{ messages | map(attribute='content') | join(',') }}", "u"),
        ("{% set m = {'keys': 1, 'a': 3} %}{{ m.a }}{{ m.b }}{{ m.keys() | list | length }}", "32"),
        (
            "{{ 'a\nb' | indent(2) }}{{ {'a': [1]} | tojson(indent=2) }}",
            'a\n  b{\n  "a": [\n    1\n  ]\n}',
        ),
        ("{{ 'aXb' | replace('X', '-') }}{{ 'aXb'.replace('X', '') }}", "a-bab"),
        ("{{ [1, 2, 3] | batch(2) | list }}{{ 1.25 | round(1) }}", "[[1, 2], [3]]1.2"),
        ("{{ 'a <b>c</b> <!-- d --> e' | striptags }}", "a c e"),
        ("{{ 'bca' | sort | join }}{{ [1, 2] | map('string') | max }}", "abc2"),
        ("{% for i in range(5) if i is odd %}{{ loop.index }}{{ i }}{% endfor %}", "1123"),
        (
            "{% for i in [[1], 2] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}",
            "12",
        ),
    ],
)
def test_bounds_change_nothing_of_what_is_small(source: str, text: str) -> None:
    assert Template(source).render([{"role": "user", "content": "u"}]) == text


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
