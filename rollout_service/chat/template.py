"""A model's jinja chat template: where it is found and how it is rendered.

Gives templates what transformers gives them; knows nothing of turns and increments.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from harness_sdk.errors import ConfigError, InvalidRequest
from rollout_service.chat.bounds import MAX_MADE, BoundedEnvironment, TooLarge, rendering

_CHATML = Path(__file__).with_name("chatml.jinja")

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_SURROGATE = r"\ud800-\udfff"
_MAX_CHARS = 512 * 1024
"""Of a template: gpt-oss has 17,000, and jinja compiles this many in about ten seconds."""
_GIVEN = ("messages", "tools", "add_generation_prompt")
"""What templates get from each rendering."""
_NOT_ASCII = re.compile(f"[^\x00-\x7f{_SURROGATE}]")


class Template:
    """A compiled chat template.

    Args:
        source: The jinja text.
        special_tokens: What `bos_token`, `eos_token` and the like stand for.
        variables: What else it is given in every rendering, as `enable_thinking`.

    Raises:
        ConfigError: The text is no jinja template, or a variable has a name of the rendering's.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.variables = dict(variables or {})
        self._check_given()
        # Frozen: a date that changed at midnight would change every prefix.
        now = datetime.datetime.now()
        environment = _environment()
        environment.globals["strftime_now"] = now.strftime
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        # Python refuses what it is compiled to in further ways: nesting, too many blocks.
        except Exception as error:
            raise ConfigError(
                "the chat template is no jinja template",
                value=f"{error}"[:300],
                remedy="check the model's chat_template.jinja",
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        generation_prompt: bool = False,
    ) -> str:
        """Text of a whole conversation.

        Args:
            messages: In OpenAI's form; this template may change them.
            tools: Function schemas; none is not the same as an empty list to some templates.
            generation_prompt: Whether the text ends with the opening of a model's turn.

        Raises:
            InvalidRequest: The template refuses the messages, fails, or makes too much of them.
        """
        try:
            with rendering():
                return self._template.render(
                    messages=list(messages),
                    tools=list(tools) or None,
                    add_generation_prompt=generation_prompt,
                    **self.special_tokens | self.variables,
                )
        except TooLarge as error:
            raise InvalidRequest(
                "the chat template makes too much of these messages",
                value=error,
                limit=f"{MAX_MADE} characters in one rendering",
                remedy="shorten the messages, or serve the model with its own template",
            ) from error
        # A template is a program of others: it may raise whatever Python can.
        except Exception as error:
            raise InvalidRequest(
                "the chat template refuses these messages",
                value=f"{type(error).__name__}: {error}"[:300],
                remedy="order the messages as the model's template asks for",
            ) from error

    def _check_given(self) -> None:
        if len(self.source) > _MAX_CHARS:
            raise ConfigError(
                "the chat template is too long",
                value=f"{len(self.source)} characters",
                limit=f"{_MAX_CHARS} characters",
                remedy="give the model its own chat_template.jinja",
            )
        taken = sorted(self.variables.keys() & set(_GIVEN))
        if taken:
            raise ConfigError(
                "the template's variables have names that every rendering gives",
                value=", ".join(taken),
                limit=f"any but {', '.join(_GIVEN)}",
                remedy="take them out of model.template_variables",
            )


def load_template(folder: str | Path, variables: Mapping[str, Any] | None = None) -> Template:
    """The template of a Hugging Face folder; ChatML where it has none.

    Args:
        folder: The folder.
        variables: What the template is given beside messages and tools.

    Raises:
        ConfigError: A file of the folder cannot be read, or the template is no jinja.
    """
    folder = Path(folder)
    settings = json_object(folder / "tokenizer_config.json")
    tokens = folder_tokens(folder)
    file = folder / "chat_template.jinja"
    if file.is_file():
        return Template(template_text(file), tokens, variables)
    found = settings.get("chat_template")
    if isinstance(found, list):
        # A model's variant for tools comes first: its primitives are tools.
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("tool_use") or named.get("default")
    if isinstance(found, str):
        return Template(found, tokens, variables)
    if found is None and not settings.get("chat_template"):
        return chatml(variables)
    raise ConfigError(
        "the model's chat_template is no text, nor a list that names one tool_use or default",
        value=f"{settings['chat_template']!r}"[:200],
        remedy=f"correct {folder / 'tokenizer_config.json'}, or write chat_template.jinja",
    )


def template_text(path: Path) -> str:
    """The text of a template's file.

    Raises:
        ConfigError: It is no text.
    """
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the chat template is no text in UTF-8",
            value=f"{path}: {error}",
            remedy="give the model's chat_template.jinja",
        ) from error


def chatml(variables: Mapping[str, Any] | None = None) -> Template:
    """For models without a template: ChatML, whose system message lists the tools."""
    return Template(_CHATML.read_text("utf-8"), variables=variables)


def folder_tokens(folder: Path) -> dict[str, str]:
    """`bos_token` and the like of a Hugging Face folder."""
    names = ("tokenizer_config.json", "special_tokens_map.json")
    return special_tokens(*(json_object(folder / name) for name in names))


def special_tokens(*settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like of tokenizer settings, the first that names each."""
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        for each in settings:
            token = each.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def json_object(path: Path) -> dict[str, Any]:
    """What a model's file of settings holds; nothing where there is none.

    Raises:
        ConfigError: It is no JSON.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "a tokenizer file is no JSON",
            value=f"{path}: {error}",
            remedy="fetch the model's file again",
        ) from error
    return found if isinstance(found, dict) else {}


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, which marks a model's turns for training: its body, as it stands."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    # Not the immutable sandbox that transformers uses: some templates append to their own lists.
    # Nothing of ours is at stake, since each rendering gets its own messages.
    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.add_filter("tojson", _to_json)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Lone surrogates pass: they are this package's own marks, never text.
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match.group())[1:-1]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
