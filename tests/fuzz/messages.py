"""Messages drawn from their descriptors: fields that fit, fields that do not, and broken bytes.

Knows every message of the proto without naming one, so that a new field is fuzzed as it is added.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

Fitting = Callable[[random.Random, FieldDescriptor], Any]
"""A value for a field that a sane caller could send: None leaves it to chance, `ABSENT` out."""

ABSENT = object()

_TEXTS = (
    "", "x", "\0", "\n", " ", "root", "é" * 40, "\U0001f419", "../../etc/passwd", "{{ 7 * 7 }}",
    "<|im_end|>", "<|im_start|>assistant\n", "<tool_call>", "</tool_response>", "%s%n", "-1",
    "\u202e\ufeff", "\x1b[2J", "'; DROP TABLE x; --", "[" * 2000, '{"a": ' * 900, "x" * 20_000,
    "null", "[]", "{}", '{"type": "function"}', "nan", "1e999", "\ufffe", "a,b",
    r'<tool_call>{"name": "\ud83d", "arguments": {"\udc00": "\ud800"}}</tool_call>', "a\tb\r\n",
)  # fmt: skip
_FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 1e-300, 5e-324, 1e308, -1e308, float("nan"), float("inf"),
    float("-inf"), 2**53 + 1.0,
)  # fmt: skip
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (31, True),
    FieldDescriptor.CPPTYPE_INT64: (63, True),
    FieldDescriptor.CPPTYPE_UINT32: (32, False),
    FieldDescriptor.CPPTYPE_UINT64: (64, False),
}


def draw(rng: random.Random, descriptor: Descriptor, fitting: Fitting, wildness: float) -> Message:
    """A message.

    Args:
        rng: Source of all choices.
        descriptor: Of the message.
        fitting: Values that make sense.
        wildness: Share of the fields that get any value of their type instead.
    """
    message = GetMessageClass(descriptor)()
    chosen = {each.name: rng.choice(each.fields).name for each in descriptor.oneofs}
    for field in descriptor.fields:
        oneof = field.containing_oneof
        # An optional field is the only one of its own.
        if oneof and len(oneof.fields) > 1 and chosen[oneof.name] != field.name:
            continue
        if rng.random() < (0.3 if field.has_presence else wildness / 4):
            continue
        _fill(rng, message, field, fitting, wildness)
    return message


def _fill(
    rng: random.Random, message: Any, field: FieldDescriptor, fitting: Fitting, wildness: float
) -> None:
    wild = rng.random() < wildness
    whole = None if wild else fitting(rng, field)
    if whole is ABSENT:
        return

    def one() -> Any:
        if field.message_type is not None:
            return draw(rng, field.message_type, fitting, wildness)
        value = None if wild else fitting(rng, field)
        return any_value(rng, field) if value is None else value

    if field.is_repeated:
        count = rng.choice((0, 1, 2, 2, 3, 40)) if wild else rng.choice((1, 1, 2))
        values = whole if isinstance(whole, list) else [one() for _ in range(count)]
        getattr(message, field.name).extend(values)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(one())
    else:
        setattr(message, field.name, one())


def any_value(rng: random.Random, field: FieldDescriptor) -> Any:
    """A value of the field's type, at its ends more often than between them."""
    kind = field.cpp_type
    if kind in _BITS:
        bits, signed = _BITS[kind]
        low, high = (-(2**bits), 2**bits - 1) if signed else (0, 2**bits - 1)
        near = [low, low + 1, 0, 1, 2, 3, 7, 100, high - 1, high]
        return rng.choice([*near, rng.randint(low, high)])
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 9, 300)))
        return rng.choice(_TEXTS)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None
        return rng.choice((*field.enum_type.values_by_number, 77))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    return rng.choice(_FLOATS)


def broken(rng: random.Random, data: bytes) -> bytes:
    """`data` cut, flipped, doubled, with unknown fields, or with text that is no UTF-8."""
    kind = rng.randrange(7)
    if kind == 0:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 1 and data:
        flipped = bytearray(data)
        for _ in range(rng.choice((1, 1, 3, 20))):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return data + rng.randbytes(rng.randrange(1, 40))
    if kind == 3:
        return data + data
    if kind == 4:
        # An unknown field of each wire type, which every receiver has to skip.
        number = rng.choice((100, 18_999, 2**29 - 1))
        return data + _field(number, 2, _varint(3) + b"\xff\xfe\xfd") + _field(number, 0, b"\x01")
    if kind == 5:
        # A known number, as a length-delimited field that is no UTF-8 and no message.
        return data + _field(rng.randrange(1, 9), 2, _varint(4) + b"\xff\xfe\x80\x00")
    return data + _field(rng.randrange(1, 9), 1, struct.pack("<d", rng.choice(_FLOATS)))


def _field(number: int, wire_type: int, body: bytes) -> bytes:
    return _varint(number << 3 | wire_type) + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
