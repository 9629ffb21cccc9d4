"""The generated references are whole: each call, field, key and public name, with its text."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import FileDescriptor

from handbook.pages import generated_pages
from harness_sdk.errors import ERRORS_BY_NAME
from harness_sdk.rpc.v1 import record_pb2, rollout_pb2
from tests.pages import ROOT

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


def test_wire_reference_names_errors_by_their_status() -> None:
    comments = "".join(path.read_text() for path in (ROOT / "proto").rglob("*.proto"))
    text = re.sub(r"\n\s*//", "", comments)
    named = re.findall(r"\b([A-Z][a-z]+(?:[A-Z][a-z]+)+) \(([A-Z_]+)[:)]", text)
    assert len(named) > 6
    assert all(ERRORS_BY_NAME[name].status == status for name, status in named), named
