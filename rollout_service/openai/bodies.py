"""What the bodies of both endpoints share: reading one, naming what is wrong, sampling, tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from harness_sdk.types import SamplingOptions, StructuredOutput
from rollout_service.openai.ask import SessionNames
from rollout_service.openai.errors import ParameterError
from rollout_service.sessions import SessionOptions

B = TypeVar("B", bound=BaseModel)

_MAX_NAME_CHARS = 256

# Below, logits over temperature leave float32's precision (rollout_service/sessions/planning.py).
_LEAST_TEMPERATURE = 1e-3

# They say nothing about what is sampled here.
_IGNORED = frozenset({
    "include", "max_tool_calls", "prediction", "prompt_cache_key",
    "prompt_cache_retention", "reasoning", "reasoning_effort", "safety_identifier",
    "service_tier", "store", "stream_options", "truncation", "verbosity",
})  # fmt: skip
# Values of what is not served that ask for nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "background": (False,), "best_of": (1,), "frequency_penalty": (0,),
    "function_call": ("auto", "none"), "functions": ([],), "logit_bias": ({},), "min_p": (0,),
    "modalities": (["text"],), "presence_penalty": (0,), "repetition_penalty": (1,),
    "top_logprobs": (0,),
}  # fmt: skip


class Part(BaseModel):
    """A piece of a message's content."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "input_text", "output_text"]
    text: str


def _text(content: Any) -> Any:
    """Content as one text; what is no text is left to the validation."""
    if not isinstance(content, list):
        return "" if content is None else content
    return "".join(Part.model_validate(part).text for part in content)


Text = Annotated[str, BeforeValidator(_text)]
"""A text, or a list of text parts."""


class Body(BaseModel):
    """What both endpoints take; what neither serves is refused unless it asks for nothing."""

    model_config = ConfigDict(extra="allow", strict=False)

    model: str = ""
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None


def read_body(kind: type[B], data: bytes) -> B:
    """A request's body.

    Raises:
        ParameterError: It is no JSON object, or a parameter cannot be served.
    """
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ParameterError("the body is no JSON", value=error) from error
    if not isinstance(value, dict):
        raise ParameterError("the body is no JSON object", value=type(value).__name__)
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise _parameter_error(error) from error
    for name, given in (body.model_extra or {}).items():
        _check_extra(name, given)
    return body


def session_names(body: Body, headers: Mapping[str, str]) -> SessionNames:
    """Where the request belongs: its headers, then its metadata, then its user.

    Raises:
        ParameterError: A name that no header or address could carry.
    """
    metadata = body.metadata or {}

    def name(key: str, last: str = "") -> str:
        found = headers.get(f"X-Octopus-{key.title()}") or metadata.get(key) or last
        _check_name(key, found)
        return found

    return SessionNames(
        session=name("session", body.user or ""), task=name("task"), group=name("group")
    )


def sampling_options(
    body: Body,
    options: SessionOptions,
    *,
    max_tokens: int | None,
    max_name: str,
    stop: tuple[str, ...] = (),
    seed: int | None = None,
    structured: StructuredOutput | None = None,
) -> SamplingOptions:
    """How the turn is sampled.

    Raises:
        ParameterError: A parameter is out of range, or cannot be trained on and that is refused.
    """
    sampling = SamplingOptions(
        max_tokens=options.thread_budget if max_tokens is None else max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        # Some servers write "keep every token" as -1.
        top_k=max(body.top_k or 0, 0),
        stop=stop,
        seed=seed,
        structured=structured,
    )
    heat = sampling.temperature
    _require(max_name, sampling.max_tokens, sampling.max_tokens >= 1, "1 or more")
    _require(
        "temperature",
        heat,
        heat == 0 or _LEAST_TEMPERATURE <= heat <= 2,
        f"0 (greedy), or {_LEAST_TEMPERATURE} to 2",
    )
    _require("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0, at most 1")
    if not options.allow_truncated_sampling:
        why = "its mask is not recorded and cannot be trained on; for evaluation alone, serve with "
        why += "--limits.allow-truncated-sampling true"
        _require("top_p", sampling.top_p, sampling.top_p == 1, "1", why)
        _require("top_k", sampling.top_k, sampling.top_k == 0, "0", why)
        given = structured.kind if structured is not None else ""
        _require("response_format", given, structured is None, "text", why)
    return sampling


def structured_output(form: dict[str, Any] | None, param: str) -> StructuredOutput | None:
    """The constraint behind a format: `{"type": ..., "json_schema": {"schema": ...}}`.

    Raises:
        ParameterError: A format that is not served.
    """
    kind = (form or {}).get("type", "text")
    if form is None or kind == "text":
        return None
    # The Responses API has the schema beside the type.
    schema = form.get("json_schema", form).get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise ParameterError(
            f"{param} is not served", param=param, value=kind, limit="text, json_schema"
        )
    return StructuredOutput(json_schema=json.dumps(schema))


def tools_json(functions: Iterable[Mapping[str, Any]]) -> str:
    """The tool list as sessions take it, laid out in one way; empty without tools."""
    tools = [{"type": "function", "function": function} for function in functions]
    names = [tool["function"]["name"] for tool in tools]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ParameterError(
            "tools hold a name more than once",
            param="tools",
            value=", ".join(double),
            limit="each name once",
        )
    return json.dumps(tools, ensure_ascii=False) if tools else ""


def _require(param: str, value: object, good: bool, limit: str, remedy: str = "") -> None:
    if not good:
        raise ParameterError(
            f"{param} is not served" if remedy else f"{param} is out of range",
            param=param,
            value=value,
            limit=limit,
            remedy=remedy,
        )


def _check_name(key: str, name: str) -> None:
    # Replies carry it in a header, closing in a path, and records in UTF-8.
    if len(name) > _MAX_NAME_CHARS or not name.isprintable() or name in (".", ".."):
        raise ParameterError(
            f"the {key}'s name cannot be used",
            param=key,
            value=f"{len(name)} characters: {name!r:.80}",
            limit=f"{_MAX_NAME_CHARS} printable characters, not . or ..",
            remedy="name it otherwise, by a hash if need be",
        )


def _check_extra(name: str, value: object) -> None:
    if name in _IGNORED or value is None or value in _NEUTRAL.get(name, ()):
        return
    neutral = _NEUTRAL.get(name)
    raise ParameterError(
        f"{name} is not served" if neutral else f"unknown parameter {name}",
        param=name,
        value=json.dumps(value)[:200],
        limit=", ".join(json.dumps(each) for each in neutral) if neutral else "",
        remedy="leave it out",
    )


def _parameter_error(error: ValidationError) -> ParameterError:
    first = error.errors(include_url=False)[0]
    # pydantic names the branches of a union in the path, as `str` or `list[Part]`.
    path = [str(part) for part in first["loc"] if not (isinstance(part, str) and "[" in part)]
    param = ".".join(path)
    return ParameterError(
        f"{param or 'the body'} is not valid",
        param=param,
        value=f"{first.get('input')!r:.200}",
        limit=first["msg"],
    )
