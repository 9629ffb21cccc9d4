"""The wire reference, from the comments of the `.proto` files as protoc reads them."""

from __future__ import annotations

import importlib.resources
import inspect
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from handbook.tables import code, table
from harness_sdk._wire import PROTOCOL_VERSION
from harness_sdk.errors import ERRORS_BY_NAME

Comments = dict[tuple[int, ...], str]
"""Text by the path of what it describes, as descriptor.proto numbers it."""

_MESSAGES, _ENUMS, _SERVICES, _FIELDS, _VALUES, _METHODS = 4, 5, 6, 2, 2, 2

_HEAD = f"""# Wire

gRPC and protobuf, package `octopus.rpc.v1`, protocol version {PROTOCOL_VERSION}. The files are
`proto/harness_sdk/rpc/v1/rollout.proto` and `record.proto`; this page is made from their comments.
Calls carry `authorization: Bearer TOKEN` where the service asks for a token. A failed call carries
an [ErrorDetail](#errordetail) in the trailing metadata `octopus-error-bin`, whose `kind` is one of
these [errors](#errors).
"""


def wire_page(proto: Path) -> str:
    """The page.

    Args:
        proto: Folder that imports are resolved against.
    """
    lines = [_HEAD]
    for file in reversed(_described(proto)):
        comments: Comments = {
            tuple(place.path): place.leading_comments or place.trailing_comments
            for place in file.source_code_info.location
        }
        lines += [f"## {Path(file.name).name}", ""]
        for index, service in enumerate(file.service):
            lines += _service(service, comments, index)
        for index, message in enumerate(file.message_type):
            lines += _message(message, comments, (_MESSAGES, index))
        for index, enum in enumerate(file.enum_type):
            lines += _enum(enum, comments, (_ENUMS, index))
    lines += ["## Errors", "", *_errors()]
    return "\n".join(lines) + "\n"


def _errors() -> Iterator[str]:
    """The errors of `harness_sdk.errors`, and the status that each travels under."""
    rows = [
        [
            code(name),
            code(error.status),
            "yes" if error.retryable else "no",
            inspect.cleandoc(error.__doc__ or "").partition("\n\n")[0],
        ]
        for name, error in ERRORS_BY_NAME.items()
    ]
    yield from table(["kind", "status", "same call may succeed later", "meaning"], rows)


def _described(proto: Path) -> Sequence[FileDescriptorProto]:
    names = sorted(str(path.relative_to(proto)) for path in proto.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        known = importlib.resources.files("grpc_tools") / "_proto"
        status = protoc.main(
            ["protoc", f"-I{proto}", f"-I{known}", "--include_source_info",
             f"--descriptor_set_out={out}", *names]
        )  # fmt: skip
        assert status == 0, f"protoc ended with {status}"
        return FileDescriptorSet.FromString(out.read_bytes()).file


def _service(service: ServiceDescriptorProto, comments: Comments, index: int) -> Iterator[str]:
    yield from _titled(f"Service {service.name}", _text(comments, (_SERVICES, index)))
    rows = []
    for at, method in enumerate(service.method):
        reply = _linked(method.output_type)
        rows.append([
            code(method.name),
            _linked(method.input_type),
            f"stream of {reply}" if method.server_streaming else reply,
            _text(comments, (_SERVICES, index, _METHODS, at)),
        ])  # fmt: skip
    yield from table(["call", "request", "reply", "meaning"], rows)


def _message(message: DescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield from _titled(message.name, _text(comments, path))
    if not message.field:
        yield "No fields."
        yield ""
        return
    rows = [
        [str(field.number), code(field.name), _kind(message, field),
         _text(comments, (*path, _FIELDS, at))]
        for at, field in enumerate(message.field)
    ]  # fmt: skip
    yield from table(["", "field", "type", "meaning"], rows)


def _enum(enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield from _titled(enum.name, _text(comments, path))
    rows = [
        [str(value.number), code(value.name), _text(comments, (*path, _VALUES, at))]
        for at, value in enumerate(enum.value)
    ]
    yield from table(["", "value", "meaning"], rows)


def _titled(name: str, text: str) -> Iterator[str]:
    yield from (f"### {name}", "", *([text, ""] if text else []))


def _kind(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    entry = next((e for e in message.nested_type if field.type_name.endswith(f".{e.name}")), None)
    if entry is not None:
        key, value = entry.field
        return f"map of {_plain(key)} to {_plain(value)}"
    kind = _plain(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return kind


def _plain(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _linked(field.type_name)
    return code(FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower())


def _linked(type_name: str) -> str:
    name = type_name.rsplit(".", 1)[-1]
    return f"[{name}](#{name.lower()})"


def _text(comments: Comments, path: tuple[int, ...]) -> str:
    return " ".join(comments.get(path, "").split())
