"""DeepSeek V3, R1 and V3.1: calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`."""

from __future__ import annotations

from rollout_service.chat.calls.answer import THINK, Family, read_call, tagged
from rollout_service.chat.calls.json_text import arguments_text, finish_arguments
from rollout_service.chat.calls.output import Call, Output
from rollout_service.chat.calls.reader import Reader, Waiting, accept, closing, spaces, until

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_OPEN, _CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_TYPE = "function"
# V3 and R1 write the type, then the name; V3.1 the name alone.
_TYPED_FORM = (
    f"{_SECTION}{_OPEN}{_TYPE}{_SEPARATOR}NAME\n```json\n{{...}}\n```{_CLOSE}{_SECTION_END}"
)
_NAMED_FORM = f"{_SECTION}{_OPEN}NAME{_SEPARATOR}{{...}}{_CLOSE}{_SECTION_END}"


def _read_tool_call(reader: Reader, out: Output) -> Waiting[None]:
    reader.take(len(_OPEN))
    others = (_OPEN, _SECTION_END)
    yield from read_call(reader, out.call(_NAMED_FORM), _read, end=(_CLOSE,), others=others)


def _read(reader: Reader, call: Call) -> Waiting[None]:
    others = (_OPEN, _SECTION_END)
    name = yield from until(reader, _SEPARATOR, _CLOSE, *others)
    yield from spaces(reader)
    typed = name.strip() == _TYPE and not reader.text.startswith("{")
    if typed:
        call.form = _TYPED_FORM
        name = yield from until(reader, "\n", _CLOSE, *others)
    call.begin_checked(name)
    yield from spaces(reader)
    fenced = yield from accept(reader, "```json", "```")
    text = yield from arguments_text(reader, call, ("```", _CLOSE, *others))
    if fenced:
        yield from spaces(reader)
        yield from accept(reader, "```")
    yield from closing(reader, (_CLOSE,), others)
    finish_arguments(call, text)


DEEPSEEK = Family(
    name="deepseek",
    parse=tagged({_OPEN: _read_tool_call}, dropped=(_SECTION, _SECTION_END)),
    taught_by=(_SECTION,),
    reasoning=THINK,
)
