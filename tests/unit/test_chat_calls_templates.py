"""Calls as the models' own chat templates write them, read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.chat import Template
from rollout_service.chat.calls import ParsedReply, family_of, opens_reasoning, parse_reply
from rollout_service.chat.proof import probe
from tests.chat_tokenizers import SPECIAL_TOKENS
from tests.chat_tokenizers import TEMPLATES as TEMPLATE_FOLDER

TAUGHT = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3-rev1": "hermes",
    "qwen3-instruct-2507": "hermes",
    "hermes-vllm": "hermes",
    "smollm2": "hermes",
    "qwen3.5-think": "qwen_xml",
    "qwen3.5-nothink": "qwen_xml",
    "llama-3.1": "llama_json",
    "mistral-7b-v0.3-vllm": "mistral",
    "deepseek-v3-vllm": "deepseek",
    "deepseek-r1": "deepseek",
    "deepseek-r1-vllm": "deepseek",
    "deepseek-r1-llamacpp": "deepseek",
    "deepseek-r1-distill-qwen": "deepseek",
    "deepseek-r1-distill-llama": "deepseek",
    "deepseek-v3.1": "deepseek",
    "glm-4.5": "glm",
    "glm-4.6-llamacpp": "glm",
    "gpt-oss": "harmony",
    "granite-3.3": "granite",
    "kimi-k2": "kimi_k2",
    "kimi-k2-instruct": "kimi_k2",
}
ENDS = {
    "qwen2.5": "<|im_end|>\n",
    "qwen3": "<|im_end|>\n",
    "hermes-vllm": "<|im_end|>\n",
    "qwen3.5-think": "<|im_end|>\n",
    "llama-3.1": "<|eot_id|>",
    "mistral-7b-v0.3-vllm": "</s>",
    "deepseek-r1-vllm": "<｜end▁of▁sentence｜>",
    "deepseek-v3.1": "<｜end▁of▁sentence｜>",
    "glm-4.5": "",
    "gpt-oss": "<|call|>",
    "kimi-k2": "<|im_end|>",
}
"""What ends a turn, of the templates that print calls."""
WITH_TEXT = ("qwen2.5", "qwen3", "qwen3.5-think", "deepseek-r1-vllm", "deepseek-v3.1", "glm-4.5",
             "kimi-k2")  # fmt: skip
"""Those that print text beside a call."""
WITH_REASONING = {"qwen3": "reasoning_content", "qwen3.5-think": "reasoning_content",
                  "glm-4.5": "reasoning_content", "gpt-oss": "thinking"}  # fmt: skip

Calls = Sequence[tuple[str, dict[str, Any]]]


def template(name: str) -> Template:
    return Template((TEMPLATE_FOLDER / f"{name}.jinja").read_text("utf-8"), SPECIAL_TOKENS)


TEMPLATES = {name: template(name) for name in ENDS}


def read_back(name: str, calls: Calls, **beside: str) -> ParsedReply:
    """The turn with `calls`, rendered by the template, cut out behind its prompt, and parsed."""
    made = [
        {
            "id": f"callnum{index:02d}",
            "type": "function",
            "function": {"name": tool, "arguments": arguments},
        }
        for index, (tool, arguments) in enumerate(calls)
    ]
    user = {"role": "user", "content": "go"}
    turn = {"role": "assistant", "content": "", "tool_calls": made, **beside}
    prompt = TEMPLATES[name].render([user], generation_prompt=True)
    whole = TEMPLATES[name].render([user, turn])
    assert whole.startswith(prompt) and whole.endswith(ENDS[name])
    family = family_of(TEMPLATES[name].source)
    return parse_reply(
        whole[len(prompt) :].removesuffix(ENDS[name]),
        family=family,
        step=1,
        tools=[_schema(tool, arguments) for tool, arguments in calls],
        in_reasoning=opens_reasoning(prompt, family=family),
    )


def test_templates_teach_their_family() -> None:
    sources = {path.stem: path.read_text("utf-8") for path in TEMPLATE_FOLDER.glob("*.jinja")}
    assert {name: family_of(source) for name, source in sources.items()} == TAUGHT
    # Llama 3.2's has no tag.
    asked = 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.'
    assert family_of(asked) == "llama_json"
    # Llama 4's and 3.2's of vLLM.
    assert family_of("[func_name1(param1=value1, param2=value2), func_name2(...)]") == "pythonic"
    assert family_of('<｜DSML｜invoke name="$FUNCTION_NAME">') == "dsml"
    assert family_of("") == "hermes"


_TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    _TEXT,
    st.sampled_from(["3", "true", "null", "</tool_call>", "<|end|>", "```", "{", '"', "\\"]),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda of: st.lists(of, max_size=3) | st.dictionaries(_TEXT, of, max_size=3),
    max_leaves=4,
)
# Templates write these keys between tags, as they are.
_KEYS = {"qwen3.5-think": _NAMES, "glm-4.5": _NAMES}


@pytest.mark.parametrize("name", ENDS)
@settings(max_examples=20)
@given(data=st.data())
def test_calls_come_back_as_the_template_got_them(name: str, data: st.DataObject) -> None:
    arguments = st.dictionaries(_KEYS.get(name, _TEXT), _VALUES, max_size=3)
    # These templates print one call a turn.
    most = 1 if name in ("gpt-oss", "llama-3.1") else 3
    pairs = st.tuples(_NAMES, arguments)
    calls = data.draw(st.lists(pairs, min_size=1, max_size=most, unique_by=lambda pair: pair[0]))
    parsed = read_back(name, calls)
    assert [(call.name, call.arguments, call.error) for call in parsed.tool_calls] == [
        (tool, given, "") for tool, given in calls
    ]
    assert (parsed.text, parsed.reasoning) == ("", "")


@pytest.mark.parametrize("name", ENDS)
def test_the_call_that_a_model_is_shown_is_read(name: str) -> None:
    shown = probe(TEMPLATES[name]).shape.call_example
    (call,) = parse_reply(
        shown.replace("<function-name>", "look"), family=TAUGHT[name], step=1
    ).tool_calls
    assert (call.name, call.arguments, call.error) == ("look", {"a": "value"}, "")


@pytest.mark.parametrize("name", WITH_TEXT)
def test_text_beside_calls_comes_back(name: str) -> None:
    parsed = read_back(name, [("look", {"q": "a"}), ("wait", {})], content="I look.")
    assert parsed.text == "I look."
    assert [call.name for call in parsed.tool_calls] == ["look", "wait"]


@pytest.mark.parametrize("name", WITH_REASONING)
def test_reasoning_beside_calls_comes_back(name: str) -> None:
    parsed = read_back(name, [("look", {"q": "a"})], **{WITH_REASONING[name]: "So it is."})
    assert (parsed.reasoning, parsed.text) == ("So it is.", "")
    assert [call.name for call in parsed.tool_calls] == ["look"]


def _schema(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that a tool with these arguments would have."""
    properties = {key: {"type": _type(value)} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": tool, "parameters": parameters}}


def _type(value: object) -> str:
    kinds = {"bool": "boolean", "int": "integer", "float": "number", "str": "string",
             "list": "array", "dict": "object", "NoneType": "null"}  # fmt: skip
    return kinds[type(value).__name__]
