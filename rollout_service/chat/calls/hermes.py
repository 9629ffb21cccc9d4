"""Hermes, Qwen2.5, Qwen3, SmolLM2, Granite 4: a JSON object in `<tool_call>` tags."""

from __future__ import annotations

from rollout_service.chat.calls.answer import THINK, Family, read_call, tagged
from rollout_service.chat.calls.json_text import finish_object, json_text
from rollout_service.chat.calls.output import Call, Output
from rollout_service.chat.calls.reader import Reader, Waiting, closing

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FORM = f'{OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE}'


def read_tool_call(reader: Reader, out: Output) -> Waiting[None]:
    """Read `<tool_call>{...}</tool_call>`."""
    reader.take(len(OPEN))
    yield from read_call(reader, out.call(_FORM), _read, end=(CLOSE,), others=(OPEN,))


def _read(reader: Reader, call: Call) -> Waiting[None]:
    text = yield from json_text(reader, call)
    yield from closing(reader, (CLOSE,), (OPEN,))
    finish_object(call, text)


HERMES = Family(
    name="hermes", parse=tagged({OPEN: read_tool_call}), taught_by=(OPEN,), reasoning=THINK
)
