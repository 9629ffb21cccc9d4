"""OpenTelemetry spans, wherever the process uses OpenTelemetry; elsewhere nothing, for nothing.

Only its API is called, and only once something else has imported it: an application that traces,
or a command that the OTEL_ variables ask to (`harness_sdk.cli.traces`). One trace holds one
episode. Its context travels as gRPC metadata and in the record's `traceparent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

Kind = Literal["internal", "client", "server", "consumer"]
Metadata = tuple[tuple[str, str], ...]

_NAME = "octopus"
_MAX_LINKS = 128
_NO_SPAN = contextlib.nullcontext()


class Span:
    """A span that its owner ends; where nobody traces, an object that does nothing."""

    __slots__ = ("_context", "_span")

    def __init__(self, span: Any = None, context: Any = None) -> None:
        self._span = span
        self._context = context

    @property
    def traceparent(self) -> str:
        """Its context in W3C's form; empty where nobody traces."""
        return _traceparent(self._context) if self._span is not None else ""

    @property
    def metadata(self) -> Metadata:
        """Its context for a call's metadata, as the process's propagators write it."""
        if self._span is None:
            return ()
        carrier: dict[str, str] = {}
        _otel("propagate").inject(carrier, context=self._context)
        return tuple((name.lower(), value) for name, value in carrier.items())

    def set(self, **attributes: str | int | float) -> None:
        """Set attributes, named `octopus.NAME`."""
        if self._span is not None:
            self._span.set_attributes(_named(attributes))

    def end(self, error: BaseException | None = None) -> None:
        """End it: as failed with an exception, as cancelled with a cancellation."""
        if self._span is None:
            return
        if isinstance(error, Exception):
            self._span.record_exception(error)
            self._span.set_status(_otel("trace").StatusCode.ERROR, f"{type(error).__name__}")
        elif isinstance(error, asyncio.CancelledError):
            self._span.set_attribute("octopus.cancelled", True)
        self._span.end()

    def context_below(self, current: Any) -> Any:
        """Context for a child: `current` where that is of the same trace, else this span's."""
        if self._span is None:
            return current
        trace = _otel("trace")
        ids = (trace.get_current_span(current).get_span_context(), self._span.get_span_context())
        return current if ids[0].trace_id == ids[1].trace_id else self._context

    def current(self) -> AbstractContextManager[None]:
        """Make it the parent of what begins within the block; it is not ended by it."""
        return _current(self._context) if self._span is not None else _NO_SPAN


def is_traced() -> bool:
    """Whether this process traces."""
    return "opentelemetry.trace" in sys.modules


def begin(
    name: str,
    *,
    within: Span | None = None,
    kind: Kind = "internal",
    metadata: Iterable[tuple[str, Any]] | None = None,
    links: Sequence[str] = (),
    **attributes: str | int | float,
) -> Span:
    """Begin a span.

    Args:
        name: What is done.
        within: Parent, unless a span of the same trace is current; None takes the current one.
        kind: Its side of a call.
        metadata: Of the call that it serves, which names its parent.
        links: `traceparent`s of spans of other traces that it is related to.
        attributes: Named `octopus.NAME`.
    """
    if not is_traced():
        return Span()
    context = _otel("context").get_current()
    if metadata is not None:
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        context = _otel("propagate").extract(carrier, context=context)
    elif within is not None:
        context = within.context_below(context)
    return _started(name, context, kind, attributes, links=links)


def spanning(
    name: str,
    *,
    within: Span | None = None,
    kind: Kind = "internal",
    metadata: Iterable[tuple[str, Any]] | None = None,
    links: Sequence[str] = (),
    **attributes: str | int | float,
) -> AbstractContextManager[Span]:
    """A span around a block, current in it; arguments as of `begin`.

    Not for the body of an async generator: its caller would see the span as current.
    """
    if not is_traced():
        return contextlib.nullcontext(Span())
    return _spanning(
        begin(name, within=within, kind=kind, metadata=metadata, links=links, **attributes)
    )


def add_past(
    name: str,
    traceparent: str,
    *,
    begun_s: float,
    links: Sequence[str] = (),
    kind: Kind = "internal",
    **attributes: str | int | float,
) -> None:
    """Add a span to the trace of `traceparent` that began at `begun_s` (Unix time), ended now."""
    if not is_traced() or not traceparent:
        return
    context = _w3c().extract({"traceparent": traceparent})
    _started(name, context, kind, attributes, begun_s=begun_s, links=links).end()


def trace_ids() -> tuple[str, str] | None:
    """Trace and span that are current, in hex; None where there is none."""
    if not is_traced():
        return None
    context = _otel("trace").get_current_span().get_span_context()
    return (f"{context.trace_id:032x}", f"{context.span_id:016x}") if context.is_valid else None


def _otel(part: str) -> Any:
    """A module of opentelemetry-api, which the others have brought in; imported by name, for the
    package is not one of ours to need."""
    return importlib.import_module(f"opentelemetry.{part}")


@contextlib.contextmanager
def _spanning(span: Span) -> Generator[Span]:
    try:
        with span.current():
            yield span
    except BaseException as error:
        span.end(error)
        raise
    span.end()


def _w3c() -> Any:
    return _otel("trace.propagation.tracecontext").TraceContextTextMapPropagator()


def _started(
    name: str,
    context: Any,
    kind: Kind,
    attributes: Mapping[str, str | int | float],
    *,
    begun_s: float | None = None,
    links: Sequence[str] = (),
) -> Span:
    trace = _otel("trace")
    span = trace.get_tracer(_NAME).start_span(
        name,
        context=context,
        kind=trace.SpanKind[kind.upper()],
        attributes=_named(attributes),
        links=[_link(each) for each in links[:_MAX_LINKS] if each],
        start_time=int((time.time() if begun_s is None else begun_s) * 1e9),
    )
    return Span(span, trace.set_span_in_context(span, context))


def _link(traceparent: str) -> Any:
    trace = _otel("trace")
    context = _w3c().extract({"traceparent": traceparent})
    return trace.Link(trace.get_current_span(context).get_span_context())


def _traceparent(context: Any) -> str:
    carrier: dict[str, str] = {}
    _w3c().inject(carrier, context=context)
    return carrier.get("traceparent", "")


def _named(attributes: Mapping[str, str | int | float]) -> dict[str, str | int | float]:
    return {f"octopus.{name}": value for name, value in attributes.items() if value != ""}


@contextlib.contextmanager
def _current(context: Any) -> Generator[None]:
    contexts = _otel("context")
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)
