"""Llama 3.x and 4: a bare JSON object at a line's beginning, or what follows `<|python_tag|>`."""

from __future__ import annotations

import re

from rollout_service.chat.calls.answer import THINK, Family, read_call, tagged
from rollout_service.chat.calls.json_text import finish_object, json_text, loads
from rollout_service.chat.calls.output import Call, Output
from rollout_service.chat.calls.reader import (
    Broken,
    Fault,
    Reader,
    Waiting,
    accept,
    rest,
    spaces,
)

_TAG = "<|python_tag|>"
# Llama 4 puts them around what stands beside calls, and around calls.
_UNSAID = ("<|python_start|>", "<|python_end|>")
_FORM = '{"name": ..., "parameters": {...}}'
_HEADS = ('{"name":', '{"type":"function"', '{"function":', '{"parameters":', '{"arguments":')
# An answer in JSON may have a "name" too: only arguments behind it make it a call for sure.
_NAME_AND_ARGUMENTS = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]{1,200})"\s*,\s*"(?:parameters|arguments)"\s*:'
)
_MAX_HEAD = 200
_BUILT_IN = re.compile(r"\s*([\w.]+)\.call\((.*)\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r'\s*(\w+)\s*=\s*"(.*?)"\s*(?:,(?=\s*\w+\s*=)|$)', re.DOTALL)


def _read_brace(reader: Reader, out: Output) -> Waiting[None]:
    if reader.line_is_blank and (yield from _looks_like_call(reader)):
        yield from _read_json(reader, out)
    else:
        out.text(reader.take(1))


def _read_tagged(reader: Reader, out: Output) -> Waiting[None]:
    reader.take(len(_TAG))
    yield from spaces(reader)
    if reader.text.startswith("{"):
        yield from _read_json(reader, out, tagged=True)
    else:
        yield from read_call(reader, out.call(_FORM), _read_built_in, end=(), others=(_TAG,))


def _looks_like_call(reader: Reader) -> Waiting[bool]:
    while True:
        head = "".join(reader.text[:_MAX_HEAD].split())
        if head.startswith(_HEADS):
            return True
        open_still = any(known.startswith(head) for known in _HEADS)
        if not open_still or reader.ended or len(reader.text) >= _MAX_HEAD:
            return False
        yield


def _read_json(reader: Reader, out: Output, *, tagged: bool = False) -> Waiting[None]:
    """An object that is a call, or an answer in JSON after all."""
    answers: list[str] = []
    call = out.call(_FORM)

    def read(reader: Reader, call: Call) -> Waiting[None]:
        text = yield from json_text(reader, call, _NAME_AND_ARGUMENTS)
        if tagged or call.name or _is_call(out, text):
            finish_object(call, text)
        else:
            answers.append(text)

    yield from read_call(reader, call, read, end=(), others=("\n{", _TAG))
    if answers:
        out.take_back_call()
        out.text(answers[0])
        return
    yield from spaces(reader)
    if (yield from accept(reader, ";")):
        # The next call may stand on the same line.
        reader.line_is_blank = True


def _is_call(out: Output, text: str) -> bool:
    try:
        body = loads(text)
    except Fault:
        return True
    if isinstance(body.get("function"), dict):
        return True
    return "parameters" in body or "arguments" in body or out.knows(body.get("name"))


def _read_built_in(reader: Reader, call: Call) -> Waiting[None]:
    """`name.call(key="value")`, values as they are, without escapes."""
    written = _BUILT_IN.fullmatch((yield from rest(reader)))
    if written is None:
        raise Broken(f"neither JSON nor NAME.call(...) follows {_TAG}")
    call.begin_checked(written[1])
    arguments, at = dict[str, str](), 0
    while at < len(written[2].rstrip()):
        found = _ARGUMENT.match(written[2], at)
        if found is None:
            raise Fault('an argument is not written as KEY="VALUE"')
        arguments[found[1]], at = found[2], found.end()
    call.finish(arguments)


LLAMA_JSON = Family(
    name="llama_json",
    parse=tagged({"{": _read_brace, _TAG: _read_tagged}, dropped=_UNSAID),
    taught_by=(_TAG, '"parameters": dictionary', "<|start_header_id|>ipython"),
    reasoning=THINK,
)
