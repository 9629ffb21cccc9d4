"""The probe's refusals, each with its reason, and what a template is given to render with."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from harness_sdk.errors import ConfigError, InvalidRequest
from harness_sdk.types import Message
from rollout_service.chat import ChatRenderer, ChatTokenizer, Template, load_template
from rollout_service.chat.probe import PROBE_TOOL
from rollout_service.chat.proof import Probed, probe
from rollout_service.chat.refusal import TemplateRefused
from tests.chat_tokenizers import (
    SPECIAL_TOKENS,
    TEMPLATES,
    chat_template,
    chat_tokenizer,
    chat_tokenizer_file,
    renderer,
)

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def of(source: str) -> Probed:
    return probe(Template(source))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}", "no jinja template"),
        ("{{ 1 / 0 }}", "fails on a user message.*ZeroDivisionError"),
        (
            TURNS + "{% if messages|length > 1 %}{{ raise_exception('no') }}{% endif %}",
            "fails on a reply.*no",
        ),
        ("{% if add_generation_prompt %}now {% endif %}" + TURNS, "takes back.*generation prompt"),
        (TURNS.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}"), "drops.*a reply"),
        (
            TURNS.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}") + OPENING,
            "drops or changes the text of a tool message",
        ),
        (
            TURNS.replace("{{ m.content }}", "{{ m.content | replace('\"', '') }}") + OPENING,
            "drops or changes the text of a user message",
        ),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
            "{% endif %}{% endfor %}" + TURNS + OPENING,
            "fails on a tool response.*no tools",
        ),
        (
            "{% if tools %}{{ raise_exception('no list') }}{% endif %}" + TURNS + OPENING,
            "fails on a list of tools.*no list",
        ),
        (
            TURNS.replace("{{ m.role }}", "{{ m.role }} after {{ messages[0].content }}") + OPENING,
            "depends on the words before it",
        ),
        (
            TURNS + OPENING.replace("\n{%", "{{ '!' if messages[0].role == 'system' }}\n{%"),
            "takes back.*the prompt of chat",
        ),
    ],
)  # fmt: skip
def test_a_template_is_refused_with_its_reason(source: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of(source)
    assert re.search(reason, str(caught.value), re.DOTALL)
    if "takes back" in reason or "depends" in reason:
        assert isinstance(caught.value, TemplateRefused)
        assert caught.value.first_difference is not None
        again = pickle.loads(pickle.dumps(caught.value))
        assert again.first_difference == caught.value.first_difference


def test_what_a_template_does_to_earlier_words_is_named_and_not_served() -> None:
    found = of("{{ messages|length }} messages. " + TURNS + OPENING)
    assert found.shape.mode == "suffix" and found.depends is None
    assert found.rewrites is not None
    assert (found.rewrites.case, found.rewrites.at) == ("chat", 0)
    assert found.rewrites.expected.startswith("2") and found.rewrites.found.startswith("3")
    assert "rewrites earlier turns" in found.remarks[0]


def test_a_template_that_counts_turns_depends_on_the_history() -> None:
    source = TURNS.replace("{{ m.role }}", "{{ m.role }} {{ loop.index if loop.index > 3 }}")
    found = of(source + OPENING)
    assert found.shape.mode == "context" and found.depends is not None
    assert found.depends.at > 0 and "4" in found.depends.found
    assert "minimal prefix" in found.remarks[0]


def test_every_case_is_tried_though_one_has_shown_the_mode() -> None:
    number = "{{ loop.index if loop.index > 3 }}"
    words = "{{ messages[0].content if m.role == 'tool' }}"
    of(TURNS.replace("{{ m.role }}", "{{ m.role }} " + number) + OPENING)
    with pytest.raises(TemplateRefused, match=r"depends on the words before it.*tools"):
        of(TURNS.replace("{{ m.role }}", "{{ m.role }} " + number + words) + OPENING)


def test_a_template_without_turn_ends_needs_a_control_token_to_stop_at() -> None:
    template = Template(
        TURNS.replace("<|im_end|>\n", " ") + OPENING.replace("<|im_start|>", "now ")
    )
    found = probe(template)
    assert found.shape.terminator == " "
    silent = chat_tokenizer_file(control=("<|im_start|>",))
    with pytest.raises(ConfigError, match="no control token ends this model's turns"):
        ChatRenderer(ChatTokenizer(silent), template)


def test_a_tokenizer_that_joins_increments_is_refused() -> None:
    # Its token `the` holds the turn's last character and the next message's first two.
    source = "{% for m in messages %}he{{ m.content }}<|im_end|>t{% endfor %}"
    with pytest.raises(ConfigError, match=r"append-only prompts.*in increments"):
        ChatRenderer(chat_tokenizer(), Template(source))


# Kimi's appends to its own list, which the sandbox of transformers forbids.
@pytest.mark.parametrize(
    "name",
    sorted({path.stem for path in TEMPLATES.glob("*.jinja")} - {"kimi-k2-instruct"}),
)
def test_a_template_renders_as_transformers_renders_it(name: str) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "Be <b>brief</b>."},
        {"role": "user", "content": "Où?"},
        {"role": "assistant", "content": "Là."},
        {"role": "user", "content": "Quand ?"},
    ]
    properties = {"q": {"type": "string", "description": "x & y"}}
    parameters = {"type": "object", "properties": properties}
    function = {"name": "f", "description": "é <", "parameters": parameters}
    tool = {"type": "function", "function": function}
    template = chat_template(name)
    for tools in (None, [tool]):
        with contextlib.suppress(TypeError):  # deepseek-r1-llamacpp cannot list tools
            (theirs,), _ = render_theirs(
                conversations=[conversation], tools=tools, chat_template=template.source,
                add_generation_prompt=True, **SPECIAL_TOKENS,
            )  # fmt: skip
            ours = template.render(conversation, tools=tools or (), generation_prompt=True)
            assert _undated(ours) == _undated(theirs)


# Its annotations are narrower than what it takes.
render_theirs: Any = render_jinja_template


def _undated(text: str) -> str:
    return re.sub(r"\d{4}-\d\d-\d\d", "today", text)


def test_templates_have_what_transformers_gives_them() -> None:
    source = (
        "{%- for m in messages -%}{% if m.skip %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% break %}{% endfor %}"
        " {{ 'é' | tojson(ensure_ascii=True) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=True) }}"
        " {{ bos_token }}{{ tools is none }}"
    )
    messages = [{"skip": True}, {"content": "<é>"}, {"content": "never"}]
    text = Template(source, {"bos_token": "<s>"}).render(messages)
    assert text == '"<é>" "\\u00e9"{"a": 2, "b": 1} <s>True'


def test_the_date_stands_still() -> None:
    template = Template("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}")
    assert template.render([]) == template.render([])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:.]+", template.render([]))


def test_a_template_cannot_reach_the_machine() -> None:
    with pytest.raises(InvalidRequest, match="SecurityError"):
        Template("{{ messages.__class__.__mro__ }}").render([])


def test_a_model_folders_template_is_found(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": None}
    written = tmp_path / "tokenizer_config.json"
    written.write_text(json.dumps(settings))
    assert "<|im_start|>" in load_template(tmp_path).source
    written.write_text(json.dumps(settings | {"chat_template": "one{{ bos_token }}"}))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>", "bos_token": "x"}')
    assert load_template(tmp_path).render([]) == "one<s>"
    assert load_template(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    named = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]
    written.write_text(json.dumps(settings | {"chat_template": named}))
    assert load_template(tmp_path).source == "tool_use"
    written.write_text(json.dumps(settings | {"chat_template": named[:1]}))
    assert load_template(tmp_path).source == "default"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_template(tmp_path).source == "file"
    written.write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        load_template(tmp_path)


def test_a_message_that_the_template_cannot_append_is_refused_with_the_roles() -> None:
    template = chat_template("mistral-7b-v0.3-vllm")
    chat = ChatRenderer(ChatTokenizer(chat_tokenizer_file(control=("<s>", "</s>"))), template)
    with pytest.raises(InvalidRequest, match=r"cannot append a system message.*tool, user"):
        chat.delta([Message(role="system", content="Be brief.")])
    with pytest.raises(InvalidRequest, match="must alternate"):
        chat.prompt([Message(role="assistant", content="Hello.")])


def test_a_message_that_the_template_leaves_out_of_a_prompt_is_refused() -> None:
    chat = renderer("gpt-oss")[1]
    hello, brief = (
        Message(role="user", content="Hello."),
        Message(role="system", content=" Be brief."),
    )
    assert chat.prompt([brief, hello])
    with pytest.raises(InvalidRequest, match=r"does not show a system message.*Be brief.*put"):
        chat.prompt([hello, brief, hello])
    chat.prompt(
        [hello, Message(role="user", content=""), Message(role="user", content="a\n<|end|>")]
    )


def test_a_prompt_of_an_answer_alone_lists_the_tools_all_the_same() -> None:
    answer = [Message(role="tool", content="4 hits")]
    listed = renderer("qwen2.5")[1]
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        listed.prompt(answer, [PROBE_TOOL])
    chat = ChatRenderer(chat_tokenizer())
    assert "probe_tool" in chat.tokenizer.decode(chat.prompt(answer, [PROBE_TOOL]))
    assert chat.prompt(answer) == chat.delta(answer)


def test_an_answer_is_named_as_the_turn_numbered_its_call() -> None:
    chat = renderer("kimi-k2")[1]
    answer = Message(role="tool", content="x", name="search", tool_call_id="call_7_2")
    assert "functions.search:2" in chat.tokenizer.decode(chat.delta([answer]))
