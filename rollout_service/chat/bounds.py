"""An end to how much and how long a template makes: jinja's sandbox bounds only what it reaches.

Everything that joins, repeats or pads text is counted before it is done, and a rendering has so
much to spend. Lists that a template takes apart again and again (`l[1:]`) are not counted. What
may come again looks at the time: rounds of loops, calls, tests, filters and what they yield.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from rollout_service.chat.time_limit import check_time

MAX_MADE = 1 << 27
"""Characters that one rendering may make: a message of 4 MB passes through some twenty steps."""
_MAX_BITS = 4096
"""Of a whole number."""
_PER_ITEM = 64
"""Characters that an item of a list stands for: about its size in bytes."""
_PER_OBJECT = 1024
"""Characters that an object stands for where all of it is walked through: the time that takes."""
_WIDTHS = re.compile(r"%[^a-zA-Z%]*\d{4,}|\{[^{}]*:[^{}]*\d{4,}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")
"""In a format: more than 999 places, or as many as an argument says."""

_PADDING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "batch", "slice",
     "round", "wordwrap", "tojson"}
)  # fmt: skip
"""Filters and methods that grow what they get by a number."""
_AS_TEXT = frozenset(
    {"string", "escape", "e", "forceescape", "pprint", "urlize", "urlencode", "xmlattr", "sum",
     "extend", "update"}
)  # fmt: skip
"""Those that walk through all of it in one step."""
_COMPARED = frozenset({"sort", "unique", "min", "max", "groupby", "dictsort"})
"""Filters that compare items, of which they make copies in small letters."""
_ESCAPED = 9
"""Characters that one becomes at most: percent-encoded UTF-8."""

_left: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("left", default=None)


class TooLarge(Exception):
    """A step would make more than is left to the rendering."""


@contextlib.contextmanager
def rendering() -> Iterator[None]:
    """One rendering, with all of `MAX_MADE` to spend."""
    token = _left.set([MAX_MADE])
    try:
        yield
    finally:
        _left.reset(token)


def spend(size: int) -> None:
    """Count `size` characters that are about to be made.

    Raises:
        TooLarge: Fewer are left.
    """
    left = _left.get() or [MAX_MADE]
    left[0] -= size
    if left[0] < 0:
        raise TooLarge(f"more than {MAX_MADE} characters made")


def extent(value: Any) -> int:
    """Characters of `value` as text, about; counting ends past `MAX_MADE`."""
    total, stack = 0, [value]
    while stack and total <= MAX_MADE:
        each = stack.pop()
        if isinstance(each, str | bytes):
            total += len(each)
        elif isinstance(each, dict):
            stack.extend(each)
            stack.extend(each.values())
        elif isinstance(each, list | tuple | set):
            stack.extend(each)
        total += _PER_OBJECT
    return total


class BoundedEnvironment(jinja2.sandbox.SandboxedEnvironment):
    """jinja's sandbox, whose operators, calls, filters and rounds of loops are counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # Folding constants would do at once, and uncounted, what rendering may never come to.
        super().__init__(optimized=False, finalize=_counted, **options)
        self.filters = {name: _bounded(name, each) for name, each in self.filters.items()}
        self.tests = {name: _timed(each) for name, each in self.tests.items()}
        # Random text, which no history can be made of, and as much of it as a number says.
        del self.globals["lipsum"]

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Give templates a filter, counted as the others are."""
        self.filters[name] = _bounded(name, function)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """What templates join their output with, that of blocks and macros too."""
        joined = []
        for piece in pieces:
            spend(len(piece))
            joined.append(piece)
        return "".join(joined)

    @staticmethod
    def step() -> Literal[True]:
        """A round of a loop."""
        check_time()
        return True

    @staticmethod
    def joined(parts: Sequence[Any]) -> str:
        """The operator `~`."""
        spend(sum(extent(part) for part in parts))
        return jinja2.runtime.str_join(parts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A field of a message at once; jinja tries an attribute first, and that it fails costs."""
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item, and each name of the path by which a filter sorts or groups."""
        check_time()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An intercepted operator."""
        if operator == "%" and isinstance(left, str):
            _spend_on_format(left, (right,))
        elif isinstance(left, int) and isinstance(right, int):
            _check_bits(operator, left, right)
        elif operator == "*":
            many, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int):
                spend(_length(many) * max(times, 0))
        elif operator == "+":
            spend(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a method or function."""
        check_time()
        # The sandbox puts a function of its own in front of str.format.
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes | int | list | dict | set):
            args = _foresee(name, owner, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        spend(_length(result))
        return result


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Compiles what no sandbox intercepts to calls: `~`, and the rounds of a loop."""

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        # Compiled as it is written: the node of a call would pass through the sandbox each round.
        step = jinja2.nodes.EnvironmentAttribute("step()")
        node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            # The rounds that it leaves out come before the body.
            node.test = jinja2.nodes.And(step, node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


BoundedEnvironment.code_generator_class = _CodeGenerator


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is counted."""
    # Some get the context or environment before the value.
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if len(args) > at:
            value, rest = args[at], args[at + 1 :]
            one_by_one = not isinstance(value, list | tuple | str | dict)
            if one_by_one and (name == "join" or name in _COMPARED):
                value = list(value)
            args = (*args[:at], value, *_foresee(name, value, rest, kwargs))
        result = function(*args, **kwargs)
        spend(_length(result))
        return _each_timed(result) if isinstance(result, types.GeneratorType) else result

    return bounded


def _timed(test: Callable[..., bool]) -> Callable[..., bool]:
    """A test that looks at the time: filters try it on item after item."""

    @functools.wraps(test)
    def timed(*args: Any, **kwargs: Any) -> bool:
        check_time()
        return test(*args, **kwargs)

    return timed


def _each_timed(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        check_time()
        yield item


def _foresee(
    name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Count what a filter or method makes of `value`; returns its arguments, to be used instead."""
    given = (*args, *kwargs.values())
    if name == "replace" and len(args) > 1 and isinstance(value, str):
        spend(value.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and isinstance(value, str) and args:
        items = list(args[0])
        spend(extent(items) + len(value) * len(items))
        return (items, *args[1:])
    elif name == "join":
        spend(extent(value) + _length(value) * extent(given))
    elif name in ("format", "format_map") and isinstance(value, str):
        _spend_on_format(value, given)
    elif name == "translate":
        spend(_length(value) * extent(given))
    elif name in _COMPARED:
        spend(extent(value))
    elif name == "striptags" and isinstance(value, str):
        # Each tag that it takes out copies the text.
        spend(len(value) * value.count("<"))
    elif name in _PADDING:
        spend(extent(value) * (1 + max((abs(n) for n in given if isinstance(n, int)), default=0)))
    elif name in _AS_TEXT:
        spend(_ESCAPED * extent((value, given)))
    return args


def _spend_on_format(text: str, args: tuple[Any, ...]) -> None:
    if _WIDTHS.search(text):
        raise TooLarge("a format with more than 999 places, or as many as an argument says")
    spend(len(text) + (text.count("%") + text.count("{")) * extent(args))


def _check_bits(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() * max(right, 0) if operator == "**" else 0
    if operator == "*":
        bits = left.bit_length() + right.bit_length()
    if bits > _MAX_BITS:
        raise TooLarge(f"a number of more than {_MAX_BITS} bits")


def _length(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return _PER_ITEM * len(value) if isinstance(value, list | tuple | dict | set) else 0


@jinja2.pass_context
def _counted(context: Any, value: Any) -> Any:
    """What is printed; that it asks for the context keeps jinja from folding constants there."""
    if not isinstance(value, str):
        spend(extent(value))
    return value
