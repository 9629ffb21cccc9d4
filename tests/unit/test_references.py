"""The generated references are whole: each call, field, key and public name, with its text."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FileDescriptor
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import harness_sdk
from handbook.configuration import COMMAND_MODELS, SDK_OPTIONS
from handbook.pages import generated_pages
from harness_sdk.errors import ERRORS_BY_NAME
from harness_sdk.rpc.v1 import record_pb2, rollout_pb2
from tests.pages import ROOT

_LIMITS = ("ge", "gt", "le", "lt", "multiple_of", "pattern")
WIRE: tuple[FileDescriptor, ...] = (rollout_pb2.DESCRIPTOR, record_pb2.DESCRIPTOR)


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return generated_pages(ROOT)


def _sections(page: str) -> dict[str, str]:
    """What stands below each heading of the third level."""
    parts = re.split(r"^### (.+)\n", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _rows(file: FileDescriptor) -> Iterator[tuple[str, str]]:
    """Section of the wire reference, and how a row in it begins."""
    for name, message in file.message_types_by_name.items():
        for field in message.fields:
            yield name, f"| {field.number} | `{field.name}` |"
    for name, enum in file.enum_types_by_name.items():
        for value in enum.values:
            yield name, f"| {value.number} | `{value.name}` |"
    for name, service in file.services_by_name.items():
        for method in service.methods:
            yield f"Service {name}", f"| `{method.name}` |"


def test_wire_reference_tells_every_call_and_field(generated: dict[str, str]) -> None:
    sections = _sections(generated["reference/wire.md"])
    expected = [row for file in WIRE for row in _rows(file)]
    assert len(expected) > 200
    missing = []
    for section, begin in expected:
        found = [row for row in sections[section].splitlines() if row.startswith(begin)]
        if len(found) != 1 or found[0].endswith("|  |"):
            missing.append(f"{section}: {begin}")
    assert not missing, "comment in proto/ what has no text:\n" + "\n".join(missing)
    untold = [name for name, text in sections.items() if not re.match(r"\n[^|\n]", text)]
    assert not untold, f"comment in proto/ {untold}"


def test_wire_reference_names_errors_by_their_status(generated: dict[str, str]) -> None:
    comments = "".join(path.read_text() for path in (ROOT / "proto").rglob("*.proto"))
    text = re.sub(r"\n\s*//", "", comments)
    named = re.findall(r"\b([A-Z][a-z]+(?:[A-Z][a-z]+)+) \(([A-Z_]+)[:)]", text)
    assert len(named) > 6
    page = generated["reference/wire.md"].partition("## Errors\n")[2]
    for name, error in ERRORS_BY_NAME.items():
        assert re.search(rf"^\| `{name}` \| `{error.status}` \| (yes|no) \| \w", page, re.MULTILINE)
    assert all(ERRORS_BY_NAME[name].status == status for name, status in named), named


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    assert inspect.cleandoc(vars(model).get("__doc__") or ""), f"{model} has no docstring"
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


@pytest.mark.parametrize("command", COMMAND_MODELS)
def test_configuration_reference_tells_every_key(command: str, generated: dict[str, str]) -> None:
    page = generated["reference/configuration.md"]
    part = page.partition(f"## octopus {command}\n")[2].partition("\n## ")[0]
    for key, field in _fields(COMMAND_MODELS[command]):
        row = re.findall(rf"^\| `{key}` \| `[^`]+`(.*?) \| ([^|]+) \| (.+) \|$", part, re.MULTILINE)
        assert len(row) == 1, f"{key}: its type, its default or its text is missing"
        is_number = field.annotation in (int, float) and not key.endswith("seed")
        assert row[0][0] or not is_number, f"{key} is a number without a limit"
        limits = [getattr(each, name, None) for each in field.metadata for name in _LIMITS]
        assert all(str(limit) in row[0][0] for limit in limits if limit is not None), key


def _public(module: Any) -> Iterator[tuple[str, object]]:
    for name in module.__all__:
        value = getattr(module, name)
        yield name, value
        for member, of in vars(value).items() if inspect.isclass(value) else ():
            is_called = isinstance(of, property | classmethod) or inspect.isfunction(of)
            if is_called and not member.startswith("_"):
                yield f"{name}.{member}", of


def _texts_of_values() -> set[str]:
    """Names of the SDK's constants and types that have a string below them."""
    found = set()
    for path in (ROOT / "harness_sdk").glob("*.py"):
        body = ast.parse(path.read_text("utf-8")).body
        for value, below in itertools.pairwise(body):
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                target = value.targets[0] if isinstance(value, ast.Assign) else value
                target = getattr(target, "target", target)
                found.add(target.id if isinstance(target, ast.Name) else "")
    return found


def test_every_public_name_of_the_sdk_has_a_docstring() -> None:
    below = _texts_of_values()
    for name, value in _public(harness_sdk):
        own = getattr(value, "__doc__", None) or ""
        described = callable(value) or isinstance(value, property | classmethod)
        # A dataclass without a docstring gets its signature for one.
        assert name in below or (described and own and not own.startswith(f"{name}(")), name


def test_every_public_name_of_the_sdk_is_in_a_reference() -> None:
    page = (ROOT / "docs" / "reference" / "sdk.md").read_text("utf-8")
    listed = set(re.findall(r"^::: harness_sdk\.(?:errors\.)?(\w+)$", page, re.MULTILINE))
    options = {each.__name__ for each in SDK_OPTIONS}
    assert set(harness_sdk.__all__) - listed == options
    assert set(ERRORS_BY_NAME) <= listed
