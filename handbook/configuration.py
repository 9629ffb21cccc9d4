"""The configuration reference: every key of the pydantic models and the SDK's option classes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from handbook.tables import code, table
from harness_sdk.cli.demo.config import DemoConfig
from harness_sdk.cli.run_config import EvalConfig, RunConfig, VerifiersConfig
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.options import RetryPolicy, Timeouts, TlsOptions
from harness_sdk.tool_loop import ToolLoopOptions
from harness_sdk.types import Limits, SamplingOptions, StructuredOutput
from rollout_service.config import RolloutConfig
from trainer_service.config import TrainerConfig

COMMAND_MODELS: dict[str, type[BaseModel]] = {
    "rollout": RolloutConfig,
    "trainer": TrainerConfig,
    "up": StackConfig,
    "run": RunConfig,
    "eval": EvalConfig,
    "verifiers": VerifiersConfig,
    "demo": DemoConfig,
}
"""The model that each command resolves."""

SDK_OPTIONS: tuple[type, ...] = (
    SamplingOptions, Limits, StructuredOutput, ToolLoopOptions, RetryPolicy, Timeouts, TlsOptions,
)  # fmt: skip
"""Frozen dataclasses that callers of the SDK make."""

_HEAD = """# Configuration

Every key of every command, and every option of the SDK, read off the code.

A command resolves its settings in this order, the last one wins: defaults, the TOML file of
`--config`, the environment, dotted flags. The environment holds addresses and secrets alone:
`OCTOPUS_REDIS_URL`, `OCTOPUS_MQTT_URL`, `OCTOPUS_TOKEN`; the same names with `_FILE` give the path
of a file that holds the value. A secret among the flags is refused. A key `engine.max_tokens` is
the flag `--engine.max-tokens` and, in a file, `max_tokens` in the table `[engine]`. `none` unsets a
key that may be unset. What ends in `_s` is in seconds, in `_bytes` in bytes, in `_tokens` in tokens
of the model; the type says which numbers are allowed. Lists and tables are written as TOML. An
unknown key is an error that names the nearest one. `--dry-run` prints what was resolved, as TOML
or, with `--dry-run json`, as JSON; secrets are masked.
"""


def configuration_page() -> str:
    """The page."""
    lines = [_HEAD]
    for command, model in COMMAND_MODELS.items():
        lines += [f"## octopus {command}", "", inspect.cleandoc(model.__doc__ or ""), ""]
        lines += _model_tables(model, "")
    lines += [
        "## SDK options",
        "",
        "Frozen dataclasses of `harness_sdk`; all fields by keyword.",
        "",
    ]
    for options in SDK_OPTIONS:
        lines += _options_table(options)
    return "\n".join(lines) + "\n"


def _model_tables(model: type[BaseModel], prefix: str) -> Iterator[str]:
    fields = model.model_fields
    own = {name: field for name, field in fields.items() if _section(field) is None}
    if own:
        yield from table(
            ["key", "type", "default", "meaning"],
            [_model_row(prefix + name, field) for name, field in own.items()],
        )
    for name, field in fields.items():
        section = _section(field)
        if section is not None:
            yield f"### {prefix}{name}"
            yield ""
            yield inspect.cleandoc(section.__doc__ or "")
            yield ""
            yield from _model_tables(section, f"{prefix}{name}.")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _model_row(key: str, field: FieldInfo) -> list[str]:
    limits = _limits(field)
    kind = _kind(field.annotation)
    environment = field.json_schema_extra
    text = field.description or ""
    if isinstance(environment, dict):
        text += f" Environment: `{environment['env']}`."
    return [code(key), code(kind) + (f", {limits}" if limits else ""), _default(field), text]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    # One that is made anew each time, as the host's name, is told in the text.
    if field.default in (None, PydanticUndefined):
        return "unset"
    return code(str(field.default)) or "empty"


def _limits(field: FieldInfo) -> str:
    signs = {
        "ge": "from ",
        "gt": "above ",
        "le": "to ",
        "lt": "below ",
        "multiple_of": "multiple of ",
    }
    found = []
    for constraint in field.metadata:
        for name, sign in signs.items():
            value = getattr(constraint, name, None)
            if value is not None:
                found.append(f"{sign}{value}")
        pattern = getattr(constraint, "pattern", None)
        if pattern is not None:
            found.append(f"matching {code(pattern)}")
    return " ".join(found)


def _kind(annotation: Any) -> str:
    """A type as a reader writes it: no module paths, no `typing`."""
    text = annotation.__name__ if isinstance(annotation, type) and not hasattr(
        annotation, "__args__"
    ) else str(annotation)  # fmt: skip
    text = re.sub(r"typing\.|pathlib\._?l?o?c?a?l?\.?|pydantic\.types\.", "", text)
    text = re.sub(r"<class '([^']+)'>", r"\1", text)
    text = re.sub(r"Literal\[([^]]+)\]", lambda m: m.group(1).replace(", ", " | "), text)
    return text.replace(" | None", "").replace("'", "").replace("SecretStr", "secret")


def _options_table(options: type) -> Iterator[str]:
    yield f"### {options.__name__}"
    yield ""
    yield inspect.cleandoc(options.__doc__ or "").split("\n\nExample:")[0]
    yield ""
    texts = field_texts(options)
    rows = []
    for field in dataclasses.fields(options):
        kind = field.type if isinstance(field.type, str) else _kind(field.type)
        default = "" if field.default is dataclasses.MISSING else code(repr(field.default))
        rows.append([code(field.name), code(kind), default, texts.get(field.name, "")])
    yield from table(["field", "type", "default", "meaning"], rows)


def field_texts(options: type) -> dict[str, str]:
    """The string under each field of a class, which Python itself does not keep."""
    (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(options))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            texts[field.target.id] = str(below.value.value)
    return texts
