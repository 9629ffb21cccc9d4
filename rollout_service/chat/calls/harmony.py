"""gpt-oss: messages with a channel (analysis, commentary, final); a recipient makes one a call."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from rollout_service.chat.calls.answer import Family, read_call
from rollout_service.chat.calls.json_text import arguments_text, finish_arguments
from rollout_service.chat.calls.output import Call, Output
from rollout_service.chat.calls.reader import Broken, Reader, Waiting, closing, pass_until

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|call|>", "<|end|>", "<|return|>")
_FORM = f"{_CHANNEL}commentary to=functions.NAME <|constrain|>json{_MESSAGE}{{...}}<|call|>"
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")


def _parse(reader: Reader, out: Output, in_reasoning: bool) -> Waiting[None]:
    if in_reasoning:
        yield from _pass_body(reader, out.reasoning)
    # The prompt ends behind the role, so that the first header has none.
    role_follows = False
    while True:
        header: list[str] = []
        marker = yield from pass_until(reader, header.append, (_MESSAGE, _START, *_ENDS))
        reader.take(len(marker))
        if marker == _MESSAGE:
            yield from _read_message(reader, out, "".join(header))
        else:
            _leave_header(out, "".join(header), role_follows)
        if not marker:
            return
        role_follows = marker == _START


def _read_message(reader: Reader, out: Output, header: str) -> Waiting[None]:
    channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
    if recipient is not None:
        call = out.call(_FORM)
        read = functools.partial(_read_call, recipient=recipient[1])
        yield from read_call(reader, call, read, end=_ENDS, others=(_START,))
    elif channel is not None and channel[1] == "analysis":
        yield from _pass_body(reader, out.reasoning)
    else:
        yield from _pass_body(reader, out.text)


def _leave_header(out: Output, header: str, role_follows: bool) -> None:
    """What stands where a header should, without a message behind it."""
    if _CHANNEL not in header and not role_follows:
        out.text(header)
    elif _RECIPIENT.search(header):
        out.call(_FORM).fail(Broken(f"the call has no {_MESSAGE}"))


def _pass_body(reader: Reader, write: Callable[[str], None]) -> Waiting[None]:
    write("\n")
    yield from pass_until(reader, write, (*_ENDS, _START))


def _read_call(reader: Reader, call: Call, recipient: str) -> Waiting[None]:
    call.begin_checked(recipient.removeprefix("functions."))
    # The token that ends a call is the turn's stop token, which the text does not hold.
    ends = (*_ENDS, _START)
    text = yield from arguments_text(reader, call, ends, may_be_cut=True)
    yield from closing(reader, _ENDS, (_START,))
    finish_arguments(call, text)


HARMONY = Family(
    name="harmony",
    parse=_parse,
    taught_by=(_CHANNEL,),
    reasoning={f"{_CHANNEL}analysis{_MESSAGE}": "<|end|>"},
)
